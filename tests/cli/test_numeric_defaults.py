"""One set of numerical defaults: a greedy request has one answer, whichever command or class runs it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bifolio import LLM, AsyncLLM, SamplingParams
from bifolio.cli import commands, options
from bifolio.cli.main import build_app
from bifolio.config import NUMERICS
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from cli_runner import CliRunner
from helpers import cpu_kernel_names, tiny_folder

NUMERIC_OPTIONS = ("kv_dtype", "activations", "threads")  # on every command that runs a model
DEVICE_OPTIONS = ("device", "deterministic")
OWN_SETTINGS = {
    "imatrix": {"kv_dtype", "activations", *DEVICE_OPTIONS},  # watches the CPU's operations one by one
    "quantize": {"kv_dtype", *DEVICE_OPTIONS},  # converts; scores a text on the CPU on request
}
NO_MODEL_RUNS = {"train", "inspect", "models", "pull", "rm", "merge", "ps", "doctor", "completion", "bench serve",
                 "cluster status", "cluster delete", "gguf split", "gguf merge", "gguf edit"}  # fmt: skip
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QUESTION = "Once upon a time a little fox"


def all_commands(app: commands.App, prefix: str = "") -> dict[str, commands.Command]:
    found: dict[str, commands.Command] = {}
    for name, entry in app.verbs.items():
        if isinstance(entry, commands.App):
            found |= all_commands(entry, f"{prefix}{name} ")
        else:
            found[prefix + name] = entry
    return found


RUNNING = sorted(set(all_commands(build_app())) - NO_MODEL_RUNS)


@pytest.mark.parametrize("name", RUNNING)
def test_every_command_that_runs_a_model_has_the_options_and_the_defaults(name: str) -> None:
    written = commands.parameters_of(all_commands(build_app())[name].function)
    parameters = {parameter.name: parameter for parameter, _ in written}
    kinds = {
        "kv_dtype": options.KvDtype,
        "activations": options.Activations,
        "threads": options.Threads,
        "device": options.Device,
        "deterministic": options.Deterministic,
    }
    for option in (*NUMERIC_OPTIONS, *DEVICE_OPTIONS):
        if option in OWN_SETTINGS.get(name, ()):
            continue
        assert parameters[option].default == getattr(NUMERICS, option), option
        assert parameters[option].annotation == kinds[option], f"--{option} has another name or help here"


def test_the_classes_have_the_same_defaults() -> None:
    parameters = inspect.signature(LLM.__init__).parameters
    found = {name: parameters["kv_cache_dtype" if name == "kv_dtype" else name].default for name in NUMERIC_OPTIONS}
    assert found == {name: getattr(NUMERICS, name) for name in NUMERIC_OPTIONS}
    assert parameters["device"].default == NUMERICS.device
    assert bool(parameters["deterministic"].default) == NUMERICS.deterministic


class Built(Exception):  # noqa: N818
    """Raised instead of building an engine; holds the settings it would have had."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        bound = inspect.signature(ORIGINAL).bind(None, *arguments, **options)
        bound.apply_defaults()
        names = ("kv_cache_dtype", "activations", "threads", "device", "kernels")
        self.settings = {name: bound.arguments[name] for name in names}
        self.settings["deterministic"] = bool(bound.arguments["deterministic"])


ORIGINAL = LLM.__init__


