"""Doors: the ways in which users open a model, and the checks that every one of them must pass.

A door is (row, kernels, entry, option). The *entry* is `LLM(folder)`, `LLM(file.gguf)` or `bifolio serve` with a
client; the *option* changes the engine or the request. Engines are never built by hand here: options of `LLM` alone.

    first turn     |<------ prompt ------>|<- 8 tokens ->|
    second turn    |<------ prompt ------>|<- 8 tokens ->|<- question ->|<- 8 tokens ->|
                   |<- from the prefix cache ->|

Tokens are those that the oracle scores highest (exact arithmetic), or close to them (rounded arithmetic).
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
from door_models import HYBRID, ROW_FAMILIES, DoorModel, door_model, gguf_file, oracle_logits, with_adapter

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.errors import EngineDeadError
from bifolio.sampling.grammar import Grammar
from helpers import log_softmax, random_prompt, tiny_tokenizer

PROMPT_LENGTH, NUM_NEW, QUESTION_LENGTH = 70, 8, 5  # a prompt fills a block of every device's default size
PATTERN_LENGTH = 5  # letters of a text with a grammar
ADAPTER = "adapter"  # name of the adapter of a door
ENTRIES = ("folder", "gguf", "serve")
NORMED, DIFFER, TILED = "groups that the recurrent layers are normed in", "heads or inputs that differ", "in this file"
WITHOUT_RANKS = {  # (family, entry) -> the reason of tensor parallelism for a refusal of two ranks
    **dict.fromkeys(product(("bamba", "granitehybrid", "minimax"), ENTRIES), NORMED),
    **dict.fromkeys(product(("gemma3n", "gemma4", "mimo2"), ENTRIES), DIFFER),
    **dict.fromkeys(product(("qwen35", "qwen35moe"), ["gguf"]), TILED),
    **dict.fromkeys(product(("bitnet",), ENTRIES), "norms of this model"),
    **dict.fromkeys(product(("deepseek4",), ENTRIES), "compressed entries"),
    **dict.fromkeys(product(("jamba", "mamba", "recurrent_gemma"), ENTRIES), "selective recurrent layers"),
    **dict.fromkeys(product(("mamba2",), ENTRIES), "1 query heads"),
    **dict.fromkeys(product(("rwkv7",), ENTRIES), "layers of RWKV"),
    **dict.fromkeys(product(("zamba2",), ENTRIES), "share blocks"),
}

WITHOUT_ADAPTERS = {  # (family, entry) -> the reason of adapters for a refusal of this one
    **dict.fromkeys(product(("mimo2",), ENTRIES), "cannot be changed in this mimo2 model"),
    **dict.fromkeys(product(("zamba2",), ENTRIES), "cannot be changed in this zamba2 model"),
    **dict.fromkeys(product(("exaone",), ENTRIES), "cannot be changed in this exaone model"),  # it is one of Llama
    ("falcon_h1", "gguf"): "has factors in its weights",
}


# -- answers ---------------------------------------------------------------------------------------------------------
class Turn(NamedTuple):
    """An answer to a prompt."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the tokens
    num_cached: int = 0  # tokens of the prompt


@dataclass(frozen=True)
class Tolerance:
    """The distance of logprobs from the oracle's, in standard deviations of the logits of a position."""

    largest: float = 0.0  # of any token; 0: tokens must be the oracle's, and logprobs equal to 1e-3
    median: float = 0.0  # of a turn
    repeated: float = 0.0  # distance of two runs of one request, in nats; 0: equal to the last bit

    @property
    def is_exact(self) -> bool:
        return self.largest == 0


EXACT = Tolerance()
PRODUCTS = Tolerance(repeated=1e-4)  # of numpy: sums of one row depend on the number of rows


class Entry(Protocol):
    """An opened door: requests to the engine, however it is reached. All of them are greedy."""

    def ask(
        self, prompts: list[list[int]], num_new: int = NUM_NEW, pattern: str | None = None, adapter: str | None = None
    ) -> list[Turn]:
        """Answers to prompts that run together, with texts of a pattern, or of an adapter, where one is given."""
        ...

    def ask_cold(self, prompt: list[int]) -> Turn:
        """The answer without the prefixes that earlier requests cached."""
        ...

    def beams(self, prompt: list[int], width: int, num_new: int) -> list[tuple[list[int], float]]:
        """(tokens, sum of logprobs) of the best texts."""
        ...

    def num_preemptions(self) -> int: ...

    def num_used_blocks(self) -> int: ...


