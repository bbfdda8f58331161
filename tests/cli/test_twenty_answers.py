"""Twenty simple questions at temperature 0: chat, server and `LLM` agree; exact activations answer no better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_numeric_defaults import served

from bifolio import LLM
from bifolio.cli.main import build_app
from cli_runner import CliRunner

QUESTIONS: dict[str, list[str]] = json.loads(
    (Path(__file__).parent.parent / "first_hour" / "twenty_questions.json").read_text(encoding="utf-8")
)
SOON = 50  # words in which a right answer names the expected one
LONGEST = 64  # tokens
MODELS = ("SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2.5-coder-1.5b.Q4_K_M.gguf")


def ask(llm: LLM) -> list[str]:
    """The answer to every question, each a conversation of its own."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = llm.default_params(temperature=0, max_tokens=LONGEST)
    return [output.outputs[0].text for output in llm.chat(conversations, params, use_tqdm=False)]


def right(answers: list[str]) -> list[bool]:
    beginnings = [" ".join(answer.lower().split()[:SOON]) for answer in answers]
    return [any(word in text for word in words) for text, words in zip(beginnings, QUESTIONS.values(), strict=True)]


@pytest.fixture(scope="module", params=MODELS)
def file(request: pytest.FixtureRequest, models_dir: Path) -> Path:
    path = models_dir / str(request.param)
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


@pytest.fixture(scope="module")
def answers(file: Path) -> list[str]:
    """Those of `LLM` with no options but the model."""
    with LLM(file) as llm:
        return ask(llm)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_right_answers_of_exact_activations_are_kept(file: Path, answers: list[str]) -> None:
    """Activations of 16 bits stand for exact ones, whose texts they reproduce (`test_gguf_real`)."""
    with LLM(file, activations="int16") as llm:
        exact = right(ask(llm))
    assert sum(exact) >= 13
    assert sum(a and b for a, b in zip(exact, right(answers), strict=True)) >= 0.95 * sum(exact)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_chat_server_and_llm_agree(file: Path, answers: list[str], tmp_path: Path) -> None:
    options = ["chat", "-m", str(file), "-t", "0", "-n", str(LONGEST), "--json"]
    lines = "".join(f"{question}\n/reset\n" for question in QUESTIONS)
    run = CliRunner().invoke(build_app(), options, input=lines, catch_exceptions=False)
    assert [json.loads(line)["content"] for line in run.stdout.splitlines()] == answers
    with served(file, tmp_path / "log") as http:
        bodies = [
            {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": LONGEST}
            for question in QUESTIONS
        ]
        replies = [http.post("/v1/chat/completions", json=body).json() for body in bodies]
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == answers