def settings_of(call: Any) -> dict[str, Any]:
    """What the entry point passes to `LLM`, with the defaults that fill it up."""

    def refuse(self: LLM, *arguments: Any, **options: Any) -> None:
        raise Built(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", refuse)
        with pytest.raises(Built) as caught:
            call()
    return caught.value.settings


def settings_of_serve(folder: Path) -> dict[str, Any]:
    """Those of the engine process that `bifolio serve` starts."""
    server = pytest.importorskip("bifolio.serve.http.server")
    passed: dict[str, Any] = {}

    async def run(settings: Any, engine_options: dict[str, Any], worker: Any = None) -> None:
        passed.update(engine_options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "serve", run)
        patch.setenv("BIFOLIO_LOG_LEVEL", "info")
        build_app()(["serve", "-m", str(folder)])
    return settings_of(lambda: LLM(**passed))


def test_every_entry_point_resolves_to_the_same_settings(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True, chat_template=CHAT)
    (tmp_path / "text.txt").write_text("Once upon a time. " * 20)
    app = build_app()
    runs = {
        "LLM": lambda: LLM(folder),
        "AsyncLLM": lambda: AsyncLLM(folder),
        "generate": lambda: app(["generate", "-m", str(folder), "Once"]),
        "chat": lambda: app(["chat", "-m", str(folder)]),
        "eval": lambda: app(["eval", str(tmp_path / "text.txt"), "-m", str(folder)]),
        "bench throughput": lambda: app(["bench", "throughput", "-m", str(folder), "-p", "8", "-n", "0"]),
    }
    found = {name: settings_of(call) for name, call in runs.items()} | {"serve": settings_of_serve(folder)}
    expected = {
        "kv_cache_dtype": NUMERICS.kv_dtype,
        "activations": NUMERICS.activations,
        "threads": NUMERICS.threads,
        "device": NUMERICS.device,
        "deterministic": NUMERICS.deterministic,
        "kernels": None,
    }
    assert found == dict.fromkeys(found, expected)


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def greedy(model: Path, **options: Any) -> tuple[list[int], list[int], str]:
    """(prompt, output, text) of the question through the offline API."""
    llm = LLM(model, **options)
    prompt = llm.chat_tokens([{"role": "user", "content": QUESTION}])
    (output,) = llm.generate([prompt], GREEDY)
    return prompt, list(output.outputs[0].token_ids), output.outputs[0].text


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy text depends on how activations are rounded, where the kernels round them."""
    for seed in range(20):
        folder = tiny_folder(tokenizer=True, chat_template=CHAT, seed=seed, num_hidden_layers=6, hidden_size=64)
        path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
        write_gguf(path, load_model(folder), QuantFormat.Q8_0)
        rounded = (greedy(path, activations=name)[1] for name in ("int8", "int16"))
        if "native" not in cpu_kernel_names() or next(rounded) != next(rounded):
            return path
    pytest.fail("no model tells int8 from int16")


@contextlib.contextmanager
def served(model: Path, log: Path) -> Iterator[Any]:
    """A client of `bifolio serve` with no options but the model and a port."""
    httpx = pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bifolio", "serve", "-m", str(model), "--port", str(port)]
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                for _ in range(600):
                    with contextlib.suppress(httpx.TransportError):
                        if http.get("/ready").status_code == 200:
                            break
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                yield http
        finally:
            process.terminate()


@pytest.mark.full
def test_one_greedy_answer_from_every_entry_point(quantised: Path, tmp_path: Path) -> None:
    prompt, expected, text = greedy(quantised)

    async def asynchronous() -> list[int]:
        async with AsyncLLM(quantised) as async_llm:
            return list((await async_llm.generate([prompt], GREEDY))[0].outputs[0].token_ids)

    assert asyncio.run(asynchronous()) == expected

    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    source.write_text(json.dumps({"prompt_token_ids": prompt, "ignore_eos": True}) + "\n")
    run = CliRunner().invoke(
        build_app(), ["generate", "-m", str(quantised), "-i", str(source), "-o", str(target), "-t", "0", "-n", "40"]
    )
    assert run.exit_code == 0, run.output
    assert json.loads(target.read_text())["outputs"][0]["token_ids"] == expected

    run = CliRunner().invoke(build_app(), ["chat", "-m", str(quantised), "-t", "0", "-n", "40"], input=QUESTION + "\n")
    assert run.exit_code == 0, run.output
    assert text.startswith(run.stdout.rstrip("\n"))  # an end-of-text token ends a chat
    assert len(run.stdout) > 20

    with served(quantised, tmp_path / "log") as http:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == expected