@dataclass(frozen=True)
class LlmEntry:
    """`LLM` in this process."""

    llm: LLM

    def ask(
        self, prompts: list[list[int]], num_new: int = NUM_NEW, pattern: str | None = None, adapter: str | None = None
    ) -> list[Turn]:
        grammar = None if pattern is None else Grammar.regex(pattern)
        params = SamplingParams(
            temperature=0.0, max_tokens=num_new, ignore_eos=pattern is None, logprobs=0, grammar=grammar
        )
        outputs = self.llm.generate(list(prompts), params, lora_request=adapter)
        assert all(output.error is None for output in outputs), [output.error for output in outputs]
        turns = []
        for prompt, output in zip(prompts, outputs, strict=True):
            logprobs = [entry.logprob for entry in output.outputs[0].logprobs or ()]
            turns.append(Turn(prompt, list(output.outputs[0].token_ids), logprobs, output.num_cached_tokens))
        return turns

    def ask_cold(self, prompt: list[int]) -> Turn:
        self.llm.engine.blocks.drop_cached()
        return self.ask([prompt])[0]

    def beams(self, prompt: list[int], width: int, num_new: int) -> list[tuple[list[int], float]]:
        params = BeamSearchParams(width, max_tokens=num_new, ignore_eos=True, length_penalty=0.0)
        (output,) = self.llm.beam_search([prompt], params)
        return [(list(each.token_ids), each.score or 0.0) for each in output.outputs]

    def num_preemptions(self) -> int:
        return int(self.llm.engine.stats().num_preemptions)

    def num_used_blocks(self) -> int:
        return self.llm.engine.blocks.num_used_blocks


def first_prompt(model: DoorModel) -> list[int]:
    return random_prompt(PROMPT_LENGTH, seed=len(model.name), vocab_size=tiny_tokenizer().get_vocab_size())


def question(model: DoorModel) -> list[int]:
    return random_prompt(QUESTION_LENGTH, seed=100 + len(model.name), vocab_size=tiny_tokenizer().get_vocab_size())


# -- the oracle ------------------------------------------------------------------------------------------------------
def check_turn(model: DoorModel, turn: Turn, tolerance: Tolerance, later: list[int] | None = None) -> None:
    """Hold a turn against the oracle; with the tokens of a `later` turn, both are scored in one pass."""
    tokens = later if later is not None else [*turn.prompt, *turn.tokens]
    logits = oracle_logits(model, tuple(tokens))
    start = len(turn.prompt) - 1
    rows = logits[start : start + len(turn.tokens)]
    wanted = rows.argmax(axis=1).tolist()
    places = np.arange(len(turn.tokens))
    scored = log_softmax(rows)[places, turn.tokens]
    if tolerance.is_exact:
        assert turn.tokens == wanted, (model.name, turn.tokens, wanted)
        np.testing.assert_allclose(turn.logprobs, scored, atol=1e-3)
        return
    spread = rows.std(axis=1)
    errors = np.abs(np.array(turn.logprobs) - scored) / spread
    lost = (rows.max(axis=1) - rows[places, turn.tokens]) / spread  # by tokens that are not the likeliest
    assert np.median(errors) < tolerance.median, (model.name, errors.round(3).tolist())
    assert np.median(lost) < tolerance.median, (model.name, lost.round(3).tolist())
    assert errors.max() < tolerance.largest, (model.name, errors.round(3).tolist())
    assert lost.max() < tolerance.largest, (model.name, lost.round(3).tolist())


