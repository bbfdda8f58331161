"""Options of `bifolio serve` that mean something only together with others: refused by name where they do not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from bifolio.cli import commands
from bifolio.errors import ConfigError

if TYPE_CHECKING:
    from bifolio.cli.options import Adapters, BatchEngine
    from bifolio.cli.serve import ServerOptions

# Options that several engines behind Ray Serve take; the engines and their front ends have no others.
WITH_REPLICAS = frozenset(
    ("host", "port", "name", "api_key", "api_key_file", "cors_origin", "max_queue", "request_timeout", "drain_timeout",
     "front_ends", "replicas", "prefill_replicas", "prefill_threshold", "metrics_compat", "log_level")
)  # fmt: skip
WITHOUT_KEYS = ("allowed_host", "allow_priority")


def check_combined(server: ServerOptions, engine: BatchEngine, adapters: Adapters) -> None:
    """Refuse an option that would have no effect beside the others."""
    given, has_keys = changed(server), bool(server.api_key or server.api_key_file)
    splits = server.prefill_replicas > 0 or server.role == "decode"
    needs = {  # option → (whether it has an effect, the option that it needs)
        "kv_events_replay": (server.kv_events is not None, "--kv-events"),
        "kv_events_topic": (server.kv_events is not None, "--kv-events"),
        "transfer_host": (server.role == "prefill", "--role prefill"),
        "transfer_port": (server.role == "prefill", "--role prefill"),
        "transfer_secret_file": (server.role != "both", "--role prefill or decode"),
        "prefill_threshold": (splits, "--role decode or --prefill-replicas"),
    }
    for name, (acts, needed) in needs.items():
        if name in given and not acts:
            raise ConfigError(f"{written(server, name)} has no effect without {needed}: pass both, or leave it out")
    for name in WITHOUT_KEYS:
        if name in given and has_keys:
            raise ConfigError(f"{written(server, name)} is for servers without API keys: leave it out")
    if server.engine is not None:
        for group in (engine, adapters):
            for name in changed(group):
                if name == "mmproj":  # read by both: the front end prepares images
                    continue
                raise ConfigError(f"{written(group, name)} belongs to the engine: pass it to `bifolio engine`")
    if server.replicas > 1 or server.prefill_replicas:
        for name in given:
            if name not in WITH_REPLICAS:
                option = written(server, name)
                raise ConfigError(f"{option} cannot be combined with --replicas and --prefill-replicas: leave it out")


def changed(options: Any) -> list[str]:
    """The fields of a group that differ from their defaults."""
    return [field.name for field in dataclasses.fields(options) if getattr(options, field.name) != field.default]


def written(options: Any, name: str) -> str:
    """The option of a field, as it is written on the command line."""
    parameter = next(each for each in commands.fields_of(type(options)) if each.name == name)
    names = commands.notes_of(parameter)[1].names
    return next((each for each in names if each.startswith("--")), "--" + name.replace("_", "-"))
