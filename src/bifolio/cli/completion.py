"""`bifolio completion`: scripts that complete verbs, options and names of models in a shell."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Annotated

from bifolio.cli import commands

HELP = """Print a completion script for bash, zsh or fish."""
EPILOG = """Examples:

  eval "$(bifolio completion bash)"

  bifolio completion zsh > ~/.zfunc/_bifolio

  bifolio completion fish > ~/.config/fish/completions/bifolio.fish"""
SHELLS = ("bash", "zsh", "fish")
BASH = """_bifolio() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  case "$before" in
    -m|--model|run|rm) COMPREPLY=($(compgen -W "$(bifolio completion names 2>/dev/null)" -- "$word") \
$(compgen -f -- "$word")); return ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{verbs}" -- "$word")); return; fi
  case "$verb" in
{groups}
  esac
  case "$verb" in
{cases}
  esac
  case "$word" in -*) ;; *) COMPREPLY=($(compgen -f -- "$word")) ;; esac
}}
complete -o filenames -F _bifolio bifolio
"""


def register(app: commands.App) -> None:
    app.command("completion", help=HELP, epilog=EPILOG)(completion)


def completion(shell: Annotated[str, commands.argument(help="bash, zsh or fish.")]) -> None:
    if shell == "names":  # for the scripts themselves
        from bifolio.model.registry import PULLABLE, known_names

        commands.echo(" ".join(sorted({*known_names(), *PULLABLE})))
        return
    if shell not in SHELLS:
        raise commands.BadParameter(f"there is no completion for {shell!r}: choose one of {', '.join(SHELLS)}")
    from bifolio.cli.main import build_app

    app = build_app()
    verbs = {verb: sorted(options) for verb, options in options_of(app)}
    commands.echo({"bash": bash, "zsh": zsh, "fish": fish}[shell](app, verbs))


def options_of(app: commands.App, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """(verb, its options) of every verb; those of a group such as `bench` are two words."""
    for name, entry in app.verbs.items():
        if isinstance(entry, commands.App):
            yield from options_of(entry, f"{prefix}{name} ")
            continue
        found = ["--help", commands.HELP_ALL]
        for parameter, _ in commands.parameters_of(entry.function):
            found += _written(parameter)
        yield prefix + name, found


def _written(parameter: inspect.Parameter) -> list[str]:
    kind, written = commands.notes_of(parameter)
    if written.positional:
        return []
    if written.names:
        return list(written.names)
    name = parameter.name.replace("_", "-")
    is_flag = kind is bool or bool in typing.get_args(kind)
    return [f"--{name}", f"--no-{name}"] if is_flag else [f"--{name}"]


def bash(app: commands.App, verbs: dict[str, list[str]]) -> str:
    cases = "\n".join(
        f'    "{verb}") COMPREPLY=($(compgen -W "{" ".join(options)}" -- "$word")) ;;'
        for verb, options in verbs.items()
    )
    cases = "\n".join(f"    {line.strip()}" for line in cases.splitlines())
    groups = "\n".join(
        _group_case(name, list(entry.verbs)) for name, entry in app.verbs.items() if isinstance(entry, commands.App)
    )
    return BASH.format(verbs=" ".join(app.verbs), groups=groups, cases=cases)


def _group_case(name: str, verbs: list[str]) -> str:
    """The verbs of a group as the second word; after it, a verb is two words."""
    words = " ".join(verbs)
    return (
        f'    {name}) [ "$COMP_CWORD" -eq 2 ] && {{ COMPREPLY=($(compgen -W "{words}" -- "$word")); return; }}\n'
        f'      verb="{name} ${{COMP_WORDS[2]}}" ;;'
    )


def zsh(app: commands.App, verbs: dict[str, list[str]]) -> str:
    """zsh runs the script for bash through its own bridge."""
    return "#compdef bifolio\nautoload -U +X bashcompinit && bashcompinit\n" + bash(app, verbs)


def fish(app: commands.App, verbs: dict[str, list[str]]) -> str:
    lines = ["complete -c bifolio -f -n __fish_use_subcommand"]
    for name, entry in app.verbs.items():
        help = entry.help.split("\n")[0].replace("'", "\\'")
        lines.append(f"complete -c bifolio -n __fish_use_subcommand -a {name} -d '{help}'")
        if isinstance(entry, commands.App):
            below = " ".join(entry.verbs)
            lines.append(f"complete -c bifolio -f -n '__fish_seen_subcommand_from {name}' -a '{below}'")
    for verb, options in verbs.items():
        condition = " and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.split())
        condition = condition.replace(" and ", "; and ")
        for option in options:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            names = " -xa '(bifolio completion names | string split \" \")'" if option == "--model" else ""
            lines.append(f"complete -c bifolio -n '{condition}' {flag}{names}")
    return "\n".join(lines)
