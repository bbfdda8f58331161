"""The adapters of an engine by name: loaded, replaced and dropped while requests run.

A request holds its adapter from its arrival to its end, and a loaded adapter never changes: a new version is another
object with another digest. So loading pauses no request, and the memory of a dropped name is free after the last
request that uses it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TypeAlias

from bifolio.config import AdapterConfig
from bifolio.engine.executor import ModelRunner
from bifolio.engine.host_memory import free_memory
from bifolio.engine.memory import show_bytes
from bifolio.errors import ConfigError, RequestError, did_you_mean
from bifolio.kernels.interface import Adapter, DeviceSlots, Linear
from bifolio.model.adapters.adapter import AdapterWeights, combined, read_adapter
from bifolio.model.adapters.sites import head_site
from bifolio.model.loaded import LoadedModel

MAX_NAME = 128  # characters
OF_ENDS = (
    "adapters that change the head or the embedding do not run on a GPU: pass device='cpu', or merge the adapter into "
    "the model"
)
AdapterSource: TypeAlias = str | Path | Sequence[tuple[str | Path, float]]  # a path, or a sum of paths with factors
Parts: TypeAlias = tuple[tuple[str, float], ...]


def is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """One version of an adapter, prepared for the kernels of an engine."""

    name: str
    weights: AdapterWeights
    prepared: Adapter
    pooler: Mapping[int, Linear] = field(default_factory=dict)  # its layers of a classifier, prepared

    @property
    def digest(self) -> bytes:
        """Equal for equal changes of the network: a part of the digests of cached blocks."""
        return self.weights.digest


@dataclass(slots=True)
class NamedAdapter:
    """A name, and its adapter while that is in memory."""

    name: str
    number: int  # order of the first load, from 1 on
    parts: Parts
    loaded: LoadedAdapter | None

    @property
    def path(self) -> str:
        return self.parts[0][0] if len(self.parts) == 1 else "+".join(path for path, _ in self.parts)


class AdapterStore:
    """Adapters by name; any thread may call it. The least recently used ones leave memory and are read again on use."""

    def __init__(
        self,
        model: LoadedModel,
        runner: ModelRunner,
        device: DeviceSlots | None,
        config: AdapterConfig,
        refusal: str | None,
    ) -> None:
        """`device`: of the engine's slots. `refusal`: the reason why this engine cannot run adapters."""
        self._base, self._pooler = model.config, model.weights.pooler
        self._kernels, self._device, self._config, self._refusal = runner.kernels, device, config, refusal
        self._peers = runner.peers
        self._named: OrderedDict[str, NamedAdapter] = OrderedDict()  # the least recently used first
        self._sums: OrderedDict[tuple[tuple[bytes, float], ...], LoadedAdapter] = OrderedDict()
        self._numbers = count(1)
        self._table = threading.RLock()
        self._loading = threading.Lock()  # files are read one adapter at a time

    @classmethod
    def of(
        cls, model: LoadedModel, config: AdapterConfig, runner: ModelRunner, device: DeviceSlots | None
    ) -> AdapterStore:
        """The store of an engine. `device`: of the engine's slots."""
        refusal = None
        if runner.peers is not None and not runner.peers.splits_adapters:
            refusal = (
                "adapters (lora_modules) run in one process, or in several on a CPU with deterministic=True: pass "
                "tensor_parallel_size=1"
            )
        return cls(model, runner, device, config, refusal)

    # -- names ----------------------------------------------------------------------------------------------------
    def __contains__(self, name: object) -> bool:
        with self._table:
            return name in self._named

    def all(self) -> list[NamedAdapter]:
        """The known adapters, in the order of their first loads."""
        with self._table:
            return sorted((replace(each) for each in self._named.values()), key=lambda each: each.number)

    def load(self, name: str, source: AdapterSource, *, in_place: bool = False) -> LoadedAdapter:
        """Read an adapter and give it a name; `in_place` replaces the one that has the name."""
        parts = self._checked(name, source)
        with self._loading:
            known = self._find(name)
            if known is not None and not in_place:
                if known.parts == parts:
                    return self._of(known)
                raise RequestError(
                    f"an adapter {name!r} is loaded from {known.path} already: unload it, or replace it with "
                    "load_inplace"
                )
            loaded = self._read(name, parts)
            with self._table:
                number = next(self._numbers) if known is None else known.number
                self._named[name] = NamedAdapter(name, number, parts, loaded)
                self._used(name)
            return loaded

    def unload(self, name: str) -> None:
        """Forget a name; requests that use its adapter keep it to their end."""
        with self._table:
            if self._named.pop(name, None) is None:
                raise self._unknown(name)

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of a name; one that is not in memory, or lies in `lora_dir`, is read first."""
        known = self._find(name)
        if known is not None and known.loaded is not None:
            with self._table:
                if name in self._named:
                    self._used(name)
            return known.loaded
        if known is None:
            return self.load(name, self._in_folder(name))
        with self._loading:
            return self._of(known)

    def in_memory(self, parts: Sequence[tuple[str, float]]) -> LoadedAdapter | None:
        """The one adapter that the parts name, if it is in memory: nothing is read or computed."""
        if len(parts) != 1 or parts[0][1] != 1.0:
            return None
        with self._table:
            known = self._named.get(parts[0][0])
            if known is None or known.loaded is None:
                return None
            self._used(known.name)
            return known.loaded

    def sum(self, parts: Sequence[tuple[str, float]]) -> LoadedAdapter | None:
        """The sum of named adapters with factors; None where every factor is 0."""
        used = [(self.get(name), factor) for name, factor in parts if factor]
        if not used:
            return None
        if len(used) == 1 and used[0][1] == 1.0:
            return used[0][0]
        key = tuple((adapter.digest, factor) for adapter, factor in used)
        with self._loading:
            found = self._sums.get(key)
            if found is None:
                weights = combined([(adapter.weights, factor) for adapter, factor in used])
                name = "+".join(adapter.name for adapter, _ in used)
                found = self._prepared(name, weights)
            self._sums[key] = found
            self._sums.move_to_end(key)
            while len(self._sums) > self._config.max_loras:
                self._sums.popitem(last=False)
        return found

    # -- details --------------------------------------------------------------------------------------------------
    def _checked(self, name: str, source: AdapterSource) -> Parts:
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        if not is_name(name):
            raise RequestError(f"the name of an adapter is a text of 1 to {MAX_NAME} characters, not {name!r}")
        parts = [(source, 1.0)] if isinstance(source, str | Path) else list(source)
        if not parts:
            raise RequestError(f"the adapter {name!r} has no path: pass a folder or a .gguf file")
        return tuple((str(path), float(factor)) for path, factor in parts)

    def _find(self, name: str) -> NamedAdapter | None:
        with self._table:
            known = self._named.get(name)
            return None if known is None else replace(known)

    def _in_folder(self, name: str) -> str:
        folder = self._config.folder
        if folder is not None and is_name(name) and not any(sign in name for sign in "/\\:") and name[0] != ".":
            for path in (Path(folder) / name, Path(folder) / f"{name}.gguf"):
                if path.exists():
                    return str(path)
        raise self._unknown(name)

    def _unknown(self, name: str) -> RequestError:
        known = [each.name for each in self.all()]
        hint = did_you_mean(str(name), known) or (f": known are {', '.join(known)}" if known else ": load it first")
        return RequestError(f"no adapter is called {str(name)[:MAX_NAME]!r}{hint}")

    def _of(self, known: NamedAdapter) -> LoadedAdapter:
        """The adapter of a known name, read again if it has left memory; the caller holds `_loading`."""
        current = self._find(known.name) or known
        loaded = current.loaded or self._read(known.name, current.parts)
        with self._table:
            if known.name in self._named:
                self._named[known.name].loaded = loaded
                self._used(known.name)
        return loaded

    def _read(self, name: str, parts: Parts) -> LoadedAdapter:
        limits = self._base, self._config.max_rank, self._pooler
        read = [(read_adapter(path, *limits), factor) for path, factor in parts]
        return self._prepared(name, combined(read))

    def _prepared(self, name: str, weights: AdapterWeights) -> LoadedAdapter:
        """The adapter in the form of the kernels; one that does not run here, or does not fit, is refused."""
        kernels, adapter = self._kernels, weights.weights
        saved, free = weights.saved.nbytes, free_memory()
        if saved > free:
            raise ConfigError(
                f"the adapter {weights.path} has {show_bytes(saved)} of its own head and embedding, and "
                f"{show_bytes(free)} of memory are free: merge it into the model, or lower max_loras"
            )
        if self._peers is not None:
            prepared = self._peers.prepare_adapter(adapter, kernels)
        elif self._device is None:
            prepared = kernels.prepare_adapter(adapter)
        elif adapter.embedding or head_site(self._base.num_layers) in adapter.products:
            raise ConfigError(OF_ENDS)
        else:
            prepared = self._device.prepare_adapter(adapter)
        pooler = {number: kernels.prepare_linear(own) for number, own in (weights.saved.pooler or {}).items()}
        return LoadedAdapter(name, weights, prepared, pooler)

    def _used(self, name: str) -> None:
        self._named.move_to_end(name)
        in_memory = [each for each in self._named.values() if each.loaded is not None]
        for each in in_memory[: max(len(in_memory) - self._config.max_loras, 0)]:
            each.loaded = None
