"""`device="cuda"` where there is no GPU: one sentence, from every command, before anything else happens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import ConfigError
from bifolio.kernels import select
from bifolio.kernels.select import require_gpu, select_kernels
from cli_runner import CliRunner
from helpers import tiny_folder

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"device 'cuda:1' needs a CUDA GPU, and torch .* finds none: use 'cpu'"):
        select_kernels("cuda:1")


def test_a_device_of_which_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:0", "cuda:1"):
        require_gpu(device)
    for device in ("cuda:2", "cuda:x"):
        with pytest.raises(ConfigError, match=f"no device '{device}' here: use one of 'cuda:0', 'cuda:1'"):
            require_gpu(device)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_module_refusals", lambda *modules: [f"{modules[0]} is not installed"])
    with pytest.raises(ConfigError, match=r"needs torch: pip install 'bifolio\[gpu\]'"):
        require_gpu("cuda")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Once"],
        ["chat"],
        ["eval", "text.txt"],
        ["profile", "--shape", "tiny"],
        ["bench", "throughput", "--shape", "tiny"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_end_with_one_sentence(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tokenizer=True)
    (folder / "text.txt").write_text("Once upon a time. " * 20)
    monkeypatch.chdir(folder)
    model = [] if "--shape" in arguments else ["-m", "."]
    run = CliRunner().invoke(build_app(), [*arguments, *model, "--device", "cuda"])
    assert run.exit_code != 0
    said = str(run.exception) if run.exception else run.stderr
    assert isinstance(run.exception, ConfigError | None)
    assert said.strip().count("\n") == 0
    assert "needs a CUDA GPU" in said


def test_kernels_of_the_cpu_by_name_run_there_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device; those that a GPU has too are its own."""
    monkeypatch.setattr(select, "resolve_device", lambda device: "cuda" if device == "auto" else device)
    assert select_kernels(name="reference").name == "reference"
    with pytest.raises(ConfigError, match="device 'cuda' needs a CUDA GPU"):
        select_kernels(name="torch")
    with pytest.raises(ConfigError, match="device 'cuda' needs a CUDA GPU"):
        select_kernels("cuda", name="reference")
