"""Requests with a common prefix that come together compute it once."""

from __future__ import annotations

from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt, run_alone

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def run(num_requests: int, prefix: list[int], chunk_size: int, budget: int, **options: bool) -> tuple[int, list]:
    engine = make_engine(
        max_num_seqs=8, chunk_size=chunk_size, token_budget=budget, num_blocks=256, block_size=4, **options
    )
    prompts = [prefix + random_prompt(3, seed=index + 1, vocab_size=61) for index in range(num_requests)]
    requests = [engine.add_request(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]
    drain(engine)
    for request, prompt in zip(requests, prompts, strict=True):
        assert output_ids(request) == output_ids(run_alone(prompt, GREEDY))
    return engine.stats().num_prefill_tokens, requests


def test_a_common_prefix_is_computed_once() -> None:
    prefix = random_prompt(40, vocab_size=61)
    for chunk_size, budget in ((64, 512), (16, 64), (7, 30)):
        num_tokens, requests = run(6, prefix, chunk_size, budget)
        assert num_tokens <= 43 + 5 * (3 + 4), (chunk_size, budget)  # own tokens, and what is no whole block
        assert [request.metrics.num_cached_tokens >= 36 for request in requests] == [False] + [True] * 5


def test_without_a_prefix_cache_nobody_waits() -> None:
    prefix = random_prompt(40, vocab_size=61)
    num_tokens, _ = run(6, prefix, 64, 512, enable_prefix_caching=False)
    assert num_tokens == 6 * 43


def test_different_prompts_run_together() -> None:
    engine = make_engine(max_num_seqs=8, chunk_size=64, token_budget=512)
    for index in range(4):
        engine.add_request(str(index), random_prompt(20, seed=index, vocab_size=61), GREEDY)
    engine.step()
    assert engine.stats().num_prefill_tokens == 80
