"""LongCat-Flash in an engine: prefix hits, second turns, completions of one prompt, batches; other kernel sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_rows import row_folder

from bifolio.api.llm import LLM
from bifolio.model.families.longcat_flash import in_folder
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.quant import QuantFormat
from bifolio.sampling_params import SamplingParams
from helpers import likeliest_tokens, random_prompt

NAME = "longcat_flash"
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["folder", "GGUF"])
def test_requests_share_prefixes_and_forks(kind: str, tmp_path: Path) -> None:
    model, path = row_folder(NAME)
    if kind == "GGUF":
        write_gguf(tmp_path / "m.gguf", load_folder(path), QuantFormat.F32)
        path = tmp_path / "m.gguf"
    llm = LLM(path, block_size=4, chunk_size=5, max_num_seqs=3, num_blocks=64, poison_free_blocks=True)
    prompts = [random_prompt(length, seed=length) for length in (23, 5, 14)]
    for turn in range(2):
        for number, output in enumerate(llm.generate(prompts, GREEDY)):
            tokens = output.outputs[0].token_ids
            assert tokens == likeliest_tokens(model, prompts[number], tokens)
            assert turn == 0 or (output.num_cached_tokens or 0) >= 8
            prompts[number] = [*prompts[number], *tokens, *random_prompt(3, seed=turn)]
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=7, ignore_eos=True, detokenize=False)
    (several,) = llm.generate([prompts[0]], sampled)
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1
    first = several.outputs[0].token_ids
    (continued,) = llm.generate([[*prompts[0], *first]], GREEDY)
    tokens = continued.outputs[0].token_ids
    assert tokens == likeliest_tokens(model, [*prompts[0], *first], tokens)
    llm.close()


@pytest.mark.full
def test_experts_on_the_host_beside_those_that_return_their_input() -> None:
    model, folder = row_folder(NAME)
    options = {"block_size": 4, "num_blocks": 32, "max_model_len": 64, "kernels": "torch", "device": "cpu"}
    prompt = random_prompt(17)
    with LLM(folder, cpu_experts="all", **options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    tokens = output.outputs[0].token_ids
    assert tokens == likeliest_tokens(model, prompt, tokens)


def test_parts_of_a_layer_are_layers() -> None:
    names = {
        "model.layers.5.self_attn.o_proj.weight": "model.layers.2.self_attn.1.o_proj.weight",
        "model.layers.4.input_layernorm.weight": "model.layers.2.input_layernorm.0.weight",
        "model.layers.5.mlp.up_proj.weight": "model.layers.2.mlps.1.up_proj.weight",
        "model.layers.4.mlps.0.up_proj.weight": "model.layers.2.mlps.0.up_proj.weight",
        "model.layers.4.mlp.experts.7.up_proj.weight": "model.layers.2.mlp.experts.7.up_proj.weight",
        "model.norm.weight": "model.norm.weight",
    }
    assert {name: in_folder(name) for name in names} == names


@pytest.mark.full
def test_two_ranks_have_the_logprobs_of_one() -> None:
    """Each rank adds the inputs that experts return once, behind the exchange of the others."""
    _, folder = row_folder(NAME)
    options = {"block_size": 4, "num_blocks": 32, "max_model_len": 64, "threads": 2}
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False, logprobs=3)
    found = []
    for ranks in (1, 2):
        with LLM(folder, tensor_parallel_size=ranks, **options) as llm:
            (output,) = llm.generate([random_prompt(17)], params)
            found.append(output.outputs[0])
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs
