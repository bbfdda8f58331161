"""Low-rank adapters on a device: packed on the host, copied to it when a step first uses them, dropped by age.

    host     |down of part 0|up of part 0|bias|down of part 1| ...     one pinned array for each adapter
    device   the same array, and its row of the table: places and ranks, where captured steps find them

Steps read the table, so an adapter can come and go between two launches of a captured step. Copies run on a stream of
their own; the step that needs the adapter waits for its copy on the device, and steps before it do not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter, AdapterUse, LowRank, ProductShape
from bifolio.kernels.torch_arrays import upload
from bifolio.kernels.triton.adapter_changes import NO_BIAS, RANKS
from bifolio.kernels.triton.adapters import FEWEST_ROWS, MANY_ROWS, MOST_ROWS, GroupedRows, ProductPlan

NO_ADAPTER = -1
ALIGNMENT = 64  # elements of an array, to which matrices are aligned
UNCHANGED = (0, 0, NO_BIAS, 0)  # entry of a part that an adapter does not change
OF_EXPERTS = "adapters of experts do not run on a GPU: pass device='cpu', or merge the adapter into the model"


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """The matrices of an adapter in one array on the host."""

    values: torch.Tensor  # pinned where the device is a GPU
    entries: np.ndarray  # i64[entries, 4]  as the table, places counted from the first value
    width: int  # its largest rank, a power of two
    sites: frozenset[int]  # products that it changes


class Layout(NamedTuple):
    """The adapters that a captured step serves: those that change these products, up to this rank."""

    sites: frozenset[int]
    width: int


@dataclass(frozen=True, slots=True)
class StagedAdapters:
    """The adapters of one pass on the device (`AdapterUse.staged`)."""

    plans: Mapping[int, ProductPlan]  # of the products that adapters change
    grouped: GroupedRows
    words: torch.Tensor  # i32  the grouping, which `grouped` views

    @property
    def use(self) -> AdapterUse:
        """As a part of a captured batch."""
        return AdapterUse((), np.zeros(0, np.int32), self)

    def put(self, words: torch.Tensor) -> None:
        """Set the grouping of a captured step's rows."""
        self.words.copy_(words)


