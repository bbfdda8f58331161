"""`bifolio train` from the outside: a text becomes a model that the other commands use; Ctrl-C loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import BifolioError, MissingDependencyError
from bifolio.model.loader import load_model
from cli_runner import CliRunner

SHAPE = ["--preset", "char", "--tokenizer", "char", "--hidden-size", "32", "--num-layers", "1", "--num-heads", "2",
         "--intermediate-size", "32", "--context", "16", "--batch-size", "4", "--warmup", "2", "--device", "cpu",
         "--eval-every", "1000", "--eval-sequences", "2", "--sample-tokens", "8"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads, and much slower on a busy machine."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 200)
    return path


def bifolio(*arguments: str | Path) -> str:
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    if isinstance(result.exception, BifolioError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.full
def test_json_has_at_least_ten_evaluations(text: Path, tmp_path: Path) -> None:
    at = SHAPE.index("--eval-every")
    shape = SHAPE[:at] + SHAPE[at + 2 :]
    record = json.loads(bifolio("train", text, "--output", tmp_path / "cat", "--steps", "20", *shape, "--json"))
    assert (record["steps"], record["finished"], record["folder"]) == (20, True, str(tmp_path / "cat"))
    assert [step for step, _ in record["evaluations"]] == list(range(2, 21, 2))


@pytest.mark.full
def test_a_text_becomes_a_model(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cat"
    shown = bifolio(
        "train", text, "--output", folder, "--steps", "60", "--learning-rate", "0.02", "--gguf", "q8_0", *SHAPE
    )
    assert f"wrote the model to {folder}" in shown
    assert "step 60: held-out loss" in shown
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "training.json").read_text())["final_held_out_loss"] < 2.0
    gguf = folder / "cat.q8_0.gguf"
    written = [bifolio("generate", "-m", source, "the ca", "-n", "6", "-t", "0") for source in (folder, gguf)]
    assert written[0] == written[1]
    assert written[0].startswith("t ")
    loss = json.loads(bifolio("eval", text, "-m", gguf, "--window", "16", "-n", "160", "--json"))["loss"]
    assert loss < 2.0


@pytest.mark.full
def test_ctrl_c_saves_and_resume_goes_on(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "bifolio.cli.main", "train", str(text), "--output", str(folder), *SHAPE]
    command += ["--steps", "1000000", "--sample-every", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if "sample" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=240)[0]
    assert "--resume" in rest, rest
    assert list((folder / "checkpoint").glob("step-*/model.safetensors"))
    state = json.loads(next((folder / "checkpoint").glob("step-*/state.json")).read_text())
    assert state["step"] >= 20
    with pytest.raises(BifolioError, match=r"--steps is 10, and the run in .* has done"):
        bifolio("train", text, "--output", folder, "--resume", *SHAPE, "--steps", "10")
    bifolio("train", text, "--output", folder, "--resume", *SHAPE, "--steps", "1000000", "--max-minutes", "0.001")
    history = json.loads((folder / "training.json").read_text())["history"]
    assert [step for step, _ in history["train"]][:2] == [10, 20]  # what was measured before the interruption
    assert history["held_out"][-1][0] > state["step"]
    assert load_model(folder).config.hidden_size == 32


def test_mistakes_are_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(BifolioError, match="does not exist"):
        bifolio("train", tmp_path / "none.txt", "--output", tmp_path / "m")
    with pytest.raises(BifolioError, match="preset"):
        bifolio("train", text, "--preset", "huge")
    assert CliRunner().invoke(build_app(), ["train"]).exit_code == 2


def test_without_torch_the_extra_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"bifolio\[train\]"):
        bifolio("train", text)


@pytest.mark.parametrize("name", ["config.json", "checkpoint", "tokenizer.json"])
def test_a_folder_with_a_model_is_refused_and_left_alone(text: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_text("precious")
    with pytest.raises(BifolioError, match=r"holds a model already.*--resume.*--force"):
        bifolio("train", text, "--output", folder, *SHAPE, "--steps", "1")
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(name, "precious")]


@pytest.mark.full
def test_force_replaces_a_model(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    bifolio("train", text, "--output", folder, *SHAPE, "--steps", "1")
    before = (folder / "model.safetensors").read_bytes()
    bifolio("train", text, "--output", folder, *SHAPE, "--steps", "2", "--force")
    assert (folder / "model.safetensors").read_bytes() != before
