"""Functions as commands: every parameter of a function becomes an option, read by its type and default.

    def generate(
        prompt: Annotated[str | None, argument(help="The text to continue.")] = None,
        max_tokens: Annotated[int | None, option("--max-tokens", "-n", help="The most tokens to generate.")] = None,
    ) -> None: ...

    app = App("bifolio", "Run language models.")
    app.command(help="Generate text.")(generate)
    app(["generate", "Once", "-n", "8"])

A parameter whose type is a dataclass stands for one option for each field: a group that several functions share, with
its own heading in the help (`HEADING` of the class).

Built on argparse: a larger library would take longer to import than a small model takes to load.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from bifolio.cli.option_values import FALSE, TRUE, OptionValues
from bifolio.errors import did_you_mean as did_you_mean

Function = TypeVar("Function", bound=Callable[..., None])
HELP_ALL = "--help-all"
LITERAL = "\0"  # no argument of a program can hold this character
DEST_PREFIX = "value_of_"  # keeps names such as `format_usage` apart from attributes of argparse


class BadParameter(Exception):  # noqa: N818  # ends the program with code 2
    """An option has an invalid value; the message names a valid one."""


class Exit(Exception):  # noqa: N818
    """End the program with this code."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a parameter of a function is written on the command line; stands in `Annotated[type, ...]`."""

    names: tuple[str, ...] = ()  # "--max-tokens", "-n"; empty: made from the parameter's own name
    help: str = ""
    min: float | None = None
    max: float | None = None
    variable: str | None = None  # of the environment, read where the option is not given
    positional: bool = False
    advanced: bool = False  # shown by --help-all, not by --help
    read: Callable[[str], Any] | None = None  # from text to the value, where the type alone does not say it
    takes_several: bool = False  # values of a list may follow one mark, as well as one mark each


def option(
    *names: str,
    help: str = "",
    min: float | None = None,
    max: float | None = None,
    variable: str | None = None,
    advanced: bool = False,
    read: Callable[[str], Any] | None = None,
    takes_several: bool = False,
) -> Parameter:
    return Parameter(names, help, min, max, variable, advanced=advanced, read=read, takes_several=takes_several)


def argument(*, help: str = "") -> Parameter:
    return Parameter(help=help, positional=True)


def echo(text: str, err: bool = False) -> None:
    print(text, file=sys.stderr if err else sys.stdout)


@dataclass(frozen=True, slots=True)
class Command:
    """One verb."""

    function: Callable[..., None]
    help: str
    epilog: str

    def parser(self, program: str, values: OptionValues, in_full: bool) -> argparse.ArgumentParser:
        """The parser of the verb, with the given values as defaults; `in_full`: its help has the advanced options."""
        parser, written = _parser(program, self.help, self.epilog), parameters_of(self.function)
        num_hidden = sum(notes_of(parameter)[1].advanced for parameter, _ in written)
        shown = f"Show all options, {num_hidden} more, and exit." if num_hidden and not in_full else argparse.SUPPRESS
        parser.add_argument(HELP_ALL, action="help", help=shown)
        headings: dict[str, Any] = {}
        for parameter, group in written:
            section = parser if group is None else headings.get(group.name)
            if section is None and group is not None:
                section = headings[group.name] = parser.add_argument_group(group.annotation.HEADING)
            _add(section, parameter, values, in_full)
        parser.usage = " ".join([program, "[options]", *_shown_arguments(parser)])
        return parser

    def run(self, program: str, arguments: Sequence[str]) -> None:
        words, values = _literal_tail(arguments), OptionValues.of(program)
        parser = self.parser(program, values, HELP_ALL in words)
        values.check_all_used()
        _refuse_unknown(parser, words)
        given = vars(parser.parse_intermixed_args(words))
        try:
            self.function(**_arguments(parameters_of(self.function), given))
        except BadParameter as error:
            parser.error(str(error))