def check_same(turn: Turn, other: Turn, tolerance: Tolerance) -> None:
    """Hold two runs of one request against each other, up to a token that rounding changed."""
    if tolerance.repeated == 0:
        assert (turn.tokens, turn.logprobs) == (other.tokens, other.logprobs)
        return
    assert turn.tokens == other.tokens or not tolerance.is_exact
    pairs = zip(turn.tokens, other.tokens, strict=True)
    equal = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), len(turn.tokens))
    differences = np.abs(np.array(turn.logprobs[:equal]) - np.array(other.logprobs[:equal]))
    assert (differences < tolerance.repeated).all(), differences


# -- checks ----------------------------------------------------------------------------------------------------------
def check_talk(entry: Entry, model: DoorModel, tolerance: Tolerance = EXACT) -> None:
    """Two turns: the oracle's tokens; the second from the prefix cache, as it is without one."""
    (first,) = entry.ask([first_prompt(model)])
    (second,) = entry.ask([[*first.prompt, *first.tokens, *question(model)]])
    assert first.num_cached == 0
    assert second.num_cached > 0
    assert entry.num_used_blocks() == 0
    cold = entry.ask_cold(second.prompt)
    assert cold.num_cached == 0
    check_same(second, cold, tolerance)
    whole = [*second.prompt, *second.tokens]
    check_turn(model, first, tolerance, whole)
    check_turn(model, second, tolerance, whole)


def check_crowd(entry: Entry, model: DoorModel, tolerance: Tolerance = EXACT) -> None:
    """Four requests on blocks for one or two: some are preempted, and all give the oracle's tokens."""
    prompt = first_prompt(model)
    turns = entry.ask([prompt[16 * number :][:20] for number in range(4)], 40)
    assert entry.num_preemptions() > 0, "no request was preempted: the cache of this door is too large"
    for turn in turns:
        check_turn(model, turn, tolerance)


def check_beams(entry: Entry, model: DoorModel, tolerance: Tolerance = EXACT) -> None:
    """Two different texts, best first, each with the sum of logprobs that the oracle gives it."""
    prompt = first_prompt(model)
    found = entry.beams(prompt, 2, 5)
    assert len({tuple(tokens) for tokens, _ in found}) == 2
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    for tokens, score in found:
        logits = oracle_logits(model, (*prompt, *tokens))[len(prompt) - 1 : -1]
        wanted = log_softmax(logits)[np.arange(len(tokens)), tokens].sum()
        allowed = 5e-3 if tolerance.is_exact else tolerance.median * 3 * float(logits.std()) * len(tokens)
        assert score == pytest.approx(wanted, abs=allowed)


def check_grammar(entry: Entry, model: DoorModel, tolerance: Tolerance = EXACT) -> None:
    """Text of a pattern: each token is the likeliest of the oracle's among those that the pattern allows."""
    pytest.importorskip("llguidance")
    prompt, tokenizer, left = first_prompt(model), tiny_tokenizer(), PATTERN_LENGTH
    (turn,) = entry.ask([prompt], 12, f"[a-f]{{{left}}}")
    texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    tokens = [token for token in turn.tokens if texts[token]]  # without the end of the text
    assert re.fullmatch(f"[a-f]{{{left}}}", "".join(texts[token] for token in tokens))
    logits = oracle_logits(model, (*prompt, *tokens))[len(prompt) - 1 : -1]
    for row, token in zip(logits, tokens, strict=True):
        allowed = [other for other, text in enumerate(texts) if re.fullmatch(f"[a-f]{{1,{left}}}", text)]
        assert row[token] >= row[allowed].max() - tolerance.largest * row.std()
        left -= len(texts[token])


def check_adapter(entry: Entry, model: DoorModel, tolerance: Tolerance = EXACT) -> None:
    """One prompt with the adapter and without: each has the tokens of its oracle, and blocks of its own."""
    adapted = with_adapter(model)
    (first,) = entry.ask([first_prompt(model)], adapter=ADAPTER)
    (plain,) = entry.ask([first_prompt(model)])
    (second,) = entry.ask([[*first.prompt, *first.tokens, *question(model)]], adapter=ADAPTER)
    assert (first.num_cached, plain.num_cached) == (0, 0)
    assert second.num_cached > 0
    assert entry.num_used_blocks() == 0
    check_turn(model, plain, tolerance)
    check_turn(adapted, first, tolerance)
    check_turn(adapted, second, tolerance)
    assert first.logprobs != plain.logprobs