class AdapterSlots:
    """The adapters of an engine on its device."""

    def __init__(
        self,
        products: Mapping[int, ProductShape],
        device: str,
        dtype: torch.dtype,
        *,
        most_in_batch: int,
        most_idle: int,
        fixed: bool,
    ) -> None:
        """`most_idle`: adapters that stay on the device while no step uses them. `fixed`: tiles are of one size."""
        self._device, self._dtype, self._fixed = device, dtype, fixed
        self._capacity, self._most = most_in_batch + most_idle, most_idle
        self._plans, first = {}, 0
        for site, shape in products.items():
            self._plans[site] = ProductPlan.of(first, shape.widths, shape.inputs, device)
            first += len(shape.widths)
        self._base = torch.zeros(ALIGNMENT, dtype=dtype, device=device)
        self._table = torch.tensor(UNCHANGED).repeat(self._capacity, max(first, 1), 1).to(device)
        self._held: OrderedDict[PackedAdapter, tuple[int, torch.Tensor]] = OrderedDict()  # oldest use first
        self._free = list(range(self._capacity))
        self._lock = threading.Lock()  # of `layout`, which grows on the threads that load adapters
        self.layout = Layout(frozenset(), RANKS)
        self.version = 0  # counts the changes of places
        cuda: Any = torch.cuda
        self._copies: Any = cuda.Stream(device) if device.startswith("cuda") else None

    # -- on the host ---------------------------------------------------------------------------------------------------
    def prepare(self, adapter: Adapter) -> Adapter:
        """The adapter with its matrices in one array; any thread may call this."""
        if adapter.experts:
            raise ConfigError(OF_EXPERTS)
        missing = sorted(set(adapter.products) - set(self._plans))
        if missing:
            raise ConfigError(
                f"the adapter changes the product of site {missing[0]}, which a GPU computes as one with its experts: "
                "pass device='cpu', or merge the adapter into the model"
            )
        packed = self._packed(adapter.products)
        with self._lock:
            sites = self.layout.sites | packed.sites
            self.layout = Layout(sites, max(self.layout.width, packed.width))
        return replace(adapter, products={}, prepared=packed)

    def _packed(self, products: Mapping[int, Sequence[LowRank]]) -> PackedAdapter:
        pieces, end, width = [], 0, RANKS
        entries = np.array(UNCHANGED, dtype=np.int64)[None].repeat(self._table.shape[1], axis=0)
        for site, parts in products.items():
            plan, column = self._plans[site], 0
            for number, outputs in enumerate(plan.widths):
                piece = Piece.of(parts, column, outputs, end)
                column += outputs
                if piece is not None:
                    pieces.append(piece)
                    entries[plan.first_entry + number] = piece.down, piece.up, piece.bias, piece.rank
                    end, width = piece.end, max(width, 1 << (piece.rank - 1).bit_length())
        values = torch.empty(end, dtype=self._dtype, pin_memory=self._copies is not None)
        with ThreadPoolExecutor(thread_name_prefix="bifolio-adapter") as pool:
            list(pool.map(lambda piece: piece.write(values), pieces))
        return PackedAdapter(values, entries, width, frozenset(products))

    # -- on the device -------------------------------------------------------------------------------------------------
    def numbers_of(self, adapters: Sequence[Adapter | None]) -> np.ndarray:
        """i32[n]: the place of each adapter in the table; missing ones are on their way to it."""
        wanted = {adapter.prepared: None for adapter in adapters if adapter is not None}
        self._use(wanted)
        places = {packed: self._held[packed][0] for packed in wanted}
        return np.array([NO_ADAPTER if one is None else places[one.prepared] for one in adapters], dtype=np.int32)

    def _use(self, wanted: Iterable[PackedAdapter]) -> None:
        for packed in wanted:
            if packed in self._held:
                self._held.move_to_end(packed)
        missing = [packed for packed in wanted if packed not in self._held]
        if not missing:
            return
        self.version += 1
        used = set(wanted)
        too_many = max(len(self._held) + len(missing) - self._most, 0)
        for packed in [each for each in self._held if each not in used][:too_many]:
            self._drop(packed)
        for packed in missing:
            self._take(packed)

    def _take(self, packed: PackedAdapter) -> None:
        """Copy an adapter to the device; passes that are launched from now on can use it."""
        place = self._free.pop()
        try:
            values = self._copied(packed.values)
        except BaseException:
            self._free.append(place)
            raise
        self._held[packed] = place, values
        offset = (values.data_ptr() - self._base.data_ptr()) // values.element_size()
        entries = packed.entries.copy()
        entries[:, :2] += np.where(entries[:, 3:] > 0, offset, 0)
        entries[:, 2] += np.where(entries[:, 2] != NO_BIAS, offset, 0)
        self._table[place].copy_(upload(entries, self._device))

    def _copied(self, values: torch.Tensor) -> torch.Tensor:
        if self._copies is None:
            return values
        cuda: Any = torch.cuda
        running = cuda.current_stream(self._device)
        with cuda.stream(self._copies):
            copy = values.to(self._device, non_blocking=True)
            event = cuda.Event()
            event.record()
        running.wait_event(event)
        copy.record_stream(running)  # its memory is free when the steps that read it are complete
        return copy

    def _drop(self, packed: PackedAdapter) -> None:
        place, _ = self._held.pop(packed)
        self._free.append(place)

    # -- passes --------------------------------------------------------------------------------------------------------
    def staged(self, size: int) -> StagedAdapters:
        """The adapters of a captured step with `size` rows; none of them has one yet."""
        words = upload(self.words(np.zeros(0, np.int32), size), self._device)
        return self._of_words(words, size, self._rows_of_tile(size))

    def words(self, numbers: np.ndarray, size: int) -> np.ndarray:
        """i32: the grouping of rows with these adapters in a captured step with `size` rows."""
        padded: np.ndarray = np.full(size, NO_ADAPTER, dtype=np.int32)
        padded[: len(numbers)] = numbers
        order, tiles, groups, members = grouped_rows(padded, self._rows_of_tile(size))
        unused = self._num_tiles(size) - tiles.shape[1]
        tiles = np.pad(tiles, ((0, 0), (0, unused)))
        tiles[0, tiles.shape[1] - unused :] = NO_ADAPTER
        return np.concatenate([order, groups, members, tiles.reshape(-1)])

    def stage(self, use: AdapterUse) -> AdapterUse:
        """The adapters of a pass that is launched kernel by kernel."""
        rows = self._rows_of_tile(len(use.rows))
        order, tiles, groups, members = grouped_rows(self.numbers_of_rows(use), rows)
        words = upload(np.concatenate([order, groups, members, tiles.reshape(-1)]), self._device)
        return replace(use, staged=self._of_words(words, len(order), rows))

    def numbers_of_rows(self, use: AdapterUse) -> np.ndarray:
        """i32[t]: the place of each row's adapter in the table."""
        return np.append(self.numbers_of(use.loaded), np.int32(NO_ADAPTER))[use.rows]

    def _of_words(self, words: torch.Tensor, size: int, rows: int) -> StagedAdapters:
        layout, groups, members, tiles = self.layout, words[size:], words[2 * size + 1 :], words[3 * size + 1 :]
        grouped = GroupedRows(
            self._base, self._table, words[:size], tiles.view(3, -1), groups[: size + 1], members[:size],
            layout.width, rows,
        )  # fmt: skip
        return StagedAdapters({site: self._plans[site] for site in layout.sites}, grouped, words)

    def _rows_of_tile(self, size: int) -> int:
        return MOST_ROWS if size >= MANY_ROWS and not self._fixed else FEWEST_ROWS

    def _num_tiles(self, size: int) -> int:
        """Tiles of any grouping of `size` rows."""
        groups = min(size, self._capacity + 1)
        return min(size, size // self._rows_of_tile(size) + groups)


class Piece(NamedTuple):
    """The change of one part of a product, and its places in the array of the adapter."""

    sources: Sequence[LowRank]  # their ranks follow each other
    column: int  # first column of the part in the product
    outputs: int
    inputs: int
    rank: int  # a multiple of `RANKS`; ranks behind those of the sources are zeros
    down: int
    up: int
    bias: int
    end: int

    @classmethod
    def of(cls, parts: Sequence[LowRank], column: int, outputs: int, begin: int) -> Piece | None:
        """The changes of these columns, if there are any, from a place in the array on."""
        own = [part for part in parts if part.column < column + outputs and part.column + len(part.up) > column]
        if not own:
            return None
        inputs, rank = own[0].down.shape[1], sum(len(part.down) for part in own)
        rank += -rank % RANKS
        up = begin + _aligned(rank * inputs)
        end = bias = up + _aligned(outputs * rank)
        if any(part.bias is not None for part in own):
            return cls(own, column, outputs, inputs, rank, begin, up, bias, end + _aligned(outputs))
        return cls(own, column, outputs, inputs, rank, begin, up, NO_BIAS, end)

    def write(self, values: torch.Tensor) -> None:
        down = values[self.down :][: self.rank * self.inputs].view(self.rank, self.inputs)
        up = values[self.up :][: self.outputs * self.rank].view(self.outputs, self.rank).zero_()
        bias, first = np.zeros(self.outputs, dtype=np.float32), 0
        for part in self.sources:
            begin = max(part.column, self.column)
            end = min(part.column + len(part.up), self.column + self.outputs)
            ranks, here = slice(first, first + len(part.down)), slice(begin - self.column, end - self.column)
            there = slice(begin - part.column, end - part.column)
            down[ranks].copy_(_tensor(part.down))
            up[here, ranks].copy_(_tensor(part.up[there]))
            if part.bias is not None:
                bias[here] += part.bias[there]
            first = ranks.stop
        down[first:].zero_()
        if self.bias != NO_BIAS:
            values[self.bias :][: self.outputs].copy_(torch.from_numpy(bias))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The numbers of an array, which may be mapped from a file."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def grouped_rows(numbers: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(order, tiles, groups, members) of rows with these adapters; see `kernels.triton.adapters`."""
    order = np.argsort(numbers, kind="stable").astype(np.int32)
    sorted_numbers = numbers[order]
    starts = np.flatnonzero(np.diff(sorted_numbers, prepend=sorted_numbers[:1] - 1))
    counts = np.diff(starts, append=len(numbers))
    pieces = -(-counts // rows)
    group = np.repeat(np.arange(len(starts)), pieces)
    behind = (np.arange(len(group)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * rows
    tiles = np.stack([sorted_numbers[starts[group]], starts[group] + behind, np.minimum(counts[group] - behind, rows)])
    adapters = np.unique(numbers[numbers != NO_ADAPTER])
    groups: np.ndarray = np.full(len(numbers) + 1, NO_ADAPTER, dtype=np.int32)
    groups[: len(adapters)], groups[-1] = adapters, len(adapters)
    members = np.where(numbers == NO_ADAPTER, NO_ADAPTER, np.searchsorted(adapters, numbers)).astype(np.int32)
    return order, tiles.astype(np.int32), groups, members
