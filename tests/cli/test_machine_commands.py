"""`run`, `list`, `doctor` and `completion`; `--json` on every verb; the warning about threads."""

from __future__ import annotations

import inspect
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import local_hub

from bifolio import LLM, SamplingParams
from bifolio.cli import commands
from bifolio.cli.main import VERBS, build_app
from bifolio.engine import memory
from bifolio.model.registry import embedded_dir
from cli_runner import CliRunner, Result
from helpers import tiny_folder

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NO_JSON = {
    "serve",
    "engine",
    "cluster deploy",
    "cluster delete",
    "completion",
    "embed",
    "run",
    "soak",
}  # a server logs JSON; a script and a conversation are no data; soak prints JSON


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))


def bifolio(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(build_app(), list(arguments), input=input, catch_exceptions=False)


def test_run_answers_a_question_with_the_chat_template() -> None:
    folder = tiny_folder(tokenizer=True, chat_template=CHAT)
    options = ("-t", "0", "-n", "6")
    llm = LLM(folder, max_num_seqs=1)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6))
    for arguments, text in ((["Hello"], None), ([], "Hello\n")):
        printed = bifolio("run", str(folder), *arguments, *options, "--system", "Be kind.", input=text).stdout
        assert printed == output.outputs[0].text + "\n"


def test_run_continues_text_without_a_template() -> None:
    printed = bifolio("run", "stories", "Once upon a", "-n", "4", "-t", "0").stdout
    assert printed.startswith(" time")


@pytest.mark.full
def test_run_fetches_a_model_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        hub.repositories["org/small"] = {"m.gguf": (embedded_dir() / "stories-draft.gguf").read_bytes()}
        first = bifolio("run", "org/small", "Once", "-n", "2", "-t", "0")
        assert "fetching org/small" in first.stderr
    second = bifolio("run", "org/small", "Once", "-n", "2", "-t", "0")  # the hub is gone
    assert second.stdout == first.stdout
    assert "small" in bifolio("list").stdout
    assert bifolio("list", "--json").stdout == bifolio("models", "--json").stdout


def test_doctor_names_the_machine_and_its_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(bifolio("doctor", "--json").stdout)
    assert {"version", "cpu", "kernels", "gpu", "memory", "packages", "problems", "models"} <= set(report)
    assert report["packages"]["numpy"]
    assert report["memory"]["free_bytes"] > 0
    assert "stories" in report["models"]
    monkeypatch.setenv("BIFOLIO_KERNELS", "reference")
    slow = bifolio("doctor")
    assert slow.exit_code == 1
    assert "BIFOLIO_KERNELS=reference replaces the choice of kernels: unset it" in slow.stdout
    for word in ("CPU", "kernels", "GPU", "memory", "packages", "cache"):
        assert word in slow.stdout


def test_doctor_says_why_the_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.errors import MissingDependencyError
    from bifolio.kernels import cpu

    def missing() -> str:
        raise MissingDependencyError("the native CPU kernels were not built: install a C++20 compiler")

    monkeypatch.setattr(cpu, "isa", missing)
    result = bifolio("doctor")
    assert result.exit_code == 1
    assert "slow kernels: the native CPU kernels were not built" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_have_every_verb_and_option(shell: str) -> None:
    script = bifolio("completion", shell).stdout
    for verb in VERBS:
        assert verb in script
    for option in ("max-tokens", "kv-dtype", "context-policy", "no-markdown", "repetitions"):
        assert option in script
    if shell == "bash":
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_bash_completes_verbs_and_options() -> None:
    script = bifolio("completion", "bash").stdout
    for words, expected in (
        (["bifolio", "gen"], "generate"),
        (["bifolio", "chat", "--context"], "--context-policy"),
        (["bifolio", "bench", "thr"], "throughput"),
        (["bifolio", "bench", "latency", "--bat"], "--batch"),
        (["bifolio", "gguf", "sp"], "split"),
        (["bifolio", "gguf", "edit", "--in"], "--in-place"),
        (["bifolio", "cluster", "dep"], "deploy"),
    ):
        quoted = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _bifolio; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], text=True, capture_output=True, check=True)
        assert done.stdout.split() == [expected]
    assert "stories" in bifolio("completion", "names").stdout.split()
    assert bifolio("completion", "csh").exit_code == 2


