"""No option of a verb is ignored in silence: each comes from every source, is read, and acts or is refused."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bifolio.cli import commands, gguf
from bifolio.cli.main import build_app
from bifolio.cli.option_values import NO_VARIABLE, OF_TESTS, VARIABLES
from bifolio.cli.options import Adapters, BatchEngine
from bifolio.cli.serve import ServerOptions
from bifolio.cli.serve_checks import check_combined
from bifolio.errors import BifolioError, ConfigError
from cli_runner import CliRunner
from helpers import tiny_folder

Verb = tuple[str, commands.Command]


def verbs(app: commands.App | None = None, before: str = "") -> Iterator[Verb]:
    for name, each in (app or build_app()).verbs.items():
        if isinstance(each, commands.App):
            yield from verbs(each, f"{before}{name} ")
        else:
            yield before + name, each


VERBS = dict(verbs())


@pytest.mark.parametrize("name", VERBS)
def test_every_option_is_read(name: str) -> None:
    """Parameters by the function of the verb, fields of a group by it or by the group itself."""
    function = VERBS[name].function
    if function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        loaded = read_in_package(name) | function.__globals__["HEADS"].keys() | {"as_json", "more_data", "data"}
        silent = [parameter.name for parameter, _ in commands.parameters_of(function) if parameter.name not in loaded]
        assert not silent, f"`bifolio {name}` never reads {silent}"
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    silent = []
    for parameter, group in commands.parameters_of(function):
        if group is None and parameter.name not in loaded:
            silent.append(parameter.name)
        elif group is not None and parameter.name not in fields_read(group.annotation, function):
            silent.append(f"{group.name}.{parameter.name}")
    assert not silent, f"`bifolio {name}` never reads {silent}"


def read_in_package(name: str) -> set[str]:
    """Attributes that the package of a verb reads: the settings of training are its options."""
    files = (Path(commands.__file__).parents[1] / name).glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def fields_read(group: Any, function: Any) -> set[str]:
    """Attributes that the module of the verb, or the group and its bases, read; all of them where `vars(self)` is."""
    sources = [inspect.getsource(inspect.getmodule(function) or function)]
    sources += [inspect.getsource(base) for base in group.__mro__ if base is not object]
    trees = [ast.parse(textwrap.dedent(source)) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    if any(call.func.id in ("vars", "asdict") for call in calls):  # type: ignore[attr-defined]
        return {field.name for field in fields(group)}
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def other_value(kind: Any, written: commands.Parameter, default: Any, folder: Path) -> str:
    """A text that the option reads as a value other than the default."""
    kind = commands._without_none(kind)
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    if inner is bool:
        return "false" if default is True else "true"
    if inner in (int, float):
        number = int(max(written.min or 1, 1)) + 2
        number += number == default
        return str(min(number, written.max) if written.max is not None else number)
    if written.read is gguf.assignment:
        return "key=probe"
    return str(folder / f"{len(list(folder.iterdir()))}.png") if written.read is not None or inner is Path else "probe"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", VERBS)
def test_every_option_comes_from_the_environment_and_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, given = VERBS[name], dict[str, Any]()
    written = commands.parameters_of(command.function)

    @functools.wraps(command.function)
    def recorded(**values: Any) -> None:
        for parameter, group in written:
            holder = values if group is None else vars(values[group.name])
            given[parameter.name] = holder[parameter.name]

    stand_in = commands.Command(recorded, command.help, command.epilog)
    positional = [p for p, _ in written if commands.notes_of(p)[1].positional and p.default is inspect.Parameter.empty]
    words = ["word"] * len(positional)
    config = tmp_path / "config.toml"
    for variable in [variable for variable in os.environ if variable.startswith("BIFOLIO_")]:
        monkeypatch.delenv(variable)  # `bifolio serve` in another test leaves its log level here
    monkeypatch.setenv("BIFOLIO_CONFIG", str(config))
    required = [p for p, _ in written if p.default is inspect.Parameter.empty and p not in positional]
    for parameter in required:
        words += [commands.notes_of(parameter)[1].names[0], "probe"]
    stand_in.run(f"bifolio {name}", words)
    plain = dict(given)
    for parameter, _ in written:
        kind, notes = commands.notes_of(parameter)
        if notes.positional or parameter in required:
            continue
        names = notes.names or ("--" + parameter.name.replace("_", "-"),)
        for key in (each[2:].replace("-", "_") for each in names if each.startswith("--")):
            text = other_value(kind, notes, parameter.default, tmp_path)
            config.write_text(f"{key} = {json.dumps(text)}\n")
            stand_in.run(f"bifolio {name}", words)
            assert given[parameter.name] != plain[parameter.name], (
                f"{key} in config.toml has no effect on `bifolio {name}`"
            )
            config.write_text("")
            if key not in NO_VARIABLE:
                with monkeypatch.context() as patch:
                    patch.setenv("BIFOLIO_" + key.upper(), text)
                    stand_in.run(f"bifolio {name}", words)
                assert given[parameter.name] != plain[parameter.name], f"BIFOLIO_{key.upper()} has no effect"


MEANINGFUL: list[dict[str, Any]] = [  # options beside which others mean something
    {}, {"tls_cert": Path("cert.pem")}, {"kv_events": "tcp://127.0.0.1:5557"}, {"role": "prefill"},
    {"role": "decode", "prefill_address": ["10.0.0.1:80"]}, {"prefill_replicas": 1},
]  # fmt: skip
ELSEWHERE = {  # read by the verb itself, not by the settings of the server
    "replicas": "the number of engines", "prefill_replicas": "the number of engines", "log_level": "the log",
    "engine_secret_file": "goes with --engine",
}  # fmt: skip


def test_every_option_of_the_server_changes_its_settings(tmp_path: Path) -> None:
    secret = tmp_path / "probe"
    secret.write_text("a-secret-of-32-characters-at-least")
    silent = []
    for parameter in commands.fields_of(ServerOptions):
        kind, notes = commands.notes_of(parameter)
        inner = commands._without_none(kind)
        several = typing.get_origin(inner) is list
        item = typing.get_args(inner)[0] if several else inner
        text = other_value(kind, notes, parameter.default, tmp_path)
        value: Any = secret if item is Path else True if item is bool else item(text)
        if parameter.name not in ELSEWHERE and not decides(parameter.name, [value] if several else value):
            silent.append(parameter.name)
    assert not silent, f"`bifolio serve` ignores {silent}"


def decides(name: str, value: Any) -> bool:
    num_taken = 0
    for base in MEANINGFUL:
        plain = repr(ServerOptions(**base).settings())
        try:
            server = ServerOptions(**{**base, name: value})
            found = repr(server.settings())
            check_combined(server, BatchEngine(), Adapters())
        except (BifolioError, commands.BadParameter, ValueError):
            continue
        if found != plain:
            return True
        num_taken += 1
    return not num_taken


@pytest.mark.parametrize(
    ("options", "engine", "sentence"),
    [
        ({"kv_events_topic": "t"}, {}, "--kv-events-topic has no effect without --kv-events"),
        ({"transfer_port": 5}, {}, "--transfer-port has no effect without --role prefill"),
        ({"prefill_threshold": 5}, {}, "--prefill-threshold has no effect without --role decode"),
        ({"allow_priority": True, "api_key": ["k"]}, {}, "--allow-priority is for servers without API keys"),
        ({"engine": "h:1"}, {"max_num_seqs": 4}, "--max-num-seqs belongs to the engine: pass it to `bifolio engine`"),
        ({"replicas": 2, "step_timeout": 5.0}, {}, "--step-timeout cannot be combined with --replicas"),
        ({"replicas": 2, "name": "n"}, {"max_num_seqs": 4}, ""),
        ({}, {"max_num_seqs": 4}, ""),
    ],
)
def test_options_of_the_server_that_need_others(options: Any, engine: Any, sentence: str) -> None:
    if not sentence:
        check_combined(ServerOptions(**options), BatchEngine(**engine), Adapters())
        return
    with pytest.raises(ConfigError, match=sentence):
        check_combined(ServerOptions(**options), BatchEngine(**engine), Adapters())


def test_options_of_one_prompt_are_refused_with_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "Once"}\n')
    for extra, sentence in ((["text"], "PROMPT has no effect with --input"), (["--echo"], "--echo is for one prompt")):
        arguments = ["generate", "-m", str(tiny_folder(tokenizer=True)), "--input", str(lines), *extra]
        result = CliRunner().invoke(build_app(), arguments)
        assert result.exit_code == 2
        assert sentence in result.output


def test_a_system_prompt_needs_a_chat_template() -> None:
    result = CliRunner().invoke(build_app(), ["run", str(tiny_folder(tokenizer=True)), "Once", "--system", "Be brief."])
    assert result.exit_code == 2
    assert "--system has no effect: the model has no chat template" in result.output


def test_variables_in_the_documents_are_known() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__).parents[2] / "docs").glob("*.md")]
    named = {name for text in texts for name in re.findall(r"\bBIFOLIO_[A-Z0-9_]+", text)}
    options = {
        "BIFOLIO_" + written.lstrip("-").replace("-", "_").upper()
        for command in VERBS.values()
        for each, _ in commands.parameters_of(command.function)
        for written in commands.notes_of(each)[1].names or (each.name,)
    }
    strange = {name for name in named - options - VARIABLES.keys() if not name.startswith(OF_TESTS)}
    assert not strange
