"""`bifolio chat` with piped turns: answers, commands, the cache, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bifolio import LLM, SamplingParams
from bifolio.cli.chat import answer
from bifolio.cli.chat_commands import set_option
from bifolio.cli.conversation import ANSWER_TOKENS, SUMMARY_TITLE, Conversation
from bifolio.cli.main import build_app
from bifolio.cli.terminal import Terminal
from bifolio.errors import ChatTemplateError, ConfigError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.text.loops import LEAST_TOKENS
from cli_runner import CliRunner
from helpers import tiny_folder

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
OPTIONS = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True, chat_template=CHAT)


def chat(folder: Path, lines: str, *options: str) -> tuple[str, str]:
    result = CliRunner().invoke(
        build_app(), ["chat", "-m", str(folder), *OPTIONS, *options], input=lines, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def expected(folder: Path, turns: list[str], system: str | None = None) -> list[str]:
    """The same conversation through the offline API."""
    llm = LLM(folder, max_num_seqs=1)
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(llm.chat(messages, GREEDY)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_every_line_is_a_turn_of_one_conversation(folder: Path) -> None:
    printed, notes = chat(folder, "Once upon a time\n\nand then?\n")
    assert printed == "".join(text + "\n" for text in expected(folder, ["Once upon a time", "and then?"]))
    assert notes.count("tok/s") == 2


def test_reset_forgets_and_system_stays(folder: Path) -> None:
    printed, _ = chat(folder, "Hello\n/reset\nHello\n/quit\nnever said\n", "--system", "Be kind.")
    (text,) = expected(folder, ["Hello"], "Be kind.")
    assert printed == 2 * (text + "\n")


def test_system_starts_over_with_another_prompt(folder: Path) -> None:
    printed, notes = chat(folder, "Hello\n/system Be brief.\nHello\n/system\n")
    assert printed.splitlines() == [*expected(folder, ["Hello"]), *expected(folder, ["Hello"], "Be brief.")]
    assert notes.splitlines()[-1] == "Be brief."


def test_save_writes_the_conversation(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "conversation.json"
    chat(folder, f"Hello\n/save {target}\n")
    (text,) = expected(folder, ["Hello"])
    assert json.loads(target.read_text())["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": text},
    ]


def test_bad_commands_say_what_to_do(folder: Path, tmp_path: Path) -> None:
    _, notes = chat(folder, f"/save\n/save {tmp_path}/absent/file\n/dance\n/help\n")
    assert "say where" in notes
    assert "could not write" in notes
    assert "unknown command /dance" in notes
    assert notes.count("/reset") == 2


def test_later_turns_come_from_the_cache(folder: Path) -> None:
    llm = LLM(folder, kernels=ReferenceKernels(), block_size=4, max_num_seqs=1, max_model_len=128)
    conversation = Conversation(llm, GREEDY)
    conversation.turn("The fox liked to read books about the sea.", lambda text: None)
    first = len(conversation.llm.chat_tokens(conversation.messages[:1]))
    request = conversation.turn("And?", lambda text: None)
    assert request.metrics.num_cached_tokens >= first // 4 * 4


def long_conversation(folder: Path, policy: str, turns: int = 10) -> Conversation:
    llm = LLM(folder, max_model_len=128, max_num_seqs=1)
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), "Be kind.", policy)
    terminal = Terminal(interactive=False)
    for number in range(turns):
        answer(f"The fox went to the sea, {number}", conversation, terminal)
    return conversation


@pytest.mark.full
def test_ten_turns_beyond_the_context_drop_the_oldest_and_say_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = long_conversation(folder, "drop")
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 10]
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) >= 10
    assert "oldest messages left the context (--context-policy)" in printed.err
    context = conversation.fitted([*conversation.messages, {"role": "user", "content": "And?"}]).messages
    assert context[0] == {"role": "system", "content": "Be kind."}
    assert context[1]["role"] == "user"  # whole turns are dropped
    assert context[-1]["content"] == "And?"
    assert 3 <= len(context) < 21
    assert len(conversation.llm.chat_tokens(context)) < 128


@pytest.mark.full
def test_a_full_context_can_be_summarised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = long_conversation(folder, "summarise")
    assert len(conversation.messages) == 21
    assert "oldest messages were summarised" in capsys.readouterr().err
    context = conversation.fitted([*conversation.messages, {"role": "user", "content": "And?"}]).messages
    assert context[0]["content"].startswith("Be kind.")
    assert SUMMARY_TITLE in context[0]["content"]


def test_a_full_context_can_be_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = long_conversation(folder, "stop")
    assert len(conversation.messages) < 21
    assert "shorten it" in capsys.readouterr().err
    result = CliRunner().invoke(build_app(), ["chat", "-m", str(folder), "--context-policy", "forget"])
    assert isinstance(result.exception, ConfigError)
    assert "drop, summarise, stop" in str(result.exception)


def test_a_cut_answer_is_marked(folder: Path) -> None:
    _, notes = chat(folder, "Hello\n")
    whole = LLM(folder).chat([{"role": "user", "content": "Hello"}], GREEDY)[0].outputs[0]
    assert ("[the answer was cut after 6 tokens: max_tokens]" in notes) == (whole.finish_reason == "length")
    assert whole.finish_reason == "length"


LOOPING = SamplingParams(temperature=0, logit_bias={65: 1000.0}, ignore_eos=True, max_tokens=160)


def test_an_answer_that_repeats_itself_is_stopped(folder: Path) -> None:
    conversation = Conversation(LLM(folder, max_num_seqs=1), LOOPING)
    request = conversation.turn("Hello", lambda text: None)
    assert len(request.sequences[0].output_token_ids) == 1 + LEAST_TOKENS
    assert any("repeats itself" in note and "/set stop-loops off" in note for note in conversation.notes)
    assert conversation.messages[-1] == {"role": "assistant", "content": request.sequences[0].text}

    assert set_option("stop-loops off", conversation) == ["stop-loops is off from now on"]
    assert "off" in dict(line.split(maxsplit=1) for line in set_option("", conversation))["stop-loops"]
    whole = conversation.regenerate(lambda text: None)
    assert len(whole.sequences[0].output_token_ids) == LOOPING.max_tokens
    assert "on or off" in set_option("stop-loops perhaps", conversation)[0]


def test_an_answer_has_a_longest_length_without_options(folder: Path) -> None:
    result = CliRunner().invoke(build_app(), ["chat", "-m", str(folder)], input="/set\n/set max_tokens none\n/set\n")
    lengths = [line.split()[-1] for line in result.stderr.splitlines() if line.startswith("max_tokens  ")]
    assert lengths == [str(ANSWER_TOKENS), "None"]


def test_set_lists_everything_in_effect(folder: Path) -> None:
    llm = LLM(folder, max_num_seqs=1, max_model_len=64)
    params = SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=("\n",), ignore_eos=True, max_tokens=4)
    conversation = Conversation(llm, params, None)
    shown = dict(line.split(maxsplit=1) for line in set_option("", conversation))
    assert shown["dry_multiplier"] == "0.8"
    assert shown["dry_sequence_breakers"] == "('\\n',)"
    assert shown["ignore_eos"] == "True"
    assert shown["dry_base"] == "1.75"
    assert "logit_bias" not in shown
    assert set_option("dry_multiplier 0", conversation) == ["dry_multiplier is 0 from now on"]
    assert conversation.params.dry_multiplier == 0.0


def test_set_changes_the_next_answers_and_shows_them(folder: Path) -> None:
    printed, notes = chat(folder, "/set max_tokens 2\nHello\n/set\n/set tempature 1\n/set top_p 7\n/set seed x\n")
    short = LLM(folder).chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=2))
    assert printed == short[0].outputs[0].text + "\n"
    for words in (
        "max_tokens is 2",
        "temperature          0.0",
        "did you mean 'temperature'?",
        "top_p is 7.0: pass a number",
        "no value",
    ):
        assert words in notes


def test_regenerate_answers_the_last_message_again(folder: Path) -> None:
    printed, notes = chat(folder, "/regenerate\nHello\n/regenerate\nand then?\n")
    first, second = expected(folder, ["Hello", "and then?"])
    assert printed == first + "\n" + first + "\n" + second + "\n"  # greedy: the same answer, kept once
    assert "there is no answer yet" in notes


def test_load_continues_a_saved_conversation(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    chat(folder, f"Hello\n/save {file}\n")
    printed, notes = chat(folder, f"/load {file}\nand then?\n/load {tmp_path}/none\n/load\n")
    assert printed == expected(folder, ["Hello", "and then?"])[1] + "\n"
    assert "2 messages read" in notes
    assert "could not read" in notes
    file.write_text('{"messages": [1]}')
    assert "is no saved conversation" in " ".join(chat(folder, f"/load {file}\n")[1].split())


def test_a_session_goes_on_from_its_file(folder: Path, tmp_path: Path) -> None:
    session = tmp_path / "talk.session"
    turns = ["Once upon a time", "and then?", "why?"]
    answers = expected(folder, turns)
    printed, notes = chat(folder, turns[0] + "\n", "--session", str(session))
    assert printed == answers[0] + "\n"
    assert "2 messages written to" in " ".join(notes.split())
    printed, notes = chat(folder, turns[1] + "\n", "--session", str(session))
    assert printed == answers[1] + "\n"
    assert re.search(r"2 messages read from .*, \d+ of \d+ tokens from the file", " ".join(notes.split()))
    assert "prompt" in notes
    assert ", 0 from the cache" not in " ".join(notes.split())
    printed, notes = chat(folder, f"/load {session}\n{turns[2]}\n/save {tmp_path / 'b.session'}\n")
    assert printed == answers[2] + "\n"
    assert "6 messages written to" in " ".join(notes.split())
    printed, notes = chat(folder, "/bye\n", "--session", str(session), "--kv-dtype", "f16")
    assert "computed again, since the snapshot was computed by another arithmetic" in " ".join(notes.split())


def test_sessions_that_cannot_go_on(folder: Path, tmp_path: Path) -> None:
    session = tmp_path / "talk.session"
    chat(folder, "Hello\n", "--session", str(session))
    arguments = ["chat", "-m", str(folder), *OPTIONS, "--session", str(session)]
    result = CliRunner().invoke(build_app(), [*arguments, "--system", "Be kind."], input="")
    assert "--system is for a new conversation" in str(result.exception)
    session.write_bytes(session.read_bytes()[:-1])
    result = CliRunner().invoke(build_app(), arguments, input="")
    assert "is no whole snapshot" in str(result.exception)
    _, notes = chat(folder, f"/load {session}\n")
    assert "is no whole snapshot" in " ".join(notes.split())


def test_branches_go_on_apart(folder: Path) -> None:
    printed, notes = chat(
        folder, "Hello\n/branch b\nand then?\n/branch main\nand then?\n/branch\n/branch b\n/bye\nno\n"
    )
    first, second = expected(folder, ["Hello", "and then?"])
    assert printed == "".join(text + "\n" for text in (first, second, second))
    assert "'b' begins here" in notes
    assert "back to 'main', 2 messages" in notes
    assert "this is 'main'; others: b" in notes
    assert "back to 'b', 4 messages" in notes


def test_json_is_one_line_for_each_answer(folder: Path) -> None:
    printed, _ = chat(folder, "Hello\nand then?\n", "--json")
    records = [json.loads(line) for line in printed.splitlines()]
    assert [record["content"] for record in records] == expected(folder, ["Hello", "and then?"])
    assert records[0]["finish_reason"] in ("length", "stop")


def test_a_message_between_triple_quotes_has_several_lines(folder: Path) -> None:
    printed, _ = chat(folder, '"""one\ntwo"""\n')
    assert printed == expected(folder, ["one\ntwo"])[0] + "\n"


def test_a_turn_that_does_not_fit_leaves_the_conversation_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(folder, kernels=ReferenceKernels(), max_model_len=32, max_num_seqs=1)
    conversation = Conversation(llm, GREEDY)
    answer("word " * 100, conversation, Terminal(interactive=False))
    assert conversation.messages == []
    assert "shorten it" in capsys.readouterr().err


def test_interrupting_keeps_what_was_said(folder: Path) -> None:
    llm = LLM(folder, kernels=ReferenceKernels(), max_model_len=128, max_num_seqs=1)
    conversation = Conversation(llm, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            raise KeyboardInterrupt

    conversation.turn("Hello", write)
    assert conversation.messages[-1]["content"] == "".join(written[:3])
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_used_blocks) == (0, 0)


def test_models_without_a_chat_template_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        CliRunner().invoke(
            build_app(), ["chat", "-m", str(tiny_folder(tmp_path, tokenizer=True))], input="", catch_exceptions=False
        )


def test_a_real_model_knows_the_capital_of_france(models_dir: Path) -> None:
    model = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not model.is_file():
        pytest.skip(f"{model} is absent")
    result = CliRunner().invoke(
        build_app(),
        ["chat", "-m", str(model), "--temperature", "0", "--max-tokens", "10", "--max-model-len", "256"],
        input="Name the capital of France.\n",
        catch_exceptions=False,
    )
    assert "Paris" in result.stdout
