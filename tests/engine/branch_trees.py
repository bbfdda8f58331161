"""Random trees of branches on one engine: every result is compared with the same tokens run alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from bifolio.config import SpeculativeConfig, TierSettings
from bifolio.engine.branches import BranchOwner, BranchState
from bifolio.engine.engine import InferenceEngine
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request
from helpers import drain, make_engine, make_kernels, tiny_loaded
from hybrid_models import tiny_hybrid

VOCABULARY = 61
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.1, "frequency_penalty": 0.3, "min_tokens": 1, "logprobs": 2},
)


@dataclass
class Pending:
    """An operation in flight: its branch, its request, and the comparison of its result."""

    branch: BranchState
    request: Request
    done: Callable[[Request], None]
    check: Callable[[], None]


@dataclass
class Trees:
    """Random operations; all of one engine's branches run together, in a cache that is too small for them."""

    model: LoadedModel
    seed: int
    engine: InferenceEngine = field(init=False)
    branches: list[BranchState] = field(init=False, default_factory=list)
    pending: list[Pending] = field(init=False, default_factory=list)
    num_results: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        rng = self.rng
        hybrid = self.model.config.recurrent is not None
        drafts = SpeculativeConfig("ngram", length=3) if rng.random() < 0.3 else None
        caching = bool(rng.random() < 0.7)
        tiers = TierSettings(memory_bytes=1 << 19) if caching and rng.random() < 0.5 else None
        self.engine = make_engine(
            self.model, kernels=kernels(), num_blocks=int(rng.integers(27, 40)), block_size=4, max_model_len=96,
            max_num_seqs=4, token_budget=24, chunk_size=int(rng.integers(3, 20)), speculative=drafts,
            enable_prefix_caching=caching, tiers=tiers, num_states=24 if hybrid else 0,
            checkpoint_tokens=8 if hybrid and rng.random() < 0.5 else None,
        )  # fmt: skip
        self.owner = BranchOwner(self.engine)
        self._count = 0

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.operate()
            for _ in range(int(self.rng.integers(0, 4))):
                self.step()
        while self.pending:
            self.step()
        for branch in self.branches:
            self.owner.close(branch)
        drain(self.engine)
        while self.engine.batcher.drop_kept():  # those of requests that were aborted late
            raise AssertionError("a trunk was kept without a branch")
        assert self.engine.blocks.num_used_blocks == 0
        self.engine.blocks.check_invariants()
        self.engine.close_tiers()

    def step(self) -> None:
        if self.engine.has_work:
            self.engine.step()
        for pending in [one for one in self.pending if one.request.is_finished]:
            self.pending.remove(pending)
            pending.done(pending.request)
            pending.check()
            self.num_results += 1

    # -- operations ------------------------------------------------------------------------------------------------
    def operate(self) -> None:
        free = [branch for branch in self.branches if branch.changing is None]
        verb = self.rng.choice(["open", "fork", "append", "truncate", "generate", "score", "close", "crowd"],
                               p=[0.1, 0.2, 0.15, 0.1, 0.25, 0.1, 0.05, 0.05])  # fmt: skip
        if verb == "open" or not free:
            if len(self.branches) < 12:
                self.branches.append(self.owner.open(self.tokens(1, 30)))
            return
        branch = free[int(self.rng.integers(len(free)))]
        if verb == "crowd":
            for _ in range(3):  # together they outgrow the cache
                params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
                self.engine.add_request(self.new_id(), self.tokens(30, 60), params)
        elif verb != "generate" or branch.num_tokens < 84:
            getattr(self, f"do_{verb}")(branch)

    def do_fork(self, branch: BranchState) -> None:
        request = self.owner.missing(branch, self.new_id()) if self.rng.random() < 0.5 else None
        if request is not None:
            self.pending.append(Pending(branch, request, lambda done: self.owner.computed(branch, done), lambda: None))
        elif len(self.branches) < 12:
            self.branches.append(self.owner.fork(branch))

    def do_append(self, branch: BranchState) -> None:
        if branch.num_tokens < 70:
            self.owner.append(branch, self.tokens(1, 9), to_answer=bool(self.rng.random() < 0.3))

    def do_truncate(self, branch: BranchState) -> None:
        self.owner.truncate(branch, int(self.rng.integers(1, branch.num_tokens + 1)))

    def do_close(self, branch: BranchState) -> None:
        self.branches.remove(branch)
        self.owner.close(branch)

    def do_generate(self, branch: BranchState) -> None:
        advances = bool(self.rng.random() < 0.7)
        options = OPTIONS[int(self.rng.integers(len(OPTIONS)))]
        count = 1 if advances else int(self.rng.integers(1, 4))
        params = SamplingParams(
            max_tokens=int(self.rng.integers(1, 9)), seed=int(self.rng.integers(100)), n=count,
            ignore_eos=bool(self.rng.random() < 0.5), **{"logprobs": 0, **options},
        )  # fmt: skip
        known, given = branch.token_ids, branch.num_tokens - branch.num_prompt
        request = self.owner.generate(branch, self.new_id(), params, advances=advances)

        def check() -> None:
            assert request.error is None
            assert outcome(request) == outcome(run_alone(self.model, known, params, num_given=given))
            if advances and not branch.is_closed:
                assert branch.token_ids == [*known, *request.sequences[0].new_token_ids]
                assert branch.num_prompt == len(known) - given

        done = self.owner.generated if advances else None
        self.pending.append(Pending(branch, request, lambda r: None if done is None else done(branch, r), check))

    def do_score(self, branch: BranchState) -> None:
        known, continuation = branch.token_ids, self.tokens(1, 10)
        request = self.owner.score(branch, self.new_id(), continuation)

        def check() -> None:
            whole = SamplingParams(max_tokens=0, prompt_logprobs=0)
            alone = run_alone(self.model, [*known, *continuation], whole).prompt_scores
            assert request.prompt_scores is not None
            assert alone is not None
            assert [one.token_id for one in request.prompt_scores] == continuation
            assert list(request.prompt_scores) == list(alone)[len(known) - 1 :]

        self.pending.append(Pending(branch, request, lambda done: None, check))

    def tokens(self, least: int, most: int) -> list[int]:
        count = int(self.rng.integers(least, most))
        return [int(token) for token in self.rng.integers(3, VOCABULARY, count)]

    def new_id(self) -> str:
        self._count += 1
        return f"request-{self._count}"


