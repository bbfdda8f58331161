"""Train the models that bifolio ships: `stories`, `stories-draft` and `shakespeare`.

    python scripts/train_models.py DATA WORK --seconds 540 [--device cuda]

DATA holds `teacher/` (see make_stories.py pack), `tinyshakespeare.txt` and the children's books and stories as .txt.xz.
WORK receives one folder for each model, `report.json`, `samples.md` and `results.tar.NN`: everything but the corpus,
weights in float16, split into files of 15 MB. Existing results are kept, so an interrupted run can be continued.

The time is divided: corpus generation and tokenization come first, the rest goes to training. `--stage data` makes only
the corpus, `shakespeare` and the baseline, so that another run of the same command spends all its time on the rest.
`shakespeare`, the n-gram baseline and the first compilation run in separate processes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_stories import write_corpus

from bifolio.api.language_model import LanguageModel
from bifolio.text.tokenizer import Tokenizer
from bifolio.train.data import TokenData, evaluation_sequences, read_documents, tokenize
from bifolio.train.loop import Corpus, train
from bifolio.train.ngram import NgramModel
from bifolio.train.progress import PlainProgress
from bifolio.train.settings import TrainSettings
from bifolio.train.tokenizer import train_bpe

BOOKS = ("children_books.txt.xz", "childrens_stories_ccby.txt.xz")
CORPUS_SHARE, DRAFT_SHARE = 0.2, 0.14  # of the whole time
CLOSING_SECONDS = 35  # samples, agreement, packing
PART_BYTES = 15 << 20
CALIBRATION_STEPS = 60
PROMPT_TOKENS, GREEDY_STORIES = 16, 64


@dataclass(frozen=True)
class Plan:
    """Paths, time limits and sizes of a run."""

    data: Path
    work: Path
    seconds: float
    device: str
    tiny: bool  # a test run on a CPU: the same steps with small sizes
    corpus_share: float = CORPUS_SHARE  # of the time, for writing stories

    @property
    def sequences_at_a_time(self) -> int:
        return 16 if self.tiny else 8192


def story_settings(plan: Plan) -> TrainSettings:
    settings = TrainSettings(
        data=("stories.txt", *BOOKS),
        output=str(plan.work / "stories"),
        preset="stories",
        vocab_size=4096,
        batch_size=128,
        learning_rate=2e-3,
        final_learning_rate=0.02,
        warmup=300,
        eval_fraction=0.01,
        eval_every=1000,
        eval_sequences=512,
        save_every=2000,
        sample_every=2000,
        sample_tokens=200,
        log_every=20,
        device=plan.device,
        compile=not plan.tiny,
    )
    if not plan.tiny:
        return settings
    return replace(settings, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96,
                   context=64, batch_size=4, vocab_size=300, warmup=5, eval_fraction=0.1)  # fmt: skip


def draft_settings(plan: Plan) -> TrainSettings:
    stories = plan.work / "stories"
    settings = replace(
        story_settings(plan),
        output=str(plan.work / "stories-draft"),
        tokenizer=str(stories / "tokenizer.json"),
        teacher=str(stories),
        learning_rate=4e-3,
    )
    if plan.tiny:
        return replace(settings, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    return replace(settings, preset="draft")


# -- stages ------------------------------------------------------------------------------------------------------


def start_shakespeare(plan: Plan) -> subprocess.Popen[bytes] | None:
    """Run `bifolio train` on the character model in a separate process."""
    if (plan.work / "shakespeare" / "config.json").is_file():
        return None
    steps = "20" if plan.tiny else "3000"
    options = {"output": plan.work / "shakespeare", "preset": "shakespeare", "tokenizer": "char", "steps": steps,
               "batch-size": 4 if plan.tiny else 64, "learning-rate": 2e-3, "weight-decay": 0.2, "eval-every": 100,
               "sample-every": 1000, "save-every": 0, "eval-fraction": 0.1, "device": plan.device,
               "eval-sequences": 8 if plan.tiny else 400}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bifolio.train", str(plan.data / "tinyshakespeare.txt"), *words, "--keep-best"]
    log = (plan.work / "shakespeare.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def make_corpus(plan: Plan) -> Path:
    path = plan.work / "stories.txt"
    if not path.is_file():
        counts = write_corpus(
            plan.data / "teacher",
            path.with_suffix(".partial"),
            seconds=plan.corpus_share * plan.seconds,
            max_stories=16 if plan.tiny else 10**9,
            num_sequences=plan.sequences_at_a_time,
            device=plan.device,
        )
        path.with_suffix(".partial").rename(path)
        print("corpus:", json.dumps(counts), flush=True)
    return path


def make_tokens(plan: Plan) -> Corpus:
    """Tokenize the data mix and save the tokens, so that a later run does not repeat it."""
    tokenizer_path, tokens_path = plan.work / "tokenizer.json", plan.work / "tokens.npz"
    settings = story_settings(plan)
    if not tokens_path.is_file():
        began = time.monotonic()
        documents = read_documents([make_corpus(plan), *(plan.data / name for name in BOOKS)])
        if plan.tiny:
            documents = [document[:2000] for document in documents[:60]]
        random.Random(0).shuffle(documents)
        tokenizer = train_bpe(documents, settings.vocab_size)
        print(f"tokenizer after {time.monotonic() - began:.0f} s", flush=True)
        tokens = tokenize(documents, tokenizer, settings.eval_fraction, settings.seed)
        tokenizer.backend.save(str(tokenizer_path))
        np.savez(tokens_path, train=tokens.train, held_out=tokens.held_out,
                 counts=[tokens.num_documents, tokens.num_characters])  # fmt: skip
        print(f"{len(tokens.train):,} tokens after {time.monotonic() - began:.0f} s", flush=True)
    arrays = np.load(tokens_path)
    num_documents, num_characters = (int(count) for count in arrays["counts"])
    tokens = TokenData(arrays["train"], arrays["held_out"], num_documents, num_characters)
    return Corpus(Tokenizer.from_file(tokenizer_path), tokens)


def start_self(plan: Plan, stage: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, str(plan.data), str(plan.work), "--seconds", str(plan.seconds), "--device",
               plan.device, "--stage", stage, *(["--tiny"] if plan.tiny else [])]  # fmt: skip
    log = (plan.work / f"{stage}.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def warm_up_compiler(plan: Plan) -> None:
    """Compile the network once on random tokens; the compiler caches its results on disk."""
    settings = replace(story_settings(plan), output=str(plan.work / "warm-up"), steps=3, sample_every=0, save_every=0,
                       eval_sequences=1)  # fmt: skip
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, settings.vocab_size, 10**5).astype(np.int32)
    letters = [chr(i) for i in range(0x4E00, 0x4E00 + 64)]
    tokenizer = train_bpe(letters, 257)
    tokenizer.vocab_size = settings.vocab_size  # only the shape of the network matters here
    train(settings, Corpus(tokenizer, TokenData(tokens[:-5000], tokens[-5000:], 1, 1)))


def compute_ngrams(plan: Plan) -> None:
    """The loss of n-gram models on the same held-out tokens."""
    corpus = make_tokens(plan)
    settings = story_settings(plan)
    vocab_size = corpus.tokenizer.vocab_size
    inputs, _ = evaluation_sequences(corpus.tokens.held_out, settings.shape().context, 10**9)
    held_out = inputs.flatten().numpy()
    losses = {}
    for order in (1, 2, 3, 4):
        losses[f"{order}-gram"] = NgramModel(corpus.tokens.train, vocab_size, order).loss(held_out)
        (plan.work / "ngram.json").write_text(json.dumps(losses))


def train_for(settings: TrainSettings, corpus: Corpus, seconds: float, plan: Plan) -> dict[str, Any]:
    """Measure the speed, choose the number of steps that fits the time, and train."""
    if (Path(settings.output) / "config.json").is_file():
        report: dict[str, Any] = json.loads((Path(settings.output) / "training.json").read_text())
        return report
    began = time.monotonic()
    settings, speed = measure_speed(settings, corpus, plan)
    left = seconds - (time.monotonic() - began)
    steps = max(int(0.97 * left * speed), 10 if plan.tiny else 500)
    if plan.tiny:
        steps = min(steps, 20)
    print(f"{settings.output}: {speed:.1f} steps/s, {steps} steps in {left:.0f} s", flush=True)
    train(replace(settings, steps=steps), corpus, PlainProgress(10.0))
    return dict(json.loads((Path(settings.output) / "training.json").read_text()))


def measure_speed(settings: TrainSettings, corpus: Corpus, plan: Plan) -> tuple[TrainSettings, float]:
    """Steps per second after warm-up; without torch.compile if it fails."""
    steps = 6 if plan.tiny else CALIBRATION_STEPS
    trial = replace(settings, output=str(plan.work / "warm-up"), steps=steps, log_every=steps // 3, sample_every=0,
                    save_every=0, eval_sequences=1)  # fmt: skip
    clock = _Clock()
    try:
        train(trial, corpus, clock)
    except Exception:
        if not settings.compile:
            raise
        traceback.print_exc()
        settings = replace(settings, compile=False)
        train(replace(trial, compile=False), corpus, clock)
    return settings, clock.last_speed / (settings.batch_size * settings.shape().context)


class _Clock(PlainProgress):
    last_speed = 0.0

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        self.last_speed = tokens_per_second


# -- evaluation --------------------------------------------------------------------------------------------------


def write_samples(plan: Plan, corpus: Corpus) -> str:
    """Sample twenty stories, half without a prompt and half with one."""
    model = LanguageModel.from_pretrained(plan.work / "stories").to(plan.device).eval()
    beginnings = ["", "Once upon a time", "One day, a little dog", "Lily and her brother", "The old bear was sad"]
    count, tokens = (1, 20) if plan.tiny else (4, 300)
    texts = []
    for seed, beginning in enumerate(beginnings):
        idx = torch.tensor([corpus.tokenizer.encode(beginning)] * count, device=plan.device)
        rows = model.decode(idx, tokens, temperature=0.7, top_p=0.95, seed=seed, stop_token_ids=[0]).tolist()
        for row in rows:
            end = row.index(0, 1) if 0 in row[1:] else len(row)
            texts.append(corpus.tokenizer.decode(row[:end]).strip())
    return "\n\n".join(f"## {i}\n\n{text}" for i, text in enumerate(texts, 1)) + "\n"


@torch.no_grad()
def whole_held_out_loss(folder: Path, plan: Plan, corpus: Corpus) -> float:
    """The loss on every held-out token, measured like that of the n-gram models."""
    model = LanguageModel.from_pretrained(folder).to(plan.device).eval()
    inputs, targets = evaluation_sequences(corpus.tokens.held_out, model.config.max_position, 10**9)
    losses = []
    for xb, yb in zip(torch.split(inputs, 64), torch.split(targets, 64), strict=True):
        loss = model.prefill(xb.to(plan.device), yb.to(plan.device))[1]
        losses.append((len(xb), 0.0 if loss is None else loss.item()))
    return sum(count * loss for count, loss in losses) / len(inputs)


def greedy_agreement(plan: Plan, corpus: Corpus) -> float:
    """Share of tokens in greedy stories of `stories` that are also the draft model's most likely token."""
    stories = LanguageModel.from_pretrained(plan.work / "stories").to(plan.device).eval()
    draft = LanguageModel.from_pretrained(plan.work / "stories-draft").to(plan.device).eval()
    tokens = corpus.tokens.held_out
    starts = np.flatnonzero(tokens[: -PROMPT_TOKENS - 1] == 0)[: 4 if plan.tiny else GREEDY_STORIES]
    idx = torch.from_numpy(np.stack([tokens[s : s + PROMPT_TOKENS] for s in starts]).astype(np.int64)).to(plan.device)
    rows = stories.decode(idx, 16 if plan.tiny else 160, temperature=0.0)
    with torch.no_grad():
        guesses = draft.prefill(rows[:, :-1])[0].argmax(dim=-1)[:, PROMPT_TOKENS - 1 :]
    expected = rows[:, PROMPT_TOKENS:]
    ended = (expected == 0).cumsum(dim=1) - (expected == 0).long() > 0  # tokens after the end are excluded
    return float((guesses == expected)[~ended].float().mean())


