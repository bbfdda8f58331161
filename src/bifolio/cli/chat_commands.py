"""Slash commands of `bifolio chat`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from bifolio.cli.commands import did_you_mean
from bifolio.cli.conversation import Conversation, checked_policy
from bifolio.errors import BifolioError, ConfigError
from bifolio.sampling_params import SamplingParams

if TYPE_CHECKING:
    from bifolio.cli.terminal import Terminal

COMMANDS = {
    "/help": "show this list",
    "/set NAME VALUE": "change an option, such as temperature; without arguments: show all",
    "/system TEXT": "set the system prompt and start over; without TEXT: show it",
    "/image FILE": "show an image (or a dropped path) with the next message; without FILE: forget those that wait",
    "/regenerate": "answer the last message again",
    "/branch NAME": "go on in a copy of the conversation, or back to one; without NAME: list them",
    "/save FILE": "write the conversation: FILE.json as text, FILE.session with its part of the cache",
    "/load FILE": "read a conversation of either kind",
    "/reset": "forget the conversation; the system prompt stays",
    "/bye": "leave (also /quit, /exit, Ctrl-D)",
}
LEAVE = ("/bye", "/quit", "/exit")
NUMBERS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "typical_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "no_repeat_ngram_size": int,
    "dry_multiplier": float,
    "dry_base": float,
    "dry_allowed_length": int,
    "dry_range": int,
    "xtc_probability": float,
    "xtc_threshold": float,
    "min_tokens": int,
    "max_tokens": int,
    "seed": int,
}
NONE_WORDS = ("none", "off", "default")


def obey(line: str, conversation: Conversation, terminal: Terminal, regenerate: Callable[[], None]) -> bool:
    """Run a command; False to leave."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command in LEAVE:
        return False
    if command == "/reset":
        conversation.reset(conversation.system)
        terminal.note("started over")
    elif command == "/system" and argument:
        conversation.reset(argument)
        terminal.note("system prompt set, started over")
    elif command == "/system":
        terminal.note(conversation.system or "no system prompt of yours; the model's template may add its own")
    elif command == "/save":
        terminal.note(conversation.save(argument))
    elif command == "/load":
        terminal.note(conversation.load(argument))
    elif command == "/image":
        terminal.note(conversation.show(argument))
    elif command == "/branch":
        terminal.note(conversation.branch(argument))
    elif command == "/regenerate":
        regenerate()
    elif command == "/set":
        for text in set_option(argument, conversation):
            terminal.note(text)
    else:
        known = [name.split()[0] for name in COMMANDS]
        if command != "/help":
            terminal.note(f"unknown command {command}{did_you_mean(command, [*known, *LEAVE])}")
        for name, text in COMMANDS.items():
            terminal.note(f"{name:<16} {text}")
    return True


def in_effect(conversation: Conversation) -> list[str]:
    """Every option of the next answers: those that /set changes, and all others that differ from their defaults."""
    params, plain = conversation.params, SamplingParams()
    shown = {name: getattr(params, name) for name in NUMBERS} | {"stop": list(params.stop)}
    for option in fields(params):
        value = getattr(params, option.name)
        if option.name not in shown and value != getattr(plain, option.name):
            shown[option.name] = value
    shown["context-policy"] = conversation.policy
    shown["stop-loops"] = "on" if conversation.stop_loops else "off"
    return [f"{name:<20} {value}" for name, value in shown.items()]


def set_option(argument: str, conversation: Conversation) -> list[str]:
    """Change an option of the next answers, or list all; the lines to print."""
    params = conversation.params
    if not argument:
        return in_effect(conversation)
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    value, key = value.strip(), name.replace("-", "_")
    try:
        if key == "context_policy":
            conversation.policy = checked_policy(value)
        elif key == "stop_loops":
            conversation.stop_loops = _switch(value)
        elif key == "stop":
            conversation.params = replace(params, stop=(value,) if value else ())
        elif key in NUMBERS:
            changed: dict[str, Any] = {key: None if value.lower() in NONE_WORDS else NUMBERS[key](value)}
            conversation.params = replace(params, **changed)
        else:
            return [
                f"there is no option {name!r}{did_you_mean(key, [*NUMBERS, 'stop', 'context-policy', 'stop-loops'])}"
            ]
    except BifolioError as error:
        return [str(error)]
    except ValueError:
        return [f"{value!r} is no value of {name}: write for example /set {name} 1"]
    return [f"{name} is {value or 'none'} from now on"]


def _switch(value: str) -> bool:
    if value.lower() not in ("on", "off"):
        raise ConfigError(f"stop-loops is on or off, not {value!r}")
    return value.lower() == "on"
