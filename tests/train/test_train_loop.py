"""Whole training runs: they learn, resume exactly, run on several processes, and leave folders that others read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bifolio.api.language_model import LanguageModel
from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.loader import load_model
from bifolio.train import TrainResult, TrainSettings, train
from bifolio.train.command_line import describe, parse
from bifolio.train.progress import LiveProgress, PlainProgress, SilentProgress

pytestmark = pytest.mark.full

SENTENCES = ["The cat sat on the mat.", "A dog ran after the cat.", "The sun was warm and the day was long.",
             "She read a book about the sea.", "He had a red hat and a blue coat."]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(SENTENCES[(7 * i + i // 3) % 5] for i in range(600)), encoding="utf-8")
    return path


def small(text: Path, output: Path) -> TrainSettings:
    return TrainSettings(
        data=(str(text),),
        output=str(output),
        tokenizer="char",
        preset="char",
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=64,
        context=32,
        steps=12,
        batch_size=8,
        warmup=3,
        learning_rate=3e-3,
        log_every=2,
        eval_every=4,
        eval_sequences=4,
        save_every=5,
        sample_every=0,
        device="cpu",
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(settings: TrainSettings) -> TrainResult:
    return train(settings, progress=SilentProgress())


def weights_equal(first: LanguageModel, second: LanguageModel) -> bool:
    return all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_sixty_steps_reduce_the_loss_by_more_than_a_nat(text: Path, tmp_path: Path) -> None:
    settings = replace(small(text, tmp_path), steps=60, warmup=5, eval_every=60, save_every=0)
    losses = [loss for _, loss in run(settings).history.train]
    assert losses[0] > 3.0  # about the logarithm of the number of characters
    assert losses[-1] < losses[0] - 1.0


def test_the_same_seed_gives_the_same_run(text: Path, tmp_path: Path) -> None:
    first = run(small(text, tmp_path / "a"))
    second = run(small(text, tmp_path / "b"))
    other = run(replace(small(text, tmp_path / "c"), seed=1))
    assert first.history.train == second.history.train
    assert weights_equal(first.model, second.model)
    assert first.history.train != other.history.train


class StopAfter(SilentProgress):
    """Presses Ctrl-C when a step is reported."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("log_every", [2, 3, 5])
def test_interrupted_and_resumed_equals_uninterrupted(text: Path, tmp_path: Path, log_every: int) -> None:
    handler = signal.getsignal(signal.SIGINT)
    settings = replace(small(text, tmp_path / "whole"), log_every=log_every)
    whole = run(settings)
    parted = replace(settings, output=str(tmp_path / "parted"))
    stopped = train(parted, progress=StopAfter(log_every))
    assert not stopped.finished
    assert stopped.steps_done < settings.steps
    assert not (tmp_path / "parted" / "config.json").exists()
    resumed = run(replace(parted, resume=True))
    assert resumed.finished
    assert resumed.history.train == whole.history.train
    assert resumed.history.held_out == whole.history.held_out
    assert weights_equal(resumed.model, whole.model)
    assert signal.getsignal(signal.SIGINT) is handler


def test_resuming_another_run_is_refused(text: Path, tmp_path: Path) -> None:
    settings = small(text, tmp_path / "run")
    with pytest.raises(ModelFileError, match="no checkpoint"):
        run(replace(settings, resume=True))
    run(replace(settings, steps=4))
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.003, is 0\.1"):
        run(replace(settings, steps=4, resume=True, learning_rate=0.1))
    other = tmp_path / "other.txt"
    other.write_text("The cat sat." * 500, encoding="utf-8")
    with pytest.raises(ConfigError, match="other text"):
        run(replace(settings, steps=4, resume=True, data=(str(other),)))


