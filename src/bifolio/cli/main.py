"""The `bifolio` command: one small file for each verb; heavy imports happen inside the verbs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from bifolio.cli import commands

HEADINGS = {
    "use": ("run", "generate", "chat", "serve", "embed", "rerank"),
    "models": ("models", "pull", "rm", "inspect", "gguf", "quantize", "merge", "imatrix", "train"),
    "measure": ("eval", "replay", "bench", "profile", "soak"),
    "operate": ("ps", "doctor", "completion", "engine", "cluster"),
}
VERBS = tuple(verb for verbs in HEADINGS.values() for verb in verbs)
ALIASES = {"list": "models"}


def build_app(verbs: Sequence[str] = VERBS) -> commands.App:
    from bifolio import __version__

    app = commands.App(
        "bifolio",
        "Run language models on this machine: chat, generate text, or serve an OpenAI-compatible API.\n\n"
        "`bifolio run smollm2` fetches a small model and chats with it; `bifolio VERB --help` explains a verb.",
        version=f"bifolio {__version__}",
        headings=HEADINGS,
    )
    for verb in verbs:
        try:
            module = import_module(f"bifolio.cli.{verb}")
        except ModuleNotFoundError as error:
            if error.name != f"bifolio.cli.{verb}":
                raise
            continue
        module.register(app)
    return app


def wanted_verbs(arguments: Sequence[str]) -> Sequence[str]:
    """The verb of the command line, so that only its module is imported; all verbs for help and for unknown ones."""
    verb = ALIASES.get(arguments[0], arguments[0]) if arguments else ""
    return [verb] if verb in VERBS else VERBS


def main() -> None:
    """Run the command line. Named errors print one line; Ctrl-C and a closed pipe print nothing."""
    from bifolio.errors import BifolioError

    try:
        build_app(wanted_verbs(sys.argv[1:]))()
    except BifolioError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