def every_command(app: commands.App, prefix: str = "") -> dict[str, commands.Command]:
    found: dict[str, commands.Command] = {}
    for name, entry in app.verbs.items():
        if isinstance(entry, commands.App):
            found |= every_command(entry, f"{prefix}{name} ")
        else:
            found[prefix + name] = entry
    return found


def test_every_verb_that_prints_results_has_json() -> None:
    for name, command in every_command(build_app()).items():
        if name not in NO_JSON:
            assert "as_json" in inspect.signature(command.function).parameters, f"{name} has no --json"


def test_more_threads_than_cores_are_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    memory._warn_threads.cache_clear()
    folder = tiny_folder(tokenizer=True)
    cores = memory.default_threads()
    for _ in range(2):
        LLM(folder, kernels="reference", max_model_len=32, threads=cores + 1)
    printed = capsys.readouterr().err
    assert printed.count(f"{cores + 1} threads on {cores} cores are slower than {cores}") == 1
    LLM(folder, kernels="reference", max_model_len=32, threads=cores)
    assert capsys.readouterr().err == ""


def test_loading_reports_its_progress() -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(tiny_folder(tokenizer=True), max_model_len=32, on_load=lambda done, total: seen.append((done, total)))
    layers = llm.model.config.num_layers
    assert seen == [(number, layers) for number in range(layers + 1)]


@pytest.mark.full
def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; sys.argv = ['bifolio', '--help']\nfrom bifolio.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([n for n in ('numpy', 'rich', 'tokenizers', 'jinja2', 'urllib.request', 'difflib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_bar_appears_late_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.cli import progress

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    moments = iter([1.0, 1.0, 1.5, 2.5, 3.0])
    screen = Screen()
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(sys, "stderr", screen)
    with progress.bytes_bar("fetching") as report:
        report(1, 10_000_000)
        report(2, 10_000_000)
        assert screen.getvalue() == ""  # work of half a second shows nothing
        monkeypatch.undo()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        report(3, 10_000_000)
    assert "fetching" in screen.getvalue()
    assert "left" in screen.getvalue()


class Bar:
    """A bar that keeps its reports."""

    seen: dict[str, list[tuple[int, int]]] = {}  # noqa: RUF012  # by title

    def __init__(self, title: str, in_bytes: bool) -> None:
        self._reports = self.seen.setdefault(title, [])

    def __call__(self, done: int, total: int) -> None:
        self._reports.append((done, total))

    def close(self) -> None:
        pass


@pytest.mark.full
def test_load_quantize_eval_and_pull_show_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bifolio.cli import progress

    monkeypatch.setattr(progress, "LateBar", Bar)
    monkeypatch.setattr(Bar, "seen", {})
    folder, text, target = str(tiny_folder(tokenizer=True)), tmp_path / "text.txt", tmp_path / "tiny.gguf"
    text.write_text("Once upon a time there was a little fox. " * 30)
    bifolio("generate", "-m", folder, "Once", "-n", "1")
    bifolio("quantize", folder, str(target), "--format", "q8_0", "--eval", str(text), "--eval-tokens", "64")
    bifolio("imatrix", folder, str(text), str(tmp_path / "i.gguf"), "--window", "64")
    with local_hub() as hub:
        hub.repositories["org/Tiny-GGUF"] = {"tiny-Q8_0.gguf": target.read_bytes()}
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        bifolio("pull", "org/Tiny-GGUF:Q8_0")
    assert set(Bar.seen) == {"loading", "converting", "scoring", "measuring", "fetching"}
    for title in ("loading", "converting", "fetching"):
        done, total = Bar.seen[title][-1]
        assert 0 < done == total, title
    Bar.seen.clear()
    bifolio("eval", str(text), "-m", folder, "--window", "32")
    numbers = [done for done, _ in Bar.seen["scoring"]]
    assert numbers == sorted(numbers)
    assert len(numbers) > 1
