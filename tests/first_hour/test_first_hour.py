"""The first hour of a new user in a terminal: story, pull, chat, pipes, structured output, Python.

Every step runs the program as a user does, in a home of its own; models come from a mirror of the hub on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import local_hub
from vllm_programs import PROGRAMS, ported

from bifolio import LLM, SamplingParams, __version__
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from helpers import tiny_folder
from pty_session import PtySession

pytestmark = pytest.mark.full
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"enum": [3, 4, 5]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SNIPPET = """
from bifolio import LLM, BeamSearchParams, SamplingParams

with LLM() as llm:
    for output in llm.generate(["Once upon a time", "The dog"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.prompt + output.outputs[0].text)
    best = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=2, max_tokens=4))[0]
    print(best.sequences[0].text)
    print("".join(result.text for result in llm.stream("The little boat", SamplingParams(temperature=0, max_tokens=8))))
"""


class Home:
    """A user's home: a program on the path, a cache, a history, and a mirror of the hub."""

    def __init__(self, folder: Path, mirror: str) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        (programs / "bifolio").write_text(f'#!/bin/sh\nexec {sys.executable} -m bifolio "$@"\n')
        (programs / "bifolio").chmod(0o755)
        self.environment = {
            "HOME": str(folder),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HF_ENDPOINT": mirror,
            "BIFOLIO_CONFIG": "/dev/null",
            "XDG_CACHE_HOME": str(folder / ".cache"),
            "XDG_STATE_HOME": str(folder / ".local" / "state"),
        }

    def bash(self, command: str, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=self.folder, env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def terminal(self, *arguments: str, **size: int) -> PtySession:
        return PtySession.bifolio(*arguments, environment=self.environment, **size)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("home")
    model = folder / "chatty.gguf"
    write_gguf(model, load_model(tiny_folder(tokenizer=True, chat_template=CHAT)), QuantFormat.Q8_0)
    with local_hub() as hub:
        data = model.read_bytes()
        hub.repositories["org/Chatty-GGUF"] = {"chatty-Q8_0.gguf": data, "chatty-F16.gguf": data + b"0"}
        yield Home(folder, hub.address)


def test_the_program_is_there_and_explains_itself(home: Home) -> None:
    assert home.bash("bifolio --version") == f"bifolio {__version__}\n"
    everything = home.bash("bifolio --help")
    for verb in ("generate", "chat", "run", "pull", "models", "rm", "doctor", "completion"):
        assert f"  {verb} " in everything
    assert "Examples:" in home.bash("bifolio generate --help")
    assert "did you mean 'generate'?" in home.bash("bifolio generat", code=2)
    report = json.loads(home.bash("bifolio doctor --json || true"))
    assert report["version"] == __version__


def test_a_story_without_a_download(home: Home) -> None:
    with home.terminal("generate", "One day, a little dog", "--seed", "8", "-n", "40") as terminal:
        assert terminal.wait(120) == 0
    llm = LLM()
    params = llm.default_params(seed=8, max_tokens=40)
    text = "One day, a little dog" + llm.generate("One day, a little dog", params)[0].outputs[0].text
    shown = " ".join(terminal.text.split())
    assert shown.endswith(" ".join(text.split()))  # on a busy machine a bar may stand before it
    assert shown.count("One day, a little dog") == 1
    with home.terminal("generate", "One day, a little dog", "--seed", "8", "-n", "8", "--no-echo") as terminal:
        assert terminal.wait(120) == 0
    assert "One day, a little dog" not in terminal.text
    assert terminal.text.split()


def test_pull_from_a_mirror_then_chat_ten_turns_beyond_the_context(home: Home) -> None:
    with home.terminal("pull", "hf.co/org/Chatty-GGUF:Q8_0", "--name", "chatty") as terminal:
        terminal.expect("try: bifolio chat --model chatty")
        assert terminal.wait() == 0
    assert "chatty" in home.bash("bifolio list")
    options = ("-t", "0", "-n", "6", "--max-model-len", "96", "--system", "Be kind.")
    with home.terminal("chat", "--model", "chatty", *options, width=100) as terminal:
        terminal.expect("/help lists the commands")
        for number in range(10):
            terminal.expect("> ")
            terminal.line(f"The fox went to the sea, {number}")
            terminal.expect(" tokens, ")  # the summary of the turn
        terminal.expect("> ")
        terminal.line("/save talk.json")
        terminal.expect("21 messages written")
        terminal.line("/bye")
        assert terminal.wait() == 0
        assert "oldest messages left the context (--context-policy)" in " ".join(terminal.text.split())
        assert "shorten it" not in terminal.text
    Path("talk.json").unlink(missing_ok=True)


def test_pipes(home: Home) -> None:
    text = home.bash("echo 'Once upon a time' | bifolio generate -n 8 -t 0 | cat")
    expected = LLM().generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    assert text == expected + "\n"
    (home.folder / "in.jsonl").write_text('{"prompt": "Once upon a time", "id": 7}\n')
    record = json.loads(home.bash("bifolio generate -i in.jsonl -n 8 -t 0"))
    assert (record["id"], record["outputs"][0]["text"]) == (7, expected)
    assert "hierror" not in home.bash("bifolio generate -t -1 hi", code=2)


def test_a_schema_to_jq(home: Home) -> None:
    pytest.importorskip("llguidance")
    read = (
        "jq -r .name"
        if shutil.which("jq")
        else f"{sys.executable} -c 'import json; print(json.load(open(0))[\"name\"])'"
    )
    schema = json.dumps(SCHEMA)
    command = f"bifolio generate 'A child:' -n 64 --seed 1 --json-schema '{schema}' | {read}"
    assert home.bash(command).strip() in ("Lily", "Tom")


def test_python_and_a_program_of_vllm(home: Home) -> None:
    (home.folder / "snippet.py").write_text(SNIPPET)
    lines = home.bash(f"{sys.executable} snippet.py").splitlines()
    assert lines[0].startswith("Once upon a time")
    assert any(line.startswith("The dog") for line in lines)
    (home.folder / "ported.py").write_text(ported(PROGRAMS["offline_batch"], "stories"))
    printed = home.bash(f"{sys.executable} ported.py")
    assert printed.count("Generated text:") == 3


def test_run_by_name_and_remove(home: Home) -> None:
    fetched = home.bash("bifolio run org/Chatty-GGUF:F16 'Hello' -t 0 -n 4")
    assert fetched.strip()
    assert home.bash("bifolio run org/Chatty-GGUF:F16 'Hello' -t 0 -n 4") == fetched
    home.bash("bifolio rm Chatty-GGUF-F16")
    assert "Chatty-GGUF-F16" not in home.bash("bifolio list")
    assert "no model 'Chatty-GGUF-F16' was pulled" in home.bash("bifolio rm Chatty-GGUF-F16", code=2)


def test_server_and_page(home: Home) -> None:
    from page_driver import CHROMIUM, answers, chromium, open_page, send, set_options

    if CHROMIUM is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with home.terminal(
        "serve", "--model", str(home.folder / "chatty.gguf"), "--port", str(port), width=200
    ) as terminal:
        terminal.expect(" serving")
        url = f"http://127.0.0.1:{port}"
        assert url in " ".join(terminal.text.split())
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12})
        reply = json.loads(
            home.bash(f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
        )
        expected = reply["choices"][0]["message"]["content"]
        with chromium() as browser, open_page(browser, SimpleNamespace(url=url)) as page:
            set_options(page, temperature=0, max_tokens=12)
            send(page, "Hello")
            assert answers(page) == [expected.strip()]
            page.click("#tab-live")
            page.wait_for_selector("#blocks[data-held='0']")
        terminal.expect("/v1/chat/completions")  # a line for every request
        terminal.interrupt()
        assert terminal.wait() == 0


@pytest.mark.slow
def test_ten_simple_questions(models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simple_questions import QUESTIONS, ask

    from bifolio.model.pull import PACKAGED, write_source
    from bifolio.model.registry import pulled_dir

    file = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path))
    pulled_dir().mkdir(parents=True)
    (pulled_dir() / "smollm2.gguf").symlink_to(file)  # as `bifolio pull smollm2` leaves it
    known = PACKAGED["smollm2"]
    write_source("smollm2", known.requirement, known.sha256, known.generation_config)
    llm = LLM("smollm2", max_num_seqs=len(QUESTIONS))
    rounds = [ask(llm, seed) for seed in range(3)]
    assert all(sum(answer.is_right for answer in answers) >= 7 for answers in rounds)
    assert sum(not answer.ended for answers in rounds for answer in answers) <= 1  # one of 30, docs/models/smollm2.md
