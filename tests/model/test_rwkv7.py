"""RWKV-7 from folders and GGUF files through `LLM`, against an implementation of its formulas (`rwkv_oracle`)."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rwkv_oracle import SIZES, Oracle, Tensors, write_model
from test_world_tokens import write_vocabulary
from whole_prompt import prompt_logits

from bifolio import LLM, SamplingParams
from bifolio.errors import BifolioError, ConfigError, UnsupportedModelError
from bifolio.model.families import family_of_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.model.loader import load_model
from bifolio.quant import QuantFormat
from helpers import cpu_kernel_names, fresh_folder, log_softmax, random_prompt
from hybrid_models import spaced_checkpoints

TOLERANCE = 1e-3
KERNELS = [name for name in ("native", "reference") if name in cpu_kernel_names()]
PROMPTS = [random_prompt(length, seed=length, vocab_size=SIZES["vocab_size"]) for length in (37, 5, 1, 70)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@cache
def model_files() -> tuple[Tensors, Path, Path]:
    """The tensors of a small model, its folder and its GGUF file."""
    folder = fresh_folder("rwkv7")
    tensors = write_model(folder)
    write_gguf(folder.parent / "rwkv7.gguf", load_model(folder), QuantFormat.F32)
    return tensors, folder, folder.parent / "rwkv7.gguf"


def opened(path: Path, kernels: str, **options: Any) -> LLM:
    with spaced_checkpoints(8):
        return LLM(str(path), kernels=kernels, block_size=4, max_model_len=192, kv_cache_dtype="f32", **options)


def check(output: Any) -> list[int]:
    """The tokens of an answer, each of which the oracle scores highest; logprobs are those of the oracle."""
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    expected = log_softmax(Oracle(model_files()[0]).all_logits([*prompt, *answer])[:-1])
    found = [one.logprob for one in output.prompt_logprobs[1:]] if output.prompt_logprobs else []
    found += [one.logprob for one in output.outputs[0].logprobs]
    wanted = [row[token] for row, token in zip(expected, [*prompt, *answer][1:], strict=True)][-len(found) :]
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert answer == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
    return answer


def test_logits_are_those_of_the_formulas() -> None:
    tensors, folder, file = model_files()
    expected = Oracle(tensors).all_logits(PROMPTS[0])
    for path in (folder, file):
        np.testing.assert_allclose(prompt_logits(load_model(path).weights, PROMPTS[0]), expected, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("entry", ["folder", "gguf"])
def test_answers_of_a_batch_are_those_of_the_formulas(entry: str, kernels: str) -> None:
    """A batch, a second turn behind each answer, a repeated prompt and a fork."""
    _, folder, file = model_files()
    llm = opened(folder if entry == "folder" else file, kernels)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    answers = [check(output) for output in outputs]
    plain = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    longer = [[*prompt, *answer, 7, 9, 11] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    turns = llm.generate([{"prompt_token_ids": prompt} for prompt in [*longer, PROMPTS[3]]], plain, use_tqdm=False)
    for output in turns:
        check(output)
    assert turns[3].num_cached_tokens >= len(PROMPTS[3])
    assert turns[4].num_cached_tokens > 0
    branch = llm.open({"prompt_token_ids": PROMPTS[0]})
    for number, fork in enumerate(branch.fork(2)):
        fork.append([number, 3], to_answer=False)
        check(fork.generate(plain))


@pytest.mark.full
@pytest.mark.parametrize("kernels", [name for name in ("torch",) if name in cpu_kernel_names()])
def test_answers_of_torch(kernels: str) -> None:
    for output in opened(model_files()[1], kernels).generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], GREEDY, use_tqdm=False
    ):
        check(output)


def test_a_folder_and_a_gguf_file_keep_all_tensors(tmp_path: Path) -> None:
    tensors, _, file = model_files()
    write_folder(tmp_path / "back", load_model(file), QuantFormat.F32)
    written = open_safetensors(tmp_path / "back" / "model.safetensors").tensors
    assert written.keys() == tensors.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(np.asarray(tensor.dequantize()), tensors[name])


def test_low_rank_products_stay_dense_in_quantised_files(tmp_path: Path) -> None:
    _, folder, _ = model_files()
    write_gguf(tmp_path / "q.gguf", load_model(folder), QuantFormat.Q8_0)
    model = load_model(tmp_path / "q.gguf")
    rwkv = model.weights.layers[1].recurrent.rwkv  # type: ignore[union-attr]
    assert rwkv is not None
    assert {linear.parts[-1].format for linear in rwkv.linears[2:]} == {QuantFormat.F32}
    assert rwkv.key.parts[0].format == QuantFormat.Q8_0
    found, exact = prompt_logits(model.weights, PROMPTS[1]), prompt_logits(load_model(folder).weights, PROMPTS[1])
    assert 0 < np.abs(found - exact).max() < 0.2


def test_the_tokenizer_of_a_folder_is_kept_by_both_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model_files()[1], folder)
    write_vocabulary(folder)
    text, model = "there the world! 你", load_model(folder)
    ids = model.require_tokenizer().encode(text)
    write_folder(tmp_path / "back", model, QuantFormat.F32)
    assert load_model(tmp_path / "back").require_tokenizer().encode(text) == ids
    assert model.require_tokenizer().decode(ids) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn": {"layers": [1]}}, "layers of attention is not supported"),
        ({"norm_first": False}, "norm_first is False"),
        ({"value_dim": [64, 32, 32]}, "value_dim other than 32"),
        ({"value_dim": 64}, "value_dim other than 32"),
        ({"head_dim": 7}, "32 values of RWKV-7 cannot be shared by heads of 7"),
        ({"hidden_act": "mish"}, "the activation 'mish'"),
        ({"decay_low_rank_dim": 0}, "decay_low_rank_dim"),
    ],
)
def test_other_networks_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        config_from_hf({**SIZES, **fields})


def test_fields_that_a_folder_leaves_out_follow_from_the_size() -> None:
    left_out = dict.fromkeys(("intermediate_size", "decay_low_rank_dim", "gate_low_rank_dim", "v_low_rank_dim"))
    config = config_from_hf({**SIZES, "hidden_size": 1024, "head_dim": None, "num_heads": 16, **left_out})
    assert config.recurrent is not None
    assert (config.intermediate_size, config.recurrent.heads, config.recurrent.ranks) == (4096, 16, (64, 5, 160, 64))


def test_gguf_files_have_one_epsilon_of_head_norms(tmp_path: Path) -> None:
    write_model(tmp_path / "m", norm_eps=1e-5)
    with pytest.raises(UnsupportedModelError, match="GGUF cannot describe a rwkv7 model"):
        write_gguf(tmp_path / "m.gguf", load_model(tmp_path / "m"), QuantFormat.F32)


def test_other_versions_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'rwkv6' is not supported"):
        config_from_hf({**SIZES, "model_type": "rwkv6"})
    for name in ("arwkv7", "rwkv6"):
        with pytest.raises(UnsupportedModelError, match=f"the architecture '{name}' is not supported"):
            family_of_gguf(name, "m.gguf")


def test_parameters_are_counted() -> None:
    tensors, folder, _ = model_files()
    assert load_model(folder).config.num_parameters == sum(tensor.size for tensor in tensors.values())


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        LLM(str(model_files()[1]), tensor_parallel_size=2)
