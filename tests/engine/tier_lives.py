"""Random lives of processes that share a folder of tiers and snapshots; many of them are killed at a random moment.

life     a process of its own: an engine with tiers continues conversations, in any order and company; requests are
         aborted, texts are saved and restored, engines of other models, drafts and sizes take its place
world    lives one after the other on one folder, whose files stay; between two of some worlds, files are damaged
truth    every turn as a plain engine computes it: no cached prefix, no tier, no draft, one request at a time

PYTHONPATH=tests:tests/engine python -m tier_lives --lives 10000
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bifolio import Grammar, SamplingParams
from bifolio.config import SpeculativeConfig, TierSettings
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.tiers.costs import Costs
from bifolio.engine.tiers.snapshots import capture, read_snapshot, restore, write_snapshot
from bifolio.errors import SnapshotError
from bifolio.model.draft_head import LoadedHead
from bifolio.model.eagle import load_eagle
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.sequence import Request
from draft_heads import eagle_folder
from helpers import (
    cpu_kernel_names,
    drain,
    fresh_folder,
    make_engine,
    make_kernels,
    random_prompt,
    tiny_folder,
    tiny_model,
    tiny_tokenizer,
)  # fmt: skip
from hybrid_models import VOCABULARY, tiny_hybrid

KERNELS = cpu_kernel_names()[0]  # whose bits do not depend on the sizes of a pass
EXPERTS = {"experts": "qwen3moe", "indexed": "glmdsa"}  # whose folders have a tokenizer; indexed: chosen positions
KINDS = ("dense", *EXPERTS, "delta", "mamba", "conv", "keyed", "lightning", "lru")
NUM_TALKS, NUM_TURNS = 5, 4
MAX_MODEL_LEN = 160
LIVES_OF_A_WORLD = 20
LONGEST_SECONDS = 300.0  # of a life, also beside other programs
LONGEST_KILL = 1.0  # seconds until a life is killed
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=7, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=8, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=7, max_tokens=9, grammar=Grammar.regex("[a-z ]{20,60}")),
    SamplingParams(temperature=1.0, seed=11, max_tokens=5, logprobs=1, n=2, ignore_eos=True),
)


class Warnings(logging.Handler):
    """Keeps all warnings of the package: a step that fails is tried again request by request, and leaves one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("bifolio").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class AlwaysRead(Costs):
    """No measured time decides for half of the engines."""

    def prefers_tier(self, num_tokens: int, num_bytes: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt with the answers that are right, bit for bit."""

    prompt: list[int]
    answers: list[Any]  # of each sequence: tokens, logprobs, end

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.answers[0][0]]


@dataclass(slots=True)
class Models:
    """The models of all lives, with the drafts that each may have."""

    models: dict[str, LoadedModel] = field(default_factory=dict)
    drafts: dict[str, dict[str, tuple[SpeculativeConfig | None, LoadedModel | LoadedHead | None]]] = field(
        default_factory=dict
    )
    truth: dict[str, list[list[Turn]]] = field(default_factory=dict)

    @classmethod
    def new(cls, kinds: tuple[str, ...] = KINDS) -> Models:
        models = cls()
        for kind in kinds:
            models.add(kind)
        return models

    def add(self, kind: str) -> None:
        self.models[kind] = model = _model(kind)
        ngram = SpeculativeConfig("ngram", length=3, adaptive=False)
        self.drafts[kind] = {"no": (None, None), "ngram": (ngram, None)}
        if kind == "dense":
            sizes = {"vocab_size": model.config.vocab_size, "draft_vocab_size": 90}
            head = str(eagle_folder(taps=(0, 1, 2), hidden_size=32, **sizes))
            eagle = SpeculativeConfig("eagle", length=3, draft_model=head, adaptive=False)
            self.drafts[kind]["eagle"] = (eagle, load_eagle(head, model))
            small = load_model(str(tiny_folder(tokenizer=True, seed=4, num_hidden_layers=1)))
            self.drafts[kind]["draft"] = (replace(ngram, method="draft", draft_model="small"), small)


def _model(kind: str) -> LoadedModel:
    if kind == "dense":
        return load_model(str(tiny_folder(tokenizer=True, seed=3)))
    if kind not in EXPERTS:
        return tiny_hybrid(kind)

    def write(say: Callable[[str], None]) -> None:
        _, folder = tiny_model(EXPERTS[kind], vocab_size=tiny_tokenizer().get_vocab_size())
        tiny_tokenizer().save(str(folder / "tokenizer.json"))
        say(str(folder))

    return load_model(said(write)[0])  # a process without torch forks in less time


def params_of(kind: str, talk: int) -> SamplingParams:
    params = PARAMS[talk % len(PARAMS)]
    has_text = kind == "dense" or kind in EXPERTS
    return params if has_text or params.grammar is None else replace(params, grammar=None)


def answers_of(request: Request) -> list[Any]:
    return [
        (list(one.output_token_ids), [(entry.logprob, tuple(entry.top)) for entry in one.logprobs],
         str(one.finish_reason))
        for one in request.sequences
    ]  # fmt: skip


def truth_of(model: LoadedModel, kind: str) -> list[list[Turn]]:
    """All talks of a model; some begin alike, as under one system prompt."""
    vocabulary = min(model.config.vocab_size, VOCABULARY)
    engine = make_engine(
        model, kernels=make_kernels(KERNELS), num_blocks=200, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False,
        poison=False,
    )  # fmt: skip
    talks = []
    for talk in range(NUM_TALKS):
        text = random_prompt(30, seed=talk // 2, vocab_size=vocabulary)
        turns: list[Turn] = []
        for turn in range(NUM_TURNS):
            text = [*text, *random_prompt(3 + 5 * turn, seed=10 * talk + turn, vocab_size=vocabulary)]
            request = engine.add_request(f"{talk}-{turn}", text, params_of(kind, talk))
            drain(engine)
            turns.append(Turn(text, answers_of(request)))
            text = turns[-1].text
        talks.append(turns)
    engine.close()
    return talks


# -- a life: in a process of its own -----------------------------------------------------------------------------------


class Life:
    """An engine after the other, on the folder of the world; each answer is compared when it is whole."""

    def __init__(self, models: Models, folder: Path, seed: int, say: Callable[[str], None], *, damaged: bool) -> None:
        self._models, self._folder, self._say, self._damaged = models, folder, say, damaged
        self._draw = random.Random(seed)
        self._kinds = random.Random(seed // LIVES_OF_A_WORLD).sample(sorted(models.models), 2)
        self._saved = folder / "snapshots"
        self._count = 0
        self._warnings = Warnings()
        self._start()

    def run(self) -> None:
        verbs = {self._turns: 6, self._abort: 2, self._save: 2, self._restore: 3, self._swap: 1}
        for _ in range(self._draw.randint(2, 7)):
            [verb] = self._draw.choices(list(verbs), list(verbs.values()))
            verb()
        self._end()

    def _start(self) -> None:
        draw, models = self._draw, self._models
        self._kind = draw.choice(self._kinds)
        config, draft = draw.choice([(None, None), *models.drafts[self._kind].values()])
        memory, folder = draw.choice([(0, True), (20_000, True), (200_000, True), (60_000, False)])
        tiers = TierSettings(memory, self._folder / "tier" if folder else None, draw.choice([40_000, 300_000, 1 << 30]))
        recurrent = models.models[self._kind].config.recurrent is not None
        hybrid = {"checkpoint_tokens": 16, "num_states": draw.choice([22, 40])} if recurrent else {}
        self._engine: InferenceEngine = make_engine(
            models.models[self._kind], kernels=make_kernels(KERNELS), block_size=draw.choice([4, 4, 4, 8]),
            num_blocks=draw.choice([44, 60, 120]), max_model_len=MAX_MODEL_LEN, max_num_seqs=4,
            chunk_size=draw.choice([5, 8, 32]), speculative=config, draft_model=draft, tiers=tiers, **hybrid,
        )  # fmt: skip
        assert self._engine.tiers is not None
        if draw.random() < 0.5:
            self._engine.tiers.costs = AlwaysRead()
        self._say(f"start {self._kind}")

    def _end(self) -> None:
        """Close the engine; nothing of it is left."""
        engine = self._engine
        hits = engine.stats().tiers.num_tier_hits
        assert not engine.has_work
        if self._draw.random() < 0.2:
            engine.tiers.copies.dropped_all()
        engine.close()
        assert engine.blocks.num_used_blocks == 0
        assert engine.blocks.state_stats().num_held_states == 0
        engine.blocks.check_invariants()
        assert self._damaged or not self._warnings.lines, self._warnings.lines
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("bifolio-tiers")] == []
        self._say(f"hits {hits}")

    def _swap(self) -> None:
        self._end()
        self._start()
        self._say("swap")

    def _any_turn(self) -> tuple[int, int]:
        return self._draw.randrange(NUM_TALKS), self._draw.randrange(NUM_TURNS)

    def _turn(self, talk: int, turn: int) -> Turn:
        return self._models.truth[self._kind][talk][turn]

    def _add(self, talk: int, turn: int) -> Request:
        self._count += 1
        prompt = self._turn(talk, turn).prompt
        return self._engine.add_request(f"r{self._count}", prompt, params_of(self._kind, talk))

    def _turns(self) -> None:
        wanted = [self._any_turn() for _ in range(self._draw.randint(1, 4))]
        found = [(self._add(talk, turn), talk, turn) for talk, turn in wanted]
        drain(self._engine, 100_000)
        self._check(found)

    def _check(self, found: list[tuple[Request, int, int]]) -> None:
        for request, talk, turn in found:
            assert request.error is None, request.error
            expected = self._turn(talk, turn).answers
            assert answers_of(request) == expected, f"{self._kind} {talk} {turn}: {answers_of(request)} {expected}"
            self._say("answer")
        self._engine.blocks.check_invariants()

    def _abort(self) -> None:
        """Some requests end in the middle, the others go on."""
        found = [(self._add(talk, turn), talk, turn) for talk, turn in [self._any_turn() for _ in range(3)]]
        for _ in range(self._draw.randrange(12)):
            self._engine.step()
        gone = self._draw.sample(found, self._draw.randint(1, 3))
        for request, _, _ in gone:
            self._engine.abort(request.request_id)
        drain(self._engine, 100_000)
        self._check([one for one in found if one not in gone])

    def _save(self) -> None:
        """Save a text, with the blocks that the cache has, over one of the same name."""
        talk, turn = self._any_turn()
        path = self._saved / f"{self._kind}-{talk}-{turn}"
        self._saved.mkdir(exist_ok=True)
        write_snapshot(path, capture(self._engine, self._turn(talk, turn).text))
        self._say("save")

    def _restore(self) -> None:
        """Restore a text that any life has saved, and continue it."""
        found = sorted(self._saved.glob(f"{self._kind}-*")) if self._saved.exists() else []
        if not found:
            return
        path = self._draw.choice(found)
        talk, turn = (int(part) for part in path.name.split("-")[1:])
        try:
            snapshot = read_snapshot(path)
        except SnapshotError:
            assert self._damaged, f"{path} is damaged, although no life is cut in the middle of a file"
            self._say("refused")
            return
        assert snapshot.token_ids == self._turn(talk, turn).text
        num_restored = restore(self._engine, snapshot)
        self._say(f"restored {num_restored}")
        follows = min(turn + 1, NUM_TURNS - 1)
        request = self._add(talk, follows)
        drain(self._engine, 100_000)
        self._check([(request, talk, follows)])


# -- worlds: in the parent ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """The sum of all lives."""

    lives: int = 0
    killed: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def heard(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("hits", "restored"):
            self.counts[f"{word} tokens"] += int(rest)
        self.counts[word] += 1

    def fail(self, text: str) -> None:
        """Note a failure, and say it at once: a run may take hours."""
        self.failures.append(text)
        print(text, file=sys.stderr, flush=True)


def in_a_process(body: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """(Process, pipe with its lines): `body` in a fork of this process, which has no threads."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    faulthandler.dump_traceback_later(LONGEST_SECONDS - 10, file=2)  # where a life hangs
    try:
        body(lambda line: _write(writer, line))
        _write(writer, "done")
    except BaseException:
        _write(writer, "failed " + json.dumps(traceback.format_exc()))
    os._exit(0)


def _write(file: int, line: str) -> None:
    data = memoryview(line.encode() + b"\n")
    while data:
        data = data[os.write(file, data) :]


def lines_of(reader: int, seconds: float) -> Iterator[str]:
    """The whole lines that arrive within this time."""
    end, rest = time.monotonic() + seconds, b""
    while select.select([reader], [], [], max(end - time.monotonic(), 0.0))[0]:
        data = os.read(reader, 65_536)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in whole)


