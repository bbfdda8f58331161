"""LongRoPE: each request chooses its factors by itself, and its output depends on nothing else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from running_engine import Running

from bifolio import LLM, BeamSearchParams
from bifolio.config import SpeculativeConfig
from bifolio.config.transfer import Address
from bifolio.engine.transfer.decode import BlockFetcher
from bifolio.engine.transfer.prefill import PrefillServer
from bifolio.long_rope import LONG_ROPE, chosen_rope, salt_of_rope
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from helpers import (
    cpu_kernel_names,
    drain,
    log_softmax,
    make_engine,
    make_kernels,
    output_ids,
    random_prompt,
    tiny_model,
    transformers_logits,
)
from long_rope_requests import (
    CONTEXT,
    REQUESTS,
    ROPE,
    add_all,
    factors,
    long_rope_model,
    run_all,
    scores_of,
    tokens_of,
)

KERNELS = [  # the import of torch takes seconds
    pytest.param(name, marks=pytest.mark.full if name == "torch" else ()) for name in cpu_kernel_names()
]
VOCAB = 61


@pytest.mark.full
@pytest.mark.parametrize("name", cpu_kernel_names())
def test_a_batch_of_short_and_long_requests_equals_transformers(name: str) -> None:
    rope = {**ROPE, **factors(8)}
    model, folder = tiny_model.__wrapped__(
        "phi3", rope_parameters=deepcopy(rope), original_max_position_embeddings=CONTEXT, max_position_embeddings=128
    )
    engine = make_engine(load_folder(folder), kernels=make_kernels(name))
    for request in run_all(engine).values():
        tokens = tokens_of(request)
        theirs = log_softmax(transformers_logits(model, tokens))
        expected = theirs[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(scores_of(request), expected, atol=2e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_output_is_that_of_the_request_alone_on_any_server(name: str) -> None:
    """Neighbours, the chunk size and `max_model_len` change no bit of it where the kernels are deterministic."""
    kernels = make_kernels(name)
    tolerance = 0.0 if kernels.deterministic else 1e-4
    together = run_all(make_engine(long_rope_model(), kernels=kernels, chunk_size=7, token_budget=24))
    for wanted, length in (("short", 28), ("short", 256), ("long output", 40), ("long", 64)):
        options: dict[str, Any] = {"max_model_len": length, "chunk_size": 512, "token_budget": 512}
        alone = run_all(make_engine(long_rope_model(), kernels=kernels, **options), (wanted,))[wanted]
        assert tokens_of(alone) == tokens_of(together[wanted])
        np.testing.assert_allclose(scores_of(alone), scores_of(together[wanted]), rtol=0, atol=tolerance)


def test_the_two_sets_differ() -> None:
    """Else the tests above would show nothing."""
    prompt = random_prompt(20, 1, VOCAB)
    found = []
    for count in (8, 30):
        engine = make_engine(long_rope_model())
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, prompt_logprobs=0)
        request = engine.add_request("a", prompt, params)
        drain(engine)
        found.append(scores_of(request)[: len(prompt) - 1])
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_the_rule_of_a_request() -> None:
    assert chosen_rope(None, 10, 10) is None
    assert [chosen_rope(4096, 4000, count) for count in (0, 96, 97, 100_000)] == [0, 0, LONG_ROPE, LONG_ROPE]
    assert [chosen_rope(4096, count, None) for count in (1, 3072, 3073, 5000)] == [0, 0, LONG_ROPE, LONG_ROPE]


@pytest.mark.parametrize(("length", "total"), [(20, CONTEXT), (24, CONTEXT), (25, 128), (40, 128)])
def test_without_max_tokens_a_short_request_ends_with_the_short_context(length: int, total: int) -> None:
    engine = make_engine(long_rope_model(), max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    request = engine.add_request("a", random_prompt(length, 0, VOCAB), params)
    drain(engine)
    assert request.sequences[0].num_tokens == total
    assert request.sequences[0].finish_reason is not None
    assert request.sequences[0].finish_reason.value == "length"


def test_short_and_long_requests_share_no_blocks() -> None:
    engine, prompt = make_engine(long_rope_model()), random_prompt(21, 0, VOCAB)
    cached = []
    for number, count in enumerate((20, 4, 4, 20)):
        request = engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=count))
        drain(engine)
        cached.append(request.metrics.num_cached_tokens)
    assert cached == [0, 0, 20, 20]
    assert salt_of_rope(0, b"\1a") != salt_of_rope(LONG_ROPE, b"a")  # a tenant's salt cannot name the other set


def test_a_branch_that_outgrows_the_short_factors_is_computed_whole() -> None:
    engine, prompt = make_engine(long_rope_model()), random_prompt(20, 0, VOCAB)
    parent = engine.add_request("parent", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.keep("parent")
    drain(engine)
    more = random_prompt(3, 5, VOCAB)
    found = []
    for number, count in enumerate((2, 20)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        branch = engine.fork("parent", f"branch {number}", more, params)
        drain(engine)
        alone = make_engine(long_rope_model())
        expected = alone.add_request("a", [*parent.sequences[0].token_ids, *more], params)
        drain(alone)
        assert output_ids(branch) == output_ids(expected)
        found.append(branch.metrics.num_cached_tokens)
    assert found == [23, 0]
    engine.blocks.check_invariants()


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_samples_and_beams_follow_the_request(method: str) -> None:
    plain = run_all(make_engine(long_rope_model()))
    config = SpeculativeConfig(method, length=3, ngram_min=1, adaptive=False)  # type: ignore[arg-type]
    draft = long_rope_model() if method == "draft" else None
    engine = make_engine(long_rope_model(), draft_model=draft, speculative=config)
    requests = add_all(engine)
    drain(engine)
    for name, request in requests.items():
        assert tokens_of(request) == tokens_of(plain[name])
    length, count = REQUESTS["long output"]
    prompt = random_prompt(length, length, VOCAB)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, n=2)
    several = engine.add_request("several", prompt, params)
    beams = make_engine(long_rope_model())
    search = beams.add_beam_search("beams", prompt, BeamSearchParams(1, max_tokens=count, ignore_eos=True))
    drain(engine)
    drain(beams)
    expected = list(plain["long output"].sequences[0].output_token_ids)
    assert output_ids(several) == [expected, expected]
    assert output_ids(search) == [expected]


@pytest.mark.full
def test_blocks_of_another_engine_are_those_of_the_request() -> None:
    """The prefill engine computes the prompt with the factors of the request that continues it."""
    options: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "chunk_size": 8,
        "max_num_seqs": 4,
        "threads": 1,
    }
    prefill, decode, alone = (Running(LLM(long_rope_model(), **options)) for _ in range(3))
    server = PrefillServer(prefill.thread, prefill.sizes)
    prompt = random_prompt(20, 20, VOCAB)
    try:
        for rope in (LONG_ROPE, 0):
            salt = salt_of_rope(rope, b"tenant")
            fetcher = BlockFetcher(decode.thread, decode.sizes)
            assert fetcher.fetch(Address(server.host, server.port), prompt, salt).num_blocks == 4
            params = SamplingParams(temperature=0, max_tokens=20 if rope else 8, ignore_eos=True)
            (found, _), num_cached = decode.generate(prompt, b"tenant", params)
            expected = alone.generate(prompt, b"tenant", params)[0][0]
            assert (found, num_cached) == (expected, 16)
    finally:
        server.close()
        for each in (prefill, decode, alone):
            each.stop()


@pytest.mark.full
def test_a_language_model_changes_its_factors_where_transformers_does() -> None:
    torch = pytest.importorskip("torch")
    from bifolio.api.language_model import LanguageModel

    rope = {**ROPE, **factors(8)}
    model, folder = tiny_model.__wrapped__(
        "phi3", rope_parameters=deepcopy(rope), original_max_position_embeddings=CONTEXT, max_position_embeddings=128
    )
    ours = LanguageModel.from_pretrained(folder)
    prompt = torch.tensor([random_prompt(28)])
    decoded = ours.decode(prompt, 12, temperature=0)
    assert decoded.tolist() == ours.decode_by_recomputing(prompt, 12, temperature=0).tolist()
    for length in (30, 36):
        with torch.no_grad():
            logits = ours.prefill(decoded[:, :length])[0][0].numpy()
        np.testing.assert_allclose(logits, transformers_logits(model, decoded[0, :length].tolist()), atol=1e-4)