def test_a_run_can_be_extended(text: Path, tmp_path: Path) -> None:
    settings = small(text, tmp_path / "run")
    short = run(replace(settings, steps=4))
    longer = run(replace(settings, steps=8, resume=True))
    assert (longer.finished, longer.steps_done) == (True, 8)
    assert longer.history.train[: len(short.history.train)] == short.history.train
    assert [step for step, _ in longer.history.train] == [2, 4, 6, 8]
    with pytest.raises(ConfigError, match=r"--steps is 3, and the run in .* has done 8: pass more"):
        run(replace(settings, steps=3, resume=True))


def test_accumulation_does_not_change_the_run(text: Path, tmp_path: Path) -> None:
    whole = run(small(text, tmp_path / "a")).history.train
    parts = run(replace(small(text, tmp_path / "b"), accumulate=4)).history.train
    assert [loss for _, loss in parts] == pytest.approx([loss for _, loss in whole], abs=1e-5)


def test_two_processes_equal_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 is this process, rank 1 one of its own, in the variables that torchrun sets (docs/training.md runs it)."""
    settings = replace(small(text, tmp_path / "one"), steps=6, accumulate=2)
    expected = run(settings).history
    options = {"output": tmp_path / "two", "tokenizer": "char", "preset": "char", "steps": 6, "accumulate": 2}
    same = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "context", "batch_size", "warmup",
            "learning_rate", "log_every", "eval_every", "eval_sequences", "sample_every", "device")  # fmt: skip
    options |= {name: getattr(settings, name) for name in same}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-m", "bifolio.train", str(text), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as other:
        try:
            train(parse([str(text), *words]))
            _, errors = other.communicate(timeout=240)
        finally:
            other.kill()
    assert other.returncode == 0, errors[-2000:]
    history = json.loads((tmp_path / "two" / "training.json").read_text())["history"]
    assert [loss for _, loss in history["train"]] == pytest.approx([loss for _, loss in expected.train], abs=1e-5)
    assert history["held_out"][-1][1] == pytest.approx(expected.held_out[-1][1], abs=1e-5)
    assert "2 process(es)" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_transformers_reads_the_exported_folder(text: Path, tmp_path: Path, architecture: str) -> None:
    import transformers

    settings = replace(small(text, tmp_path), tokenizer="bpe", vocab_size=280, architecture=architecture, steps=4)
    result = run(settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(SENTENCES[0], return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == result.tokenizer.encode(SENTENCES[0])
    with torch.no_grad():
        assert torch.allclose(result.model.prefill(ids)[0], theirs(ids).logits, atol=1e-4)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["num_parameters"] == result.model.config.num_parameters
    assert report["settings"]["seed"] == 0


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_gguf_holds_the_same_model(text: Path, tmp_path: Path, tokenizer: str) -> None:
    settings = replace(small(text, tmp_path / "run"), tokenizer=tokenizer, vocab_size=280, steps=4, gguf="f32")
    result = run(settings)
    loaded = load_model(tmp_path / "run" / "run.f32.gguf")
    assert loaded.require_tokenizer().encode(SENTENCES[1]) == result.tokenizer.encode(SENTENCES[1])
    assert loaded.config.num_parameters == result.model.config.num_parameters
    expected = result.model.weights().layers[1].down.parts[0]
    assert torch.equal(torch.tensor(loaded.weights.layers[1].down.parts[0].dequantize()), expected.detach())


def test_best_weights_are_kept(text: Path, tmp_path: Path) -> None:
    """A rate that destroys the model late in the run: the export holds the best evaluation's weights."""
    settings = replace(small(text, tmp_path), steps=12, eval_every=2, learning_rate=0.5, warmup=12, keep_best=True)
    result = run(settings)
    best_step, best_loss = min(result.history.held_out, key=lambda point: point[1])
    assert best_step < 12
    run_again = run(replace(settings, output=str(tmp_path / "short"), steps=best_step, warmup=12))
    assert weights_equal(LanguageModel.from_pretrained(tmp_path), run_again.model)
    assert best_loss < result.history.held_out[-1][1]