def said(body: Callable[[Callable[[str], None]], None]) -> list[str]:
    """The lines of a process that ends by itself."""
    process, reader = in_a_process(body)
    *lines, last = lines_of(reader, LONGEST_SECONDS)
    os.close(reader)
    os.waitpid(process, 0)
    assert last == "done", last
    return lines


def computed_truth(models: Models) -> None:
    """Compute all talks in a process of its own, so that this one stays without threads."""
    for kind, model in models.models.items():

        def body(say: Callable[[str], None], kind: str = kind, model: LoadedModel = model) -> None:
            for talk in truth_of(model, kind):
                say(json.dumps([asdict(turn) for turn in talk]))

        models.truth[kind] = [
            [Turn(turn["prompt"], [_as_tuples(one) for one in turn["answers"]]) for turn in json.loads(line)]
            for line in said(body)
        ]


def _as_tuples(answer: Any) -> Any:
    tokens, logprobs, end = answer
    return tokens, [(own, tuple((token, value) for token, value in top)) for own, top in logprobs], end


def one_life(models: Models, folder: Path, seed: int, report: Report, *, damaged: bool) -> None:
    """A life that ends by itself, or is killed at any moment of its first tenths of a second."""
    draw = random.Random(f"kill {seed}")
    seconds = draw.random() ** 2 * LONGEST_KILL if draw.random() < 0.5 else LONGEST_SECONDS
    process, reader = in_a_process(lambda say: Life(models, folder, seed, say, damaged=damaged).run())
    last = ""
    for last in lines_of(reader, seconds):
        report.heard(last)
    if last.startswith("failed"):
        report.fail(f"seed {seed}: {json.loads(last[7:])}")
    elif last != "done":
        os.kill(process, signal.SIGKILL)
        report.killed += 1
        if seconds == LONGEST_SECONDS:
            report.fail(f"seed {seed}: it did not end")
    os.close(reader)
    os.waitpid(process, 0)
    report.lives += 1