@dataclass(slots=True)
class App:
    """Verbs under one name; a verb may be an App again."""

    name: str
    help: str = ""
    version: str = ""
    headings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the help: the verbs under each
    verbs: dict[str, Command | App] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # another name: the verb
    moved: Mapping[str, Callable[[Sequence[str]], None]] = field(default_factory=dict)  # old verbs, not listed

    def command(
        self, name: str | None = None, *, help: str = "", epilog: str = "", alias: str | None = None
    ) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            verb = name or function.__name__.replace("_", "-")
            self.verbs[verb] = Command(function, help or inspect.getdoc(function) or "", epilog)
            if alias is not None:
                self.aliases[alias] = verb
            return function

        return register

    def add_app(self, app: App) -> None:
        self.verbs[app.name] = app

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
        """Run the verb that the arguments name. Ends by SystemExit where there is nothing to run."""
        try:
            self.run(self.name, sys.argv[1:] if arguments is None else arguments)
        except Exit as exit:
            raise SystemExit(exit.code) from None

    def run(self, program: str, arguments: Sequence[str]) -> None:
        verb = arguments[0] if arguments else ""
        verb = self.aliases.get(verb, verb)
        if verb in self.verbs:
            self.verbs[verb].run(f"{program} {verb}", arguments[1:])
            return
        if verb in self.moved:
            self.moved[verb](arguments[1:])
            return
        parser = _parser(program, self.help, "")
        parser.usage = f"{program} VERB ..."
        if self.version:
            parser.add_argument("--version", action="version", version=self.version, help="Show the version and exit.")
        parser.add_argument(HELP_ALL, action="help", help=argparse.SUPPRESS)
        self._list_verbs(parser)
        if not verb:
            parser.print_help()
            raise Exit(2)
        parser.parse_known_args([verb] if verb.startswith("-") else [])  # --help and --version end here
        known = [*self.verbs, *self.aliases]
        parser.error(f"there is no {verb!r}{did_you_mean(verb, known) or ': choose one of ' + ', '.join(self.verbs)}")

    def _list_verbs(self, parser: argparse.ArgumentParser) -> None:
        """The verbs under their headings; those without one come last."""
        placed = {name for names in self.headings.values() for name in names}
        rest = [name for name in self.verbs if name not in placed]
        for heading, names in {**self.headings, "other verbs" if placed else "verbs": rest}.items():
            group = parser.add_argument_group(heading)
            for name in names:
                if name in self.verbs:
                    also = "".join(f" (also: {alias})" for alias, verb in self.aliases.items() if verb == name)
                    group.add_argument(name, nargs="?", help=_escaped(self.verbs[name].help.split("\n")[0] + also))


def _parser(program: str, help: str, epilog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        program,
        description=help,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser


def _shown_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """Positional arguments as a usage line shows them: FILE, [PROMPT], DATA..."""
    marks = {None: "{}", "?": "[{}]", "+": "{}...", "*": "[{}...]"}
    return [marks[action.nargs].format(action.metavar) for action in parser._actions if not action.option_strings]  # type: ignore[index]


def _literal_tail(arguments: Sequence[str]) -> list[str]:
    """Mark the arguments after "--", so that argparse does not read them as options."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:split], *(LITERAL + text for text in arguments[split + 1 :])]


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse an option that the verb does not have, with the nearest one, before any value is read."""
    known = parser._option_string_actions
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and " " not in word and name not in known:
            parser.error(f"there is no option {name}{did_you_mean(name, known) or ': see ' + HELP_ALL}")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def parameters_of(function: Callable[..., None]) -> list[tuple[inspect.Parameter, inspect.Parameter | None]]:
    """(option or argument, None), and (option, parameter of the group) for each field of a group of options."""
    hints = typing.get_type_hints(function, include_extras=True)
    found: list[tuple[inspect.Parameter, inspect.Parameter | None]] = []
    for parameter in inspect.signature(function).parameters.values():
        parameter = parameter.replace(annotation=hints[parameter.name])
        if is_dataclass(parameter.annotation):
            found += [(option, parameter) for option in fields_of(parameter.annotation)]
        else:
            found.append((parameter, None))
    return found


def fields_of(group: Any) -> list[inspect.Parameter]:
    """The fields of a group as keyword parameters."""
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=hints[option.name],
        )
        for option in fields(group)
    ]