def test_best_weights_survive_an_interruption(text: Path, tmp_path: Path) -> None:
    settings = replace(
        small(text, tmp_path / "a"), steps=12, eval_every=2, learning_rate=0.5, warmup=12, keep_best=True
    )
    whole = run(settings)
    best_step = min(whole.history.held_out, key=lambda point: point[1])[0]
    cut = replace(settings, output=str(tmp_path / "b"))
    assert not train(cut, progress=StopAfter(best_step + 2)).finished
    resumed = run(replace(cut, resume=True))
    assert resumed.history.held_out == whole.history.held_out
    assert weights_equal(LanguageModel.from_pretrained(tmp_path / "a"), LanguageModel.from_pretrained(tmp_path / "b"))


def test_a_draft_learns_its_teacher(text: Path, tmp_path: Path) -> None:
    teacher = run(replace(small(text, tmp_path / "teacher"), steps=60, eval_every=60, save_every=0))
    settings = replace(small(text, tmp_path / "draft"), num_layers=1, teacher=str(tmp_path / "teacher"), steps=40)
    draft = run(replace(settings, tokenizer=str(tmp_path / "teacher" / "tokenizer.json"), eval_every=40))
    idx = torch.tensor([teacher.tokenizer.encode(SENTENCES[2])[:32]])
    with torch.no_grad():
        agree = (draft.model.prefill(idx)[0].argmax(-1) == teacher.model.prefill(idx)[0].argmax(-1)).float().mean()
    assert agree > 0.4
    with pytest.raises(ConfigError, match="teacher"):
        run(replace(settings, tokenizer="bpe", vocab_size=300, force=True))


def test_time_limit_ends_the_run_with_an_export(text: Path, tmp_path: Path) -> None:
    result = run(replace(small(text, tmp_path), steps=100_000, max_minutes=0.005))
    assert result.finished
    assert 0 < result.steps_done < 100_000
    assert result.history.held_out[-1][0] == result.steps_done  # the end is always evaluated
    assert (tmp_path / "config.json").is_file()


def test_batches_that_cannot_be_cut_are_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA"):
        run(replace(small(text, tmp_path), device="cuda"))


def test_command_line_makes_the_settings() -> None:
    settings = parse(["a.txt", "--steps", "7", "--keep-best", "--no-bf16", "--learning-rate=0.5", "b.txt", "--gguf",
                      "q8_0", "--data", "c.txt"])  # fmt: skip
    assert settings.data == ("a.txt", "b.txt", "c.txt")
    assert (settings.steps, settings.keep_best, settings.bf16, settings.learning_rate) == (7, True, False, 0.5)
    assert settings.gguf == "q8_0"
    for bad, words in [(["--stepz", "3"], "no option --stepz: did you mean 'steps'"), (["--steps"], "needs a value"),
                       (["--steps", "x"], "type int"), (["--no-steps"], "no option"),
                       (["--resume=maybe"], "true or false")]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            parse(bad)
    assert "--learning-rate" in describe()


def test_progress_shows_loss_speed_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (PlainProgress(0.0), LiveProgress()):
        progress.message("held-out loss [bold] 1.5")
        progress.step(1, 2, 2.5, 1e-3, 1234.0)
        progress.step(2, 2, 2.25, 1e-3, 1234.0)
        progress.close()
        shown = capsys.readouterr().out
        assert "held-out loss [bold] 1.5" in shown
        assert "2.25" in shown
        assert "1,234 tokens/s" in shown
        assert "left" in shown


@pytest.mark.parametrize(
    ("steps", "chosen", "interval"), [(2000, None, 200), (10_000, None, 250), (7, None, 1), (2000, 400, 400)]
)
def test_a_run_has_ten_evaluations_unless_an_interval_is_chosen(steps: int, chosen: int | None, interval: int) -> None:
    settings = TrainSettings(steps=steps, eval_every=chosen)
    assert settings.steps_between_evaluations == interval
    assert chosen or steps // interval >= min(steps, 10)