def pack_results(plan: Plan) -> None:
    """Archive float16 weights and all small files, split into parts."""
    archive = plan.work / "results.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("stories", "stories-draft", "shakespeare"):
            folder = plan.work / name
            if (folder / "config.json").is_file():
                LanguageModel.from_pretrained(folder).half().save_pretrained(plan.work / "packed")
                tar.add(plan.work / "packed" / "model.safetensors", f"{name}/model.safetensors")
                for file in sorted(folder.iterdir()):
                    if file.is_file() and file.suffix in (".json", ".png"):
                        tar.add(file, f"{name}/{file.name}")
        for file in [*plan.work.glob("*.json"), *plan.work.glob("*.md"), *plan.work.glob("*.log")]:
            tar.add(file, file.name)
    data = archive.read_bytes()
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        (plan.work / f"results.tar.{number:02d}").write_bytes(data[start : start + PART_BYTES])
    archive.unlink()


# -- main --------------------------------------------------------------------------------------------------------


def run(plan: Plan) -> None:
    deadline = time.monotonic() + plan.seconds
    plan.work.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    helpers = [start_shakespeare(plan)]
    if story_settings(plan).compile and not (plan.work / "tokens.npz").is_file():
        helpers.append(start_self(plan, "compile"))
    try:
        corpus = make_tokens(plan)
        if not (plan.work / "ngram.json").is_file():
            helpers.append(start_self(plan, "ngram"))
        draft_seconds = DRAFT_SHARE * plan.seconds
        left = deadline - time.monotonic()
        report["stories"] = train_for(story_settings(plan), corpus, left - draft_seconds - CLOSING_SECONDS, plan)
        left = deadline - time.monotonic()
        report["stories-draft"] = train_for(draft_settings(plan), corpus, left - CLOSING_SECONDS, plan)
        for name in ("stories", "stories-draft"):
            report[f"{name} held-out loss"] = whole_held_out_loss(plan.work / name, plan, corpus)
        report["greedy_agreement"] = greedy_agreement(plan, corpus)
        (plan.work / "samples.md").write_text(write_samples(plan, corpus), encoding="utf-8")
    except Exception:
        traceback.print_exc()
    finally:
        finish_helpers([helper for helper in helpers if helper is not None], deadline)
        if (plan.work / "ngram.json").is_file():
            report["ngram"] = json.loads((plan.work / "ngram.json").read_text())
        summary = {name: _brief(value) for name, value in report.items()}
        (plan.work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        pack_results(plan)
        print(json.dumps(summary, indent=1), flush=True)
        print((plan.work / "shakespeare.log").read_text()[-700:], flush=True)


def make_data(plan: Plan) -> None:
    """Run all stages before `stories` and `stories-draft`."""
    deadline = time.monotonic() + plan.seconds
    plan.work.mkdir(parents=True, exist_ok=True)
    helpers = [start_shakespeare(plan), start_self(plan, "compile")]
    make_tokens(replace(plan, corpus_share=0.4))
    helpers.append(start_self(plan, "ngram"))
    finish_helpers([helper for helper in helpers if helper is not None], deadline)


def finish_helpers(helpers: list[subprocess.Popen[bytes]], deadline: float) -> None:
    for helper in helpers:
        try:
            helper.wait(max(deadline - time.monotonic(), 5))
        except subprocess.TimeoutExpired:
            helper.kill()


def _brief(value: Any) -> Any:
    if not isinstance(value, dict) or "settings" not in value:
        return value
    return {name: entry for name, entry in value.items() if name not in ("settings", "history")} | {
        "steps": value["settings"]["steps"]
    }


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 1
    tiny = "--tiny" in arguments
    rest = [word for word in arguments[2:] if word != "--tiny"]
    options = {"seconds": "560", "device": "cuda" if torch.cuda.is_available() else "cpu", "stage": "all"}
    options |= {flag.removeprefix("--"): value for flag, value in zip(rest[::2], rest[1::2], strict=True)}
    plan = Plan(Path(arguments[0]), Path(arguments[1]), float(options["seconds"]), options["device"], tiny)
    torch.set_float32_matmul_precision("high")
    {"all": run, "data": make_data, "compile": warm_up_compiler, "ngram": compute_ngrams}[options["stage"]](plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