def _arguments(
    written: list[tuple[inspect.Parameter, inspect.Parameter | None]], given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of the function, each group made of its options."""
    alone: dict[str, Any] = {}
    grouped: dict[str, dict[str, Any]] = {}
    for parameter, group in written:
        target = alone if group is None else grouped.setdefault(group.name, {})
        target[parameter.name] = given[DEST_PREFIX + parameter.name]
    classes = {group.name: group.annotation for _, group in written if group is not None}
    return {**alone, **{name: classes[name](**options) for name, options in grouped.items()}}


def notes_of(parameter: inspect.Parameter) -> tuple[Any, Parameter]:
    """The type of a parameter, and how it is written."""
    hint = parameter.annotation
    kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    return kind, next((note for note in notes if isinstance(note, Parameter)), Parameter())


def _add(parser: Any, parameter: inspect.Parameter, values: OptionValues, in_full: bool) -> None:
    """Add one option or argument; a parameter without a default is required."""
    kind, written = notes_of(parameter)
    kind = _without_none(kind)
    several = typing.get_origin(kind) is list
    required = parameter.default is inspect.Parameter.empty
    default = None if required else parameter.default
    if written.variable is not None:
        default = os.environ.get(written.variable, default)
    names = written.names or ("--" + parameter.name.replace("_", "-"),)
    reader = bool if kind is bool else _reader(typing.get_args(kind)[0] if several else kind, written)
    if not written.positional:
        value = values.take(names, reader, several)
        default, required = (default, required) if value is None else (value, False)
    shown = "" if default is None or isinstance(default, bool) or written.positional else f" [default: {default}]"
    is_hidden = written.advanced and not in_full and not required
    settings: dict[str, Any] = {"help": argparse.SUPPRESS if is_hidden else _escaped(written.help + shown)}
    if kind is bool:
        settings |= {"action": "store_true" if written.names else argparse.BooleanOptionalAction}
    else:
        settings["type"] = reader
    if written.positional:
        settings["nargs"] = ("+" if required else "*") if several else None if required else "?"
        parser.add_argument(DEST_PREFIX + parameter.name, metavar=parameter.name.upper(), default=default, **settings)
        return
    if several:
        settings |= {"action": "extend", "nargs": "+"} if written.takes_several else {"action": "append"}
    if kind is not bool:
        settings["metavar"] = parameter.name.upper()
    parser.add_argument(*names, dest=DEST_PREFIX + parameter.name, default=default, required=required, **settings)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def value_of(parameter: inspect.Parameter, text: str) -> Any:
    """The value of an option from a text in a file; BadParameter if it is none."""
    kind, written = notes_of(parameter)
    kind = _without_none(kind)
    if kind is bool:
        if text.lower() not in (*TRUE, *FALSE):
            raise BadParameter(f"{text!r} is not one of true and false")
        return text.lower() in TRUE
    try:
        return _reader(kind, written)(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise BadParameter(str(error) or f"{text!r} is no {getattr(kind, '__name__', kind)}") from error


def _reader(kind: Callable[[str], Any], written: Parameter) -> Callable[[str], Any]:
    """A function from text to a value; its error names the expected type or range."""

    def read(text: str) -> Any:
        value = (written.read or kind)(text.removeprefix(LITERAL))
        if written.min is not None and value < written.min:
            raise argparse.ArgumentTypeError(f"{text} is below {written.min:g}, the least that is allowed")
        if written.max is not None and value > written.max:
            raise argparse.ArgumentTypeError(f"{text} is above {written.max:g}, the most that is allowed")
        return value

    read.__name__ = getattr(kind, "__name__", str(kind))  # argparse puts it into "invalid int value"
    return read
