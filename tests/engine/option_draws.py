"""Lives of an engine whose requests have random options, compared with each request alone on a roomy plain engine.

PYTHONPATH=src:tests:tests/engine python tests/engine/option_draws.py --draws 20000 --seed 1
PYTHONPATH=src:tests:tests/engine python tests/engine/option_draws.py --draws 4000 --on-device
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from option_strategies import ENGINES, Ask, asks
from stand_in_slots import StandInKernels, StandInSlots
from test_next_token_heads import checkpoint

from bifolio import LLM, BeamSearchParams, SpeculativeConfig
from bifolio.api.outputs import CompletionOutput, request_output
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import RequestError
from bifolio.kernels.interface import KernelSet, Network, SlotSizes, Storage
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.sequence import Request
from draft_heads import eagle_folder
from helpers import cpu_kernel_names, make_kernels, tiny_folder, tiny_model, tiny_tokenizer
from hybrid_models import spaced_checkpoints

MAX_LENGTH = 36
NUM_ASKED = 6  # requests of one life
KINDS = ("dense", "window", "experts", "latent", "hybrid")
METHODS = ("", "ngram", "draft", "eagle", "mtp")
WITH_NEXT_TOKEN_HEAD = {"experts": "glm4moe", "latent": "deepseek3"}
PAIRS = [(k, m) for k in KINDS for m in METHODS if m != "mtp" or k in WITH_NEXT_TOKEN_HEAD]
ON_DEVICE = [(k, m) for k, m in PAIRS if k != "hybrid"]  # the stand-in has no recurrent states
KERNELS = "native" if "native" in cpu_kernel_names() else "reference"
counts: Counter[str] = Counter()


@cache
def folder(kind: str) -> Path:
    tokenizer = tiny_tokenizer()
    if kind in ("dense", "window"):
        config = {"model_type": "mistral", "sliding_window": 6} if kind == "window" else {}
        return tiny_folder(tokenizer=True, seed=3, **config)
    size = tokenizer.get_vocab_size()
    if kind in WITH_NEXT_TOKEN_HEAD:
        path = checkpoint(WITH_NEXT_TOKEN_HEAD[kind], size)[0]
    else:
        _, path = tiny_model("lfm2", vocab_size=size)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@cache
def model(kind: str) -> LoadedModel:
    return load_model(folder(kind))


@cache
def head(kind: str) -> Path:
    config = model(kind).config
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "draft_vocab_size": 90}
    return eagle_folder(taps=(0, 1, config.num_layers), **sizes)


@cache
def kernel_set() -> KernelSet:
    return make_kernels(KERNELS)


@cache
def device_kernels() -> KernelSet:
    """The kernels of the CPU with slots on the stand-in for a device: steps are launched ahead."""
    base: Any = type(kernel_set())

    class OnDevice(base):  # type: ignore[misc]
        launches_ahead = True

        def device_slots(self, network: Network, storage: Storage, sizes: SlotSizes) -> StandInSlots:
            return StandInSlots(self, network, storage, sizes)

    return StandInKernels() if KERNELS == "reference" else OnDevice(threads=1)


@cache
def roomy(kind: str) -> LLM:
    """The plain engine that runs each request alone."""
    return LLM(
        model(kind), kernels=kernel_set(), block_size=4, num_blocks=160, max_model_len=MAX_LENGTH, max_num_seqs=4,
        chunk_size=64, token_budget=64, enable_prefix_caching=False,
    )  # fmt: skip


def crowded(kind: str, method: str, on_device: bool, engine: dict[str, Any]) -> LLM:
    options = dict(engine)
    length, adaptive, room = options.pop("length"), options.pop("adaptive"), options.pop("room")
    own: dict[str, Any] = {}
    if method == "draft":
        own["draft_model"] = str(folder("dense" if kind == "hybrid" else kind))
    if method == "eagle":
        own["draft_model"] = str(head(kind))
    speculative = SpeculativeConfig(method, length, adaptive=adaptive, **own) if method else None  # type: ignore[arg-type]
    spacing = options.pop("checkpoint_tokens")  # of hybrid models
    blocks = 2 + int(-(-MAX_LENGTH // options["block_size"]) * room)
    kernels = device_kernels() if on_device else kernel_set()
    with spaced_checkpoints(spacing):
        return LLM(
            model(kind), kernels=kernels, poison_free_blocks=True, num_blocks=blocks, max_model_len=MAX_LENGTH,
            speculative=speculative, **options,
        )  # fmt: skip


def fail(error: Exception) -> NoReturn:
    """Instead of a recovery: options of requests fail no step."""
    raise error


def add(engine: InferenceEngine, name: str, ask: Ask) -> Request:
    if isinstance(ask.params, BeamSearchParams):
        return engine.add_beam_search(name, ask.prompt, ask.params)
    return engine.add_request(name, ask.prompt, ask.params)


def drain(engine: InferenceEngine) -> None:
    for _ in range(4000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work, "the engine is stuck"
    assert not engine.requests, f"requests are left: {list(engine.requests)}"
    assert engine.blocks.num_used_blocks == 0, f"{engine.blocks.num_used_blocks} blocks are left"
    engine.blocks.check_invariants()


def shape(request: Request) -> tuple[Any, ...]:
    """Everything about a finished request that must not depend on its company, in numbers that compare exactly."""
    output = request_output(request)
    error = None if output.error is None else output.error[:20]
    if error is not None and len(request.sequences) > 1:
        return request.fault, error  # one completion ends all others, wherever they are
    scored = output.prompt_logprobs
    return (
        request.fault, error, [_shape(completion) for completion in output.outputs],
        None if scored is None else [None if s is None else (s.token_id, s.rank, len(s.top)) for s in scored],
    )  # fmt: skip


def _shape(completion: CompletionOutput) -> tuple[Any, ...]:
    scored = completion.logprobs
    ranks = None if scored is None else [(s.token_id, s.rank, len(s.top)) for s in scored]
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason, ranks


def numbers(request: Request) -> list[float]:
    """Logprobs and scores, which may differ in their last digits."""
    output = request_output(request)
    if output.error is not None and len(request.sequences) > 1:
        return []
    found = [s.logprob for s in output.prompt_logprobs or () if s is not None]
    for completion in output.outputs:
        found += [completion.cumulative_logprob or 0.0, completion.score or 0.0]
        for scored in completion.logprobs or ():
            found += [scored.logprob, *(logprob for _, logprob in scored.top)]
    return found


def check(kind: str, method: str, on_device: bool, engine: dict[str, Any], wanted: list[Ask]) -> None:
    """Run the requests in company, then each alone, and compare."""
    llm = crowded(kind, method, on_device, engine)
    crowd = llm.engine
    crowd.faults.recover = fail  # type: ignore[method-assign]
    requests: list[tuple[Ask, Request]] = []
    aborts: list[tuple[int, str]] = []
    number = 0
    for ask in wanted:
        for _ in range(ask.after):
            crowd.step()
            number += 1
            for step, name in aborts:
                if step == number:
                    crowd.abort(name)
        try:
            request = add(crowd, str(len(requests)), ask)
        except RequestError:  # too large for this engine
            counts["refused"] += 1
            continue
        requests.append((ask, request))
        if ask.aborted_after is not None:
            aborts.append((number + ask.aborted_after, request.request_id))
    drain(crowd)
    if crowd.speculator is not None:
        counts["drafts"] += crowd.speculator.stats.num_draft_tokens
    for ask, request in requests:
        counts["draws"] += 1
        counts["preempted"] += bool(request.metrics.num_preemptions)
        if request.sequences[0].finish_reason is not None and request.sequences[-1].finish_reason.value == "abort":  # type: ignore[union-attr]
            counts["aborted"] += 1
            continue
        lone = roomy(kind).engine
        lone.faults.recover = fail  # type: ignore[method-assign]
        expected = add(lone, "alone", ask)
        drain(lone)
        counts["errors"] += request.error is not None
        assert shape(request) == shape(expected), ask
        for mine, theirs in zip(numbers(request), numbers(expected), strict=True):
            assert math.isclose(mine, theirs, rel_tol=1e-3, abs_tol=1e-3), (ask, mine, theirs)


def life(on_device: bool) -> Callable[[], None]:
    """The property, with all its parts drawn."""
    pairs = st.sampled_from(ON_DEVICE if on_device else PAIRS)

    @hypothesis.given(pairs, ENGINES, asks(NUM_ASKED))
    def property_of(pair: tuple[str, str], engine: dict[str, Any], wanted: list[Ask]) -> None:
        check(*pair, on_device, engine, wanted)

    return property_of


def run(num_draws: int, seed: int, on_device: bool, phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink)) -> None:
    """At least this many requests in lives drawn from a seed; raises at the first difference."""
    test = hypothesis.seed(seed)(life(on_device))
    hypothesis.settings(
        max_examples=-(-num_draws // NUM_ASKED), deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=phases, print_blob=False, report_multiple_bugs=False,
    )(test)()  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--on-device", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    options = parser.parse_args()
    phases = (Phase.generate, Phase.shrink) if options.shrink else (Phase.generate,)
    num_failed, seed, began = 0, options.seed, time.perf_counter()
    while counts["draws"] < options.draws:
        try:
            run(40 * NUM_ASKED, seed, options.on_device, phases)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            num_failed += 1
            print(f"--- seed {seed}", flush=True)
            traceback.print_exc(limit=-4)
        seed += 1
        print(f"{time.perf_counter() - began:.0f} s, {num_failed} failed: {dict(counts)}", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(bool(main()))
