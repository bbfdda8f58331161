"""Adapters of several ranks: rank 0 cuts them, and each other rank reads its part from a file, once, and deletes it."""

from __future__ import annotations

import itertools
import json
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.engine.parallel.commands import Command, Kind
from bifolio.kernels.interface import Adapter, ExpertLowRank, KernelSet, LowRank
from bifolio.model.adapters.rank_parts import RankRows, rank_part, rows_of_ranks
from bifolio.model.weights import ModelWeights

HEADER = "header"
Place = list[Any]  # where a change belongs: a site; or a site, the number of an expert, and 0 (up) or 1 (down)


def file_of(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-{rank}.npz"


def write_part(path: Path, adapter: Adapter) -> None:
    """Write the changes of a rank."""
    places: list[Place] = []
    arrays: dict[str, np.ndarray] = {}

    def put(part: LowRank, *place: int) -> None:
        number = len(places)
        places.append([part.column, *place])
        for name in ("down", "up", "bias"):
            if (value := getattr(part, name)) is not None:
                arrays[f"{number}-{name}"] = np.asarray(value)

    for site, parts in adapter.products.items():
        for part in parts:
            put(part, site)
    for site, experts in adapter.experts.items():
        for number, sides in enumerate(experts):
            for side, parts in enumerate(sides):
                for part in parts:
                    put(part, site, number, side)
    counts = {site: len(experts) for site, experts in adapter.experts.items()}
    header = np.frombuffer(json.dumps([places, list(counts.items())]).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **{HEADER: header}, **arrays)  # type: ignore[arg-type]


def read_part(path: Path) -> Adapter:
    """Read a file of `write_part`, and delete it."""
    with np.load(path, allow_pickle=False) as file:
        places, counts = json.loads(file[HEADER].tobytes())
        arrays = {name: file[name] for name in file.files if name != HEADER}
    path.unlink()
    products: dict[int, tuple[LowRank, ...]] = {}
    experts = {site: [ExpertLowRank()] * count for site, count in counts}
    for index, (column, site, *expert) in enumerate(places):
        down, up, bias = (arrays.get(f"{index}-{name}") for name in ("down", "up", "bias"))
        part = LowRank(column, down, up, bias)
        if not expert:
            products[site] = (*products.get(site, ()), part)
            continue
        number, side = expert
        own = list(experts[site][number])
        own[side] = (*own[side], part)
        experts[site][number] = ExpertLowRank(*own)
    return Adapter(products, {site: tuple(each) for site, each in experts.items()})


class RankAdapters:
    """The adapters of all ranks: rank 0 cuts them, and leaves the parts of the others in files."""

    def __init__(self, size: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bifolio-adapters-"))
        self._size, self._rows, self._num_layers = size, list[RankRows](), 0
        self._next = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._new, self._dropped = deque[int](), deque[int]()  # numbers that the other ranks are to be told

    @property
    def is_split(self) -> bool:
        return bool(self._rows)

    def split(self, weights: ModelWeights) -> None:
        self._rows, self._num_layers = rows_of_ranks(weights, self._size), len(weights.layers)

    def prepare(self, adapter: Adapter, kernels: KernelSet) -> Adapter:
        parts = [rank_part(adapter, rows, self._num_layers) for rows in self._rows]
        prepared, number = kernels.prepare_adapter(parts[0]), next(self._next)
        for rank, part in enumerate(parts[1:], start=1):
            write_part(file_of(self.folder, number, rank), part)
        self._numbers[prepared] = number
        self._new.append(number)
        weakref.finalize(prepared, self._dropped.append, number)
        return prepared

    def number_of(self, prepared: Adapter) -> int:
        return self._numbers[prepared]

    def commands(self) -> Iterator[Command]:
        """Those that tell the other ranks of new adapters, and of those that no request holds any more."""
        while self._new:
            yield Command(Kind.ADAPTER, (self._new.popleft(),))
        if self._dropped:
            yield Command(Kind.DROP_ADAPTERS, tuple(self._dropped.popleft() for _ in range(len(self._dropped))))
