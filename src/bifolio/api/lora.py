"""Low-rank adapters in the calls of `LLM` and `AsyncLLM`, under the names of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bifolio.engine.adapters import AdapterStore, LoadedAdapter
from bifolio.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request: its name, and its path unless the name is known already."""

    lora_name: str
    lora_int_id: int = 0  # vLLM's number; names alone identify adapters here
    lora_path: str = ""
    load_inplace: bool = False  # read the path again under this name

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


LoRA: TypeAlias = LoRARequest | str | Sequence[LoRARequest | str | None] | None  # of a call: for all prompts, or each


def check_modules(modules: Any) -> None:
    """Refuse `lora_modules` that are no mapping."""
    if modules is not None and not isinstance(modules, Mapping):
        raise ConfigError(
            f"lora_modules maps names to paths of adapters, such as {{'poems': './poems'}}, not {modules!r}"
        )


def adapters_for(requests: Any, count: int, store: AdapterStore) -> list[LoadedAdapter | None]:
    """The adapter of each prompt: of one request for all of them, or of one for each. None: the base."""
    each = list(requests) if isinstance(requests, Sequence) and not isinstance(requests, str) else [requests] * count
    if len(each) != count:
        raise RequestError(f"{count} prompts and {len(each)} lora_request: pass one, or one for each")
    found: dict[Any, LoadedAdapter | None] = {None: None}
    for one in each:
        if one not in found:
            found[one] = _adapter(one, store)
    return [found[one] for one in each]


def _adapter(request: Any, store: AdapterStore) -> LoadedAdapter:
    if isinstance(request, str):
        return store.get(request)
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request is a LoRARequest or the name of an adapter, not {request!r}")
    if request.path and (request.load_inplace or request.name not in store):
        return store.load(request.name, request.path, in_place=request.load_inplace)
    if request.path:
        return store.load(request.name, request.path)  # an error where the name has another path
    return store.get(request.name)
