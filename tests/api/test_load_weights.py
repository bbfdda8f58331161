"""`LLM.load_weights`: answers are those of an engine that was built with the new weights, also in the middle of one."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams, write_delta
from bifolio.errors import ConfigError
from bifolio.model.huggingface.hf_loader import folder_tensors, load_folder
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.sequence import StepResult
from helpers import cpu_kernel_names, fresh_folder, tiny_folder, tiny_tensors

pytestmark = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels")
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPT: Any = {"prompt_token_ids": [5, 9, 11, 40, 41, 42, 3, 8, 20]}


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kernels": "native", "block_size": 4, "num_blocks": 64, "max_model_len": 64, **options})


def folders() -> tuple[Path, Path]:
    return tiny_folder(fresh_folder("weights")), tiny_folder(fresh_folder("weights"), seed=1)


def outcome(llm: LLM) -> tuple[list[int], list[float]]:
    output = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [entry.logprob for entry in output.logprobs]


def test_a_folder_and_named_tensors_give_the_answers_of_a_new_engine() -> None:
    old, new = folders()
    llm, expected = make_llm(old), outcome(make_llm(new))
    before = outcome(llm)
    branch = llm.open(PROMPT)
    assert llm.load_weights(new) == 1
    assert outcome(llm) == expected != before
    assert llm.generate(PROMPT, PARAMS)[0].weight_version == 1
    assert branch.generate(PARAMS).outputs[0].token_ids == expected[0]  # a branch is computed again
    tensors = tiny_tensors({"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                            "num_key_value_heads": 2, "vocab_size": 61, "num_hidden_layers": 2,
                            "tie_word_embeddings": False})  # fmt: skip
    assert llm.load_weights(iter(tensors.items())) == 2
    assert outcome(llm) == before
    name = "model.norm.weight"
    llm.load_weights([(name, tensors[name] * np.float32(1.5))])
    assert outcome(llm) != before
    assert llm.collective_rpc("reload_weights") == [4]
    assert outcome(llm) == before


def test_torch_tensors_are_taken() -> None:
    import torch

    from bifolio import LanguageModel

    old, new = folders()
    llm, model = make_llm(old), LanguageModel.from_pretrained(new)
    llm.load_weights((name, parameter) for name, parameter in model.named_parameters())
    tokens, logprobs = outcome(llm)
    found = model.token_logprobs(torch.tensor([[*PROMPT["prompt_token_ids"], *tokens]]), exact=True)
    assert found[0, len(PROMPT["prompt_token_ids"]) - 1 :].tolist() == logprobs


def test_a_request_under_way_continues_on_the_new_weights() -> None:
    """Its first tokens are those of the old weights; the rest are those of the new ones after these tokens."""
    old, new = folders()
    llm = make_llm(old)
    first: list[int] = []
    rest: list[int] = []
    results: list[StepResult] = []
    for result in llm.stream(PROMPT, PARAMS):
        results.append(result)
        if result.token is not None:
            (rest if llm.engine.weight_version else first).append(result.token)
        if len(first) == 5 and not rest and not llm.engine.weight_version:
            llm.load_weights(new)
    assert first == outcome(make_llm(old))[0][:5]
    fresh = make_llm(new, enable_prefix_caching=False)
    given = [*PROMPT["prompt_token_ids"], *first]
    [request] = fresh.run_requests(
        [lambda engine, name: engine.add_request(name, given, SamplingParams(
            temperature=0.8, seed=4, max_tokens=12 - len(first), ignore_eos=True), num_given=len(first))]
    )  # fmt: skip
    assert rest == request.sequences[0].new_token_ids
    assert results[-1].sequence is not None
    assert results[-1].sequence.request.metrics.num_weight_changes == 1


def test_wrong_weights_are_refused_and_change_nothing() -> None:
    old, _ = folders()
    llm = make_llm(old)
    before = outcome(llm)
    other = tiny_folder(fresh_folder("weights"), num_hidden_layers=3)
    with pytest.raises(ConfigError, match="another network"):
        llm.load_weights(other)
    with pytest.raises(ConfigError, match="no tensor 'model"):
        llm.load_weights([("model.nothing", np.zeros(3, np.float32))])
    with pytest.raises(ConfigError, match="has the shape"):
        llm.load_weights([("model.norm.weight", np.zeros(3, np.float32))])
    with pytest.raises(ConfigError, match="reload_weights"):
        llm.collective_rpc("init_process_group")
    embedded = LLM(load_folder(old), kernels="native", num_blocks=64, max_model_len=64)
    assert embedded.reset_prefix_cache()
    assert outcome(llm) == before
    assert llm.engine.weight_version == 0


def test_sparse_deltas_in_a_row(tmp_path: Path) -> None:
    """Each holds the changed elements alone, and applies to the weights before it alone."""
    folder, _ = folders()
    steps = [folder]
    rng = np.random.default_rng(0)
    for number in range(3):
        found = {name: np.array(tensor.dequantize()) for name, tensor in folder_tensors(steps[-1]).items()}
        for name in list(found)[number::3]:
            flat = found[name].reshape(-1)
            flat[rng.integers(0, len(flat), 2)] += np.float32(0.25)
        steps.append(tmp_path / f"step-{number}")
        shutil.copytree(folder, steps[-1])
        write_safetensors(steps[-1] / "model.safetensors", found, {"format": "pt"})
    llm = make_llm(folder)
    for number, (old, new) in enumerate(itertools.pairwise(steps)):
        file = tmp_path / f"{number}.safetensors"
        assert 0 < write_delta(old, new, file) < 0.05
        assert file.stat().st_size < (new / "model.safetensors").stat().st_size / 5
        assert llm.load_weights(file) == number + 1
        assert outcome(llm) == outcome(make_llm(new))
        assert llm.identity["digest"] == make_llm(new).identity["digest"]
        with pytest.raises(ConfigError, match="for weights with the digest"):
            llm.load_weights(file)  # it is applied already
    assert write_delta(steps[-1], steps[-1], tmp_path / "none.safetensors") == 0
    before = outcome(llm)
    llm.load_weights(tmp_path / "none.safetensors")
    assert outcome(llm) == before
    with pytest.raises(ConfigError, match="no delta of the format"):
        llm.load_weights(folder / "model.safetensors")


def test_named_tensors_change_the_weights_that_are_loaded() -> None:
    """Tensors that are not named stay those of the newest weights, not those of the first folder."""
    old, new = folders()
    llm = make_llm(old)
    llm.load_weights(new)
    expected = outcome(llm)
    [(name, tensor)] = [item for item in folder_tensors(new).items() if item[0] == "model.norm.weight"]
    llm.load_weights([(name, np.array(tensor.dequantize()))])
    assert outcome(llm) == expected