@cache
def kernels() -> Any:
    return make_kernels("native")


@cache
def lonely_engine(model_name: str) -> InferenceEngine:
    """An engine that runs one request at a time, with nothing cached."""
    model = MODELS[model_name]()
    states = 24 if model.config.recurrent is not None else 0
    return make_engine(model, kernels=kernels(), enable_prefix_caching=False, num_states=states, chunk_size=64)


def run_alone(model: LoadedModel, tokens: list[int], params: SamplingParams, **options: Any) -> Request:
    engine = lonely_engine(next(name for name, make in MODELS.items() if make() is model))
    request = engine.add_request("alone", tokens, params, **options)
    drain(engine)
    return request


def outcome(request: Request) -> list[Any]:
    """Tokens, reasons and logprobs to the last bit."""
    given = request.num_given
    return [
        (each.new_token_ids, each.finish_reason, each.logprobs.packed(given), each.cumulative_logprob)
        for each in request.sequences
    ]


@cache
def experts(kind: str = "qwen3moe") -> LoadedModel:
    from bifolio.model.huggingface.hf_loader import load_folder
    from helpers import tiny_model

    return load_folder(tiny_model(kind, vocab_size=VOCABULARY)[1])


MODELS: dict[str, Callable[[], LoadedModel]] = {
    "dense": tiny_loaded,
    "experts": experts,
    "conv": lambda: tiny_hybrid("conv"),
    "delta": lambda: tiny_hybrid("delta"),
    "mamba": lambda: tiny_hybrid("mamba"),
    "keyed": lambda: tiny_hybrid("keyed"),
    "lightning": lambda: tiny_hybrid("lightning"),
    "lru": lambda: tiny_hybrid("lru"),
    "indexed": lambda: experts("glmdsa"),
}