def damage(folder: Path, draw: random.Random) -> int:
    """Damage some files of a world as a crash of the machine, or a failing disk, may; the number of them."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = draw.sample(found, min(draw.randint(0, 6), len(found)))
    for path in chosen:
        data = bytearray(path.read_bytes())
        at = draw.randrange(len(data)) if data else 0
        if draw.random() < 0.5:
            del data[at:]
        elif data:
            data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    return len(chosen)


def run_lives(
    models: Models, count: int, *, seed: int = 0, max_seconds: float = 1e9,
    tell: Callable[[Report], None] = lambda report: None,
) -> Report:  # fmt: skip
    """Worlds one after the other, until there were `count` lives; failures end no run."""
    report, end = Report(), time.monotonic() + max_seconds
    while report.lives < count and time.monotonic() < end:
        world = seed + report.lives // LIVES_OF_A_WORLD
        folder, draw = fresh_folder("lives"), random.Random(world)
        damaged = world % 3 == 2
        for life in range(min(LIVES_OF_A_WORLD, count - report.lives)):
            one_life(models, folder, LIVES_OF_A_WORLD * world + life, report, damaged=damaged)
            if damaged:
                report.counts["damaged files"] += damage(folder, draw)
        shutil.rmtree(folder, ignore_errors=True)
        tell(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first world")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no world after this time")
    arguments = parser.parse_args()
    models = Models.new()
    computed_truth(models)
    started = time.monotonic()

    def tell(report: Report) -> None:
        numbers = {"lives": report.lives, "killed": report.killed, **report.counts, "failures": len(report.failures)}
        print(json.dumps({**numbers, "seconds": round(time.monotonic() - started)}), flush=True)

    report = run_lives(models, arguments.lives, seed=arguments.seed, max_seconds=arguments.seconds, tell=tell)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