# -- options ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Option:
    """Settings of `LLM` and the check of the engine that they give."""

    settings: dict[str, Any]
    check: Callable[..., None] = check_talk
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (family, entry) -> words of the error
    has_adapter: bool = False


SMALL = {"num_blocks": 16, "block_size": 8, "max_model_len": 64}
OPTIONS = {
    "defaults": Option({}),
    "small memory": Option(SMALL, check_crowd),
    "deterministic": Option({"deterministic": True}),
    "tensor parallel": Option({"tensor_parallel_size": 2, "threads": 2}, refused=WITHOUT_RANKS),
    "draft": Option({"speculative": SpeculativeConfig("ngram", adaptive=False)}),
    "beams": Option({}, check_beams),
    "grammar": Option({}, check_grammar),
    "adapter": Option({}, check_adapter, WITHOUT_ADAPTERS, has_adapter=True),
}


@dataclass(frozen=True)
class Door:
    """One way to open one model."""

    name: str  # row
    kernels: str  # "native", "reference", "stand-in", "gpu"
    entry: str  # of ENTRIES
    option: str  # of OPTIONS

    @property
    def family(self) -> str:
        return ROW_FAMILIES[self.name]

    @property
    def refusal(self) -> str | None:
        """Words of the error, where the option is refused."""
        return OPTIONS[self.option].refused.get((self.family, self.entry))

    @property
    def tolerance(self) -> Tolerance:
        """Of kernels on the CPU."""
        return EXACT if self.kernels == "native" else PRODUCTS

    @property
    def is_hybrid(self) -> bool:
        return self.family in HYBRID

    @property
    def model(self) -> DoorModel:
        return door_model(self.name, use_store=self.kernels == "gpu")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of `LLM`."""
        option = OPTIONS[self.option]
        if not option.has_adapter:
            return option.settings
        return {**option.settings, "lora_modules": {ADAPTER: str(with_adapter(self.model).adapter)}}

    @property
    def path(self) -> Path:
        return gguf_file(self.model) if self.entry == "gguf" else self.model.folder

    def __str__(self) -> str:
        return f"{self.name}-{self.kernels}-{self.entry}-{self.option}".replace(" ", "_")


# -- leaks -----------------------------------------------------------------------------------------------------------
@contextmanager
def opened_llm(path: Path, **options: Any) -> Iterator[LlmEntry]:
    """An LLM that leaves no blocks, states, threads or processes when it is closed, and answers no call then."""
    threads, children = own_threads(), set(child_processes())
    llm = LLM(path, **options)
    try:
        yield LlmEntry(llm)
        assert llm.engine.blocks.num_used_blocks == 0
        assert llm.engine.blocks.state_stats().num_held_states == 0
        llm.engine.blocks.check_invariants()
    finally:
        llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate([[5, 6, 7]])
    assert own_threads() <= threads
    assert set(child_processes()) <= children


def own_threads() -> set[threading.Thread]:
    """All but the monitor that the first progress bar of a process starts."""
    return {thread for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}


def child_processes() -> list[int]:
    """Ids of the running children of this process."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:  # a thread that has just ended, or a system without such files
            continue
    return found


# -- results ---------------------------------------------------------------------------------------------------------
@contextmanager
def recorded(door: Door) -> Iterator[None]:
    """Append the outcome to the file that BIFOLIO_DOOR_RESULTS names: one line of JSON for each door."""
    outcome = "failed"
    try:
        yield
        outcome = "ok"
    except pytest.skip.Exception:
        outcome = "skipped"
        raise
    finally:
        target = os.environ.get("BIFOLIO_DOOR_RESULTS")
        if target and outcome != "skipped":
            line = {"family": door.family, "row": door.name, "kernels": door.kernels, "entry": door.entry,
                    "option": door.option, "ok": outcome == "ok", "date": date.today().isoformat()}  # fmt: skip
            with Path(target).open("a", encoding="utf-8") as file:  # a short line is appended in one write
                file.write(json.dumps(line) + "\n")
