"""Digests of a model and of the arithmetic that computes it: equal ones mean equal answers, bit for bit.

`model_digest` covers the configuration and every weight: matrices, norms, biases and the constants of recurrences. It
reads the beginning, the middle and the end of each array, or with `whole=True` all bytes (about a second per GB).
`numerics` lists all else that influences results: version and build, kernel set, instruction set or device, rounding
of activations, types of weights and cache, ranks, and whether results depend on the rest of the batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from bifolio.config import EngineConfig
from bifolio.kernels.interface import KernelSet
from bifolio.model.loaded import LoadedModel
from bifolio.quant.mapped import release_pages
from bifolio.quant.tensor import QuantizedTensor

DIGEST_BYTES = 16
SAMPLE_BYTES = 4096  # of each of the three places of an array
SKIPPED_FIELDS = frozenset({"prepared", "prepared_for", "config"})  # made from the others; the configuration has a line


def model_digest(model: LoadedModel, *, whole: bool = False) -> str:
    """A digest of the configuration and the weights as loaded; `whole` reads every byte of them."""
    with ThreadPoolExecutor(thread_name_prefix="bifolio-digest") as pool:  # hashing releases the interpreter lock
        parts = pool.map(lambda item: _array_digest(item[0], item[1], whole), _arrays(model.weights, "weights"))
        total = blake2b(repr(sorted(asdict(model.config).items())).encode(), digest_size=DIGEST_BYTES)
        for part in parts:
            total.update(part)
    return ("" if whole else "sampled-") + total.hexdigest()


def numerics(model: LoadedModel, kernels: KernelSet, config: EngineConfig) -> dict[str, Any]:
    """The facts that decide on the bits of a result beside the model and the request, for people and for JSON."""
    return {
        "bifolio": _version(),
        "kernels": kernels.name,
        "device": kernels.device.partition(":")[0],
        "deterministic": bool(kernels.deterministic and config.deterministic),
        "activation_planes": kernels.activation_planes,
        "weights": sorted({str(one.name) for one in model.weights.formats()}),
        "dense": kernels.kv_dtype,  # of a GPU, whose cache has the type of the weights by default
        "kv_dtype": config.cache.dtype,
        "ranks": 1 if kernels.ranks is None else kernels.ranks.size,
        "build": kernels.build_facts(),
    }


def numerics_digest(model: LoadedModel, kernels: KernelSet, config: EngineConfig) -> str:
    """A digest of `numerics`."""
    return digest_of_facts(numerics(model, kernels, config))


class EngineDigests:
    """The digests of an engine's model and arithmetic, computed once for each model that it has."""

    def __init__(self, kernels: KernelSet, config: EngineConfig) -> None:
        self._kernels, self._config = kernels, config
        self._model: LoadedModel | None = None
        self._found = ("", "")

    def of(self, model: LoadedModel) -> tuple[str, str]:
        """(Sampled digest of the model, digest of the arithmetic)."""
        if self._model is not model:
            self._found = model_digest(model), numerics_digest(model, self._kernels, self._config)
            self._model = model
        return self._found


def digest_of_facts(facts: Any) -> str:
    """A digest of a JSON value, the same for every order of its keys."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()


def _arrays(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every array under a value with its place, in the order of the fields."""
    if isinstance(value, QuantizedTensor | np.ndarray) or hasattr(value, "detach"):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in SKIPPED_FIELDS:
                yield from _arrays(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _arrays(item, f"{name}.{number}")
    elif value is not None:
        yield f"{name}={value!r}", np.empty(0, np.uint8)


def _array_digest(name: str, value: Any, whole: bool) -> bytes:
    kind, stored = _bytes_of(value)
    digest = blake2b(f"{name} {kind}".encode(), digest_size=DIGEST_BYTES)
    if whole or stored.nbytes <= 3 * SAMPLE_BYTES:
        stored = stored if isinstance(stored, np.ndarray) else stored.cpu().numpy()
        digest.update(np.ascontiguousarray(stored).data)
        release_pages(stored)
        return digest.digest()
    rows, width = stored.shape[0], max(stored.nbytes // stored.shape[0], 1)
    count = min(-(-SAMPLE_BYTES // width), rows)
    for start in (0, (rows - count) // 2, rows - count):
        part = stored[start : start + count]
        part = part if isinstance(part, np.ndarray) else part.cpu().numpy()
        digest.update(np.ascontiguousarray(part).tobytes()[:SAMPLE_BYTES])
    return digest.digest()


def _bytes_of(value: Any) -> tuple[str, Any]:
    """The type and shape of an array, and its bytes as an array of rows; those of a tensor on its device."""
    if isinstance(value, QuantizedTensor):
        return f"{value.format.name} {value.shape}", value.stored
    if not isinstance(value, np.ndarray):  # a torch tensor: numpy has no bfloat16, so its bytes are read
        import torch

        kind = f"{value.dtype} {tuple(value.shape)}"
        return kind, value.detach().contiguous().flatten().view(torch.uint8)
    return f"{value.dtype} {value.shape}", np.ascontiguousarray(value).reshape(-1).view(np.uint8)


@cache
def _version() -> str:
    try:
        return version("bifolio")
    except PackageNotFoundError:
        return "unknown"
