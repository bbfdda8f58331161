"""An FP8 cache on a GPU: close to a cache in bf16 in every phase, and the same bits where they are promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams
from bifolio.config import SpeculativeConfig
from helpers import random_prompt, tiny_folder, tiny_loaded

NewEngine = Callable[..., Any]
SIZES: dict[str, Any] = {"num_blocks": 600, "block_size": 16, "max_num_seqs": 8, "token_budget": 1024,
                         "chunk_size": 1024, "max_model_len": 8192}  # fmt: skip
MODEL: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "max_position_embeddings": 8192}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


def prompts(*lengths: int) -> list[list[int]]:
    return [random_prompt(length, seed=number, vocab_size=61) for number, length in enumerate(lengths)]


def run(engine: Any, wanted: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    requests = [engine.add_request(str(number), prompt, params) for number, prompt in enumerate(wanted)]
    while engine.has_work:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [(s.output_token_ids, [entry.logprob for entry in s.logprobs]) for r in requests for s in r.sequences]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lengths", [(5, 40, 17), (3000,), (2500, 2500, 1100)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 700}])
def test_logprobs_are_those_of_torch_with_the_same_rounding(
    lengths: tuple[int, ...], options: dict[str, Any], new_engine: NewEngine, device: str
) -> None:
    """Of the first tokens, in f32; a number near the middle of two FP8 numbers may become either."""
    from bifolio.kernels.torch_reference import TorchKernels
    from built_engines import built_engine

    model = tiny_loaded(**MODEL, **options)
    torch_engine = built_engine(model, kernels=TorchKernels(device, "f32"), cache_dtype="fp8", **SIZES)
    expected = run(torch_engine, prompts(*lengths))
    found = run(new_engine("f32", model=model, cache_dtype="fp8", **SIZES), prompts(*lengths))
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=0.05)


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("kind", ["plain", "window", "drafts"])
def test_deterministic_mode_gives_a_request_its_own_bits(kind: str, new_engine: NewEngine) -> None:
    model = tiny_loaded(**MODEL, **({"sliding_window": 100} if kind == "window" else {}))
    options: dict[str, Any] = {"speculative": SpeculativeConfig("ngram", 3, adaptive=False)} if kind == "drafts" else {}
    engine = new_engine("bf16", deterministic=True, model=model, cache_dtype="fp8", **SIZES, **options)
    wanted = prompts(5, 300, 1500, 64, 33)
    together = run(engine, wanted)
    assert run(engine, wanted[::-1]) == together[::-1]  # from the cache
    engine.blocks.drop_cached()
    for number, prompt in enumerate(wanted):
        assert run(engine, [prompt]) == together[number : number + 1]


@pytest.mark.full
@pytest.mark.usefixtures("own_kernels", "compiled")
def test_an_llm_with_an_fp8_cache(device: str) -> None:
    """Warm-up, shared prefixes, n and beams; blocks of half the bytes."""
    folder = tiny_folder(**MODEL)
    options: dict[str, Any] = {"device": device, "gpu_memory_utilization": 0.2, "max_num_seqs": 8}
    with LLM(folder, **options) as wide:
        bytes_of_block = wide.plan.bytes_per_block
    with LLM(folder, kv_cache_dtype="fp8", **options) as llm:
        assert 2 * llm.plan.bytes_per_block == bytes_of_block
        common = random_prompt(600, seed=9, vocab_size=61)
        wanted = [common + prompt for prompt in prompts(3, 4, 5, 6, 7, 8)]
        params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, ignore_eos=True)
        first = llm.generate(wanted, params)
        assert [len(output.outputs) for output in first] == [2] * 6
        (beams,) = llm.beam_search(wanted[:1], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
        assert len(beams.outputs) >= 1
