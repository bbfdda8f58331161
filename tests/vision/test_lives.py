"""Random lives of requests with images: none of these changes an output: n, beams, drafts, grammars, preemptions,
forks, aborts, prefix hits and tiers.

Each request runs alone in a roomy engine, and among others in a crowded one: tokens and logprobs are equal bit by bit.

PYTHONPATH=src:tests:tests/vision python tests/vision/test_lives.py --lives 3000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import cache
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from later_models import gemma4_large_model, gemma4_model, mistral3_model
from vision_models import VisionModel, gemma3_model, idefics3_model, picture, qwen3_5_model, qwen3_vl_model

from bifolio import LLM, Grammar, SamplingParams
from bifolio.beam_params import BeamSearchParams
from bifolio.config import SpeculativeConfig
from bifolio.engine.tiers.costs import Costs
from bifolio.errors import RequestError
from bifolio.prompts import PromptTokens

pytestmark = pytest.mark.full  # they compare with transformers and its processors

MODELS = {"gemma3": gemma3_model, "qwen3_vl": qwen3_vl_model}
LATER = {
    "gemma4": gemma4_model, "gemma4_large": gemma4_large_model, "mistral3": mistral3_model, "smolvlm": idefics3_model,
    "qwen3_5": qwen3_5_model,
}  # fmt: skip
EVERY = {**MODELS, **LATER}
SIZES = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 5}
LARGE = {**SIZES, "max_model_len": 360}  # of families whose images have more tokens
LONG = [("".join(chr(97 + (place * 7 + number) % 26) for place in range(120)),) for number in range(3)]
FILLING = [(text, "greedy", 0) for text in LONG]  # requests after which the cache holds little of those before
MORE = [5, 6, 7]  # tokens of a second turn
TEXTS = ("", "one", "one two three four five")
PIXELS = [picture(34 + 9 * seed, 40, seed) for seed in range(3)]
TOKENS = 14


@st.composite
def prompts(draw: st.DrawFn) -> tuple[tuple[int | str, ...], str, int]:
    """(Texts and numbers of pictures, kind of request, seed)."""
    parts = draw(st.lists(st.sampled_from([*TEXTS, 0, 0, 1, 2]), min_size=1, max_size=4))
    kind = draw(st.sampled_from(["greedy", "drawn", "n", "beams", "abort", "grammar", "fork"]))
    return tuple(parts), kind, draw(st.integers(0, 3))


LIVES = st.tuples(
    st.lists(prompts(), min_size=2, max_size=6), st.sampled_from([3, 16, 64]), st.sampled_from([0, 0, 70]),
    st.booleans(), st.booleans(), st.integers(1, 4),
)  # fmt: skip


class AlwaysRead(Costs):
    """No measured time decides on a test."""

    def prefers_tier(self, num_tokens: int, num_bytes: int) -> bool:
        return True


def prompt_of(llm: LLM, model: VisionModel, parts: tuple[int | str, ...]) -> PromptTokens:
    text = "a" + "".join(model.place if isinstance(part, int) else part for part in parts)
    images = [PIXELS[part] for part in parts if isinstance(part, int)]
    return llm.prompt_tokens({"prompt": text, "multi_modal_data": {"image": images} if images else None})


def params_of(kind: str, seed: int) -> Any:
    if kind == "beams":
        return BeamSearchParams(beam_width=2, max_tokens=TOKENS, ignore_eos=True)
    temperature = 0.0 if kind == "greedy" else 1.0
    grammar = Grammar.regex("[a-z ]{2,9}[.!]") if kind == "grammar" else None
    return SamplingParams(temperature=temperature, seed=seed, n=2 if kind == "n" else 1, max_tokens=TOKENS,
                          ignore_eos=grammar is None, logprobs=1, grammar=grammar)  # fmt: skip


def output_of(request: Any) -> Any:
    return [
        (sequence.output_token_ids, [(each.token_id, each.logprob) for each in sequence.logprobs], sequence.score)
        for sequence in request.sequences
    ]


@cache
def alone(name: str, parts: tuple[int | str, ...], kind: str, seed: int, tokens: tuple[int, ...] = ()) -> Any:
    """The output of a request, or of one with these tokens, without company."""
    llm = roomy(name)
    prompt = prompt_of(llm, EVERY[name](), parts)
    ids = list(tokens) or prompt.token_ids
    request = llm.engine.add_request("only", ids, params_of(kind, seed), images=prompt.images)
    while llm.engine.has_work:
        llm.engine.step()
    return output_of(request)


@cache
def roomy(name: str) -> LLM:
    """The plain engine that runs each request alone."""
    return LLM(EVERY[name]().folder, num_blocks=240, chunk_size=512, enable_prefix_caching=False, **LARGE)


class Life:
    """Requests in a crowded engine, which arrive one after the other."""

    def __init__(
        self, name: str, lives: list[Any], chunk_size: int, spare: int, drafts: bool, tiers: bool, gap: int
    ) -> None:
        self.name, self.lives, self.gap = name, [*lives, *FILLING, *lives] if tiers else lives, gap
        self.model = EVERY[name]()
        speculative = SpeculativeConfig(length=3, adaptive=False) if drafts else None
        sizes = {"num_blocks": 42 + spare, **SIZES} if name in MODELS else {"num_blocks": 92 + spare, **LARGE}
        self.llm = LLM(self.model.folder, chunk_size=chunk_size, speculative=speculative,
                       kv_offload=4_000_000 if tiers else None, **sizes)  # fmt: skip
        self.engine = self.llm.engine
        if self.engine.tiers is not None:
            self.engine.tiers.costs = AlwaysRead()
        self.requests: dict[int, Any] = {}
        self.branches: dict[int, Any] = {}
        self.left: set[int] = set()  # forks that were made, or whose parent was evicted

    def run(self) -> None:
        waiting, steps = list(enumerate(self.lives)), 0
        while waiting or self.engine.has_work:
            if waiting and (steps % self.gap == 0 or not self.engine.has_work):
                self.arrive(*waiting.pop(0))
            self.engine.step()
            steps += 1
            assert steps < 4000
            for number, (_, kind, _) in enumerate(self.lives):
                if kind == "abort" and number in self.requests and steps % 5 == 0:
                    self.engine.abort(str(number))
                if kind == "fork" and number in self.requests and number not in self.left:
                    self.fork(number)

    def arrive(self, number: int, life: Any) -> None:
        parts, kind, seed = life
        prompt = prompt_of(self.llm, self.model, parts)
        self.requests[number] = self.engine.add_request(
            str(number), prompt.token_ids, params_of(kind, seed), images=prompt.images
        )
        if kind == "fork":
            self.engine.keep(str(number))

    def fork(self, number: int) -> None:
        """Go on behind an answer as soon as it is complete."""
        if self.requests[number].sequences[0].finish_reason is None:
            return
        self.left.add(number)
        params = params_of("fork", self.lives[number][2])
        try:
            self.branches[number] = self.engine.fork(str(number), f"{number} again", MORE, params)
            self.engine.release(str(number))
        except RequestError as error:
            if "no conversation is kept" not in str(error):  # evicted for others
                raise

    def check(self) -> None:
        self.engine.blocks.check_invariants()
        assert self.engine.blocks.num_used_blocks == 0
        for number, (parts, kind, seed) in enumerate(self.lives):
            request = self.requests[number]
            assert request.error is None
            if kind != "abort":
                assert output_of(request) == alone(self.name, parts, kind, seed), (number, self.lives[number])
            if number in self.branches:
                tokens = (*request.sequences[0].token_ids, *MORE)
                assert output_of(self.branches[number]) == alone(self.name, parts, kind, seed, tokens), number
        self.llm.close()


def check_life(name: str, life: tuple[Any, ...]) -> None:
    run = Life(name, *life)
    run.run()
    run.check()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(LIVES)
def test_requests_with_images_are_as_alone(name: str, life: tuple[Any, ...]) -> None:
    check_life(name, life)


@pytest.mark.full
@pytest.mark.parametrize("name", LATER)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(LIVES)
def test_requests_of_later_families_are_as_alone(name: str, life: tuple[Any, ...]) -> None:
    check_life(name, life)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=430, deadline=None, suppress_health_check=list(HealthCheck))
@given(LIVES)
def test_three_thousand_lives_with_images(name: str, life: tuple[Any, ...]) -> None:
    check_life(name, life)


@pytest.mark.full
def test_a_kept_conversation_continues_behind_its_image() -> None:
    """A fork shares the blocks of the image and has its positions."""
    for name, make in MODELS.items():
        model = make()
        with LLM(model.folder, num_blocks=120, **SIZES) as llm:
            engine, prompt = llm.engine, prompt_of(llm, model, (0, "one"))
            params = params_of("greedy", 0)
            parent = engine.add_request("parent", prompt.token_ids, params, images=prompt.images)
            engine.keep("parent")
            while engine.has_work:
                engine.step()
            more = [5, 6, 7]
            branch = engine.fork("parent", "branch", more, params)
            while engine.has_work:
                engine.step()
            engine.release("parent")
            tokens = [*parent.sequences[0].token_ids, *more]
        with LLM(model.folder, num_blocks=120, enable_prefix_caching=False, **SIZES) as llm:
            whole = llm.engine.add_request("whole", tokens, params, images=prompt.images)
            while llm.engine.has_work:
                llm.engine.step()
        assert output_of(branch) == output_of(whole), name


@pytest.mark.full
def test_a_fork_keeps_images_as_a_whole() -> None:
    """Of the first tokens of a conversation; a cut inside an image is refused."""
    model = gemma3_model()
    with LLM(model.folder, num_blocks=120, **SIZES) as llm:
        engine, prompt, params = llm.engine, prompt_of(llm, model, ("one", 0, "two")), params_of("greedy", 0)
        parent = engine.add_request("parent", prompt.token_ids, params, images=prompt.images)
        engine.keep("parent")
        while engine.has_work:
            engine.step()
        (image,) = prompt.images
        with pytest.raises(RequestError, match=f"keep {image.start} tokens, or {image.end}, as a whole"):
            engine.fork("parent", "cut", [5], params, num_kept=image.start + 3)
        found = [
            engine.fork("parent", f"keeps {count}", [5], params, num_kept=count) for count in (image.start, image.end)
        ]
        while engine.has_work:
            engine.step()
        assert [len(request.images) for request in found] == [0, 1]
        assert parent.error is None
        engine.release("parent")


def main() -> None:
    parser = argparse.ArgumentParser(description="random lives of requests with images, until a difference")
    parser.add_argument("--lives", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    began, seed, counts = time.monotonic(), arguments.seed, Counter[str]()
    while counts["lives"] < arguments.lives and time.monotonic() - began < arguments.seconds:
        some_lives(list(EVERY)[seed % len(EVERY)], seed, counts)
        seed += 1
        print(f"{dict(counts)}, 0 differences, next seed {seed}, {time.monotonic() - began:.0f} s", flush=True)


def some_lives(name: str, seed: int, counts: Counter[str]) -> None:
    @hypothesis.seed(seed)
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(LIVES)
    def each(life: tuple[Any, ...]) -> None:
        run = Life(name, *life)
        run.run()
        run.check()
        requests = [*run.requests.values(), *run.branches.values()]
        counts.update(
            lives=1,
            requests=len(requests),
            forks=len(run.branches),
            hits=sum(request.metrics.num_cached_tokens > 0 for request in requests),
            preemptions=sum(request.metrics.num_preemptions for request in requests),
            drafted=sum(sequence.num_drafted for request in requests for sequence in request.sequences),
            images=sum(len(request.images) for request in requests),
            restored=0 if run.engine.tiers is None else run.engine.tiers.stats().num_tier_hits,
        )

    each()


if __name__ == "__main__":
    sys.exit(main())
