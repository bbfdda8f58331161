"""Adapters as the engine uses them: read from files, placed in the network of a base, and summed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import Adapter, ExpertLowRank, Experts, Linear, LowRank
from bifolio.model.adapters.delta import Changes, Delta, check_delta, in_parallel, plain_name, scaled
from bifolio.model.adapters.ends import Ends, SavedEnds, saved_ends
from bifolio.model.adapters.gguf_adapter import read_gguf_adapter
from bifolio.model.adapters.layout import Side, TracedTensor, traced_layers
from bifolio.model.adapters.peft_folder import CONFIG, read_peft
from bifolio.model.adapters.sites import EXPERTS, changed_products, head_site, site_of
from bifolio.model.families import family_of
from bifolio.model.families.family import no_factors
from bifolio.model.model_file import Factors
from bifolio.model.pooler_weights import PoolerWeights

MAX_LORA_RANK = 256  # default
DIGEST_BYTES = 16
READS_IMAGES = re.compile(r"(^|\.)(vision\w*|visual|embed_vision|connector|multi_modal_projector)(\.|$)")
_OF_EXPERT = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """An adapter for one base; equal digests mean equal changes."""

    path: Path
    digest: bytes
    rank: int  # the largest
    num_parameters: int
    weights: Adapter
    saved: SavedEnds

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        low_rank = sum(part.down.nbytes + part.up.nbytes for part in parts_of(self.weights) if part.down is not None)
        return int(low_rank) + self.saved.nbytes


def parts_of(adapter: Adapter) -> Iterable[LowRank]:
    for parts in (*adapter.products.values(), adapter.embedding):
        yield from parts
    for every in adapter.experts.values():
        for own in every:
            yield from (*own.up, *own.down)


def read_adapter(
    path: str | Path, config: ModelConfig, max_rank: int = MAX_LORA_RANK, pooler: PoolerWeights | None = None
) -> AdapterWeights:
    """An adapter for a base of this configuration and these layers behind it: a folder of PEFT, or a GGUF file."""
    path = Path(path).expanduser()
    side: Side = "gguf" if path.suffix.lower() == ".gguf" else "hf"
    if side == "gguf":
        changes = read_gguf_adapter(path, family_of(config).gguf_architectures)
    elif (path / CONFIG).is_file():
        changes = read_peft(path)
    else:
        raise ModelFileError(f"{path} is no adapter: pass a folder with {CONFIG}, or a .gguf file")
    deltas = in_parallel(lambda delta: check_delta(delta, path, max_rank), changes.deltas)
    saved = saved_ends(changes, config, pooler, _beginnings(config, side), path)
    weights = place(deltas, config, side, path, saved, changes.ties)
    if pooler is not None and head_site(config.num_layers) in weights.products:
        raise UnsupportedModelError(
            f"{path} changes the head, and this model compares rows of it to score texts: merge the adapter"
        )
    return AdapterWeights(
        path=path,
        digest=_digest(changes, deltas),
        rank=max((delta.rank for delta in deltas), default=0),
        num_parameters=sum(delta.down.size + delta.up.size for delta in deltas) + saved.size,
        weights=weights,
        saved=saved,
    )


def _digest(changes: Changes, deltas: Sequence[Delta]) -> bytes:
    whole = blake2b(b"tied" if changes.ties else b"", digest_size=DIGEST_BYTES, person=b"bifolio-adapter")
    for part in in_parallel(_digest_of, sorted(deltas, key=lambda delta: delta.name)):
        whole.update(part)
    for name, tensor in sorted(changes.saved.items()):
        whole.update(repr((name, tensor.format.name, tensor.shape)).encode())
        whole.update(np.ascontiguousarray(tensor.data).data)
    return whole.digest()


def _digest_of(delta: Delta) -> bytes:
    digest = blake2b(repr((delta.name, delta.down.dtype.name, delta.down.shape, delta.up.shape)).encode())
    for values in (delta.down, delta.up, delta.bias):
        digest.update(b"" if values is None else np.ascontiguousarray(values).data)
    return digest.digest()


# -- places -----------------------------------------------------------------------------------------------------------
def place(
    deltas: Sequence[Delta], config: ModelConfig, side: Side, path: object, saved: SavedEnds, ties: bool
) -> Adapter:
    """The changes by the sites of the network; an error names a change that has no place."""
    layers, ends = traced_layers(config, side), Ends.of(config, side)
    names: dict[str, TracedTensor] = ends.tensors()

    def note(role: str, linear: Linear) -> Linear:
        names.update({part.name: part for part in linear.parts if isinstance(part, TracedTensor)})
        return linear

    def note_experts(experts: Experts) -> Experts:
        for linear in (*experts.up, *experts.down):
            note(EXPERTS, linear)
        return experts

    for layer in layers:
        changed_products(layer, note, note_experts)
    family, placed = family_of(config), _Placed(path)
    for delta in deltas:
        for each in _resolved(delta, names, _spellings(delta.name, config, side)):
            whole = names.get(each.name)
            if whole is None:
                own = each.name.removesuffix(".weight")
                if READS_IMAGES.search(own):
                    raise UnsupportedModelError(
                        f"{path}: {own!r} belongs to the tower that reads images, which adapters do not change: train "
                        "one with target_modules of the language model alone, or merge it"
                    )
                raise UnsupportedModelError(
                    f"{path}: {own!r} cannot be changed in this {family.name} model: use the adapter's own base, or "
                    "merge it"
                )
            placed.add(each if side == "gguf" else _with_factors(each, config), whole)
    products: dict[int, tuple[LowRank, ...]] = {}
    experts: dict[int, tuple[ExpertLowRank, ...]] = {}
    for number, layer in enumerate(layers):

        def change(role: str, linear: Linear, number: int = number) -> Linear:
            if found := placed.parts(linear):
                products[site_of(number, role)] = found
            return linear

        def change_experts(own: Experts, number: int = number) -> Experts:
            pairs = zip(own.up, own.down, strict=True)
            every = tuple(ExpertLowRank(placed.parts(up), placed.parts(down)) for up, down in pairs)
            if any(each.up or each.down for each in every):
                experts[site_of(number, EXPERTS)] = every
            return own

        changed_products(layer, change, change_experts)
    embedding, head = placed.of(ends.embedding), () if ends.head is None else placed.of(ends.head)
    if ties and config.tie_embeddings and ends.head is not None:
        head = head or embedding  # a row of the table is one of the head
    if head := saved.head_parts() + head:
        products[head_site(len(layers))] = head
    return Adapter(products, experts, saved.embedding_parts() + embedding)


def _beginnings(config: ModelConfig, side: Side) -> tuple[str, ...]:
    """The beginnings of the names of tensors that files can leave out."""
    prefix = family_of(config).hf_names.layer.split("{}")[0].rsplit(".", 2)[0] + "." if side == "hf" else ""
    return prefix, prefix.partition(".")[0] + "."


def folder_factors(config: ModelConfig, name: str) -> Factors | None:
    """Factors of the rows of a folder's matrix: those of the base are in its weights, an adapter of PEFT has none."""
    family = family_of(config)
    if family.folder_factors is not no_factors and not config.weight_factors:
        raise UnsupportedModelError(
            f"the GGUF file of this {family.name} base has factors in its weights that it does not state, and adapters "
            "of PEFT need them: load the base as a folder"
        )
    return family.folder_factors(config, name)


def _with_factors(delta: Delta, config: ModelConfig) -> Delta:
    factors = folder_factors(config, delta.name)
    if factors is None:
        return delta
    bias = None if delta.bias is None else delta.bias * factors
    return replace(delta, up=delta.up * factors[:, None], bias=bias)


class _Placed:
    """The changes by the tensors of the base."""

    def __init__(self, path: object) -> None:
        self._path = path
        self._deltas: dict[str, Delta] = {}

    def add(self, delta: Delta, whole: TracedTensor) -> None:
        if delta.name in self._deltas:
            raise ModelFileError(f"{self._path}: {delta.name!r} is changed under two names: save the adapter again")
        if delta.shape != whole.whole or (delta.bias is not None and len(delta.bias) != whole.whole[-2]):
            raise ModelFileError(
                f"{self._path}: the change of {delta.name!r} has the shape {delta.shape} and the base has "
                f"{tuple(whole.whole)}: use the adapter's own base"
            )
        self._deltas[delta.name] = delta

    def of(self, tensor: TracedTensor) -> tuple[LowRank, ...]:
        return self.parts(Linear((tensor,), (None,)))

    def parts(self, linear: Linear) -> tuple[LowRank, ...]:
        """The changes of a product, at the columns of their rows."""
        found, column = [], 0
        for part in linear.parts:
            delta = self._deltas.get(part.name) if isinstance(part, TracedTensor) else None
            if delta is not None and isinstance(part, TracedTensor):
                found.append(_low_rank(delta, part.rows, column))
            column += int(part.shape[0])
        return tuple(found)


def _low_rank(delta: Delta, rows: np.ndarray, column: int) -> LowRank:
    down, up = delta.down, delta.up
    if up.ndim == 3:
        number = int(rows[0]) // up.shape[1]
        down, up, rows = down[number], up[number], rows - number * up.shape[1]
    bias = None if delta.bias is None else np.ascontiguousarray(delta.bias[rows])
    is_range = bool((np.diff(rows) == 1).all())  # then the rows are a part of the file as it is mapped
    up = up[int(rows[0]) : int(rows[-1]) + 1] if is_range else up[rows]
    return LowRank(column, np.ascontiguousarray(down), np.ascontiguousarray(up), bias)


def _spellings(name: str, config: ModelConfig, side: Side) -> Iterator[str]:
    """The names that a tensor of this name in an adapter can have in the base."""
    plain = plain_name(name)
    found = (name, plain, *(start + plain for start in _beginnings(config, side)))
    yield from found
    if side == "hf":
        for theirs, ours in family_of(config).hf_modules.items():
            yield from (one.replace(theirs, ours, 1) for one in found if theirs in one)


def _resolved(delta: Delta, names: dict[str, TracedTensor], spellings: Iterable[str]) -> list[Delta]:
    """The change under the name of its tensor; that of stacked experts as one of each expert."""
    for spelled in spellings:
        if spelled in names:
            return [replace(delta, name=spelled)]
        if delta.down.ndim == 3 and (found := _of_experts(_whole_stack(delta, names, spelled), names, spelled + ".")):
            return found
    return [delta]


def _whole_stack(delta: Delta, names: dict[str, TracedTensor], prefix: str) -> Delta:
    """The change as a stack of as many matrices as there are experts."""
    if not delta.alternatives:
        return delta
    numbers = {name.removeprefix(prefix + ".").partition(".")[0] for name in names if name.startswith(prefix + ".")}
    return next((one for one in (delta, *delta.alternatives) if len(one.down) == len(numbers)), delta)


def _of_experts(delta: Delta, names: dict[str, TracedTensor], prefix: str) -> list[Delta]:
    """The changes of the matrices of all experts: of gate and up, one behind the other, or of down."""
    own = [name for name in names if name.startswith(prefix + "0.")]
    down = [name for name in own if "down" in name or ".w2." in name]
    for group in ([name for name in own if name not in down], down):
        shapes = [names[name].whole for name in group]
        rows = sum(shape[0] for shape in shapes)
        if not shapes or delta.shape[1:] != (rows, shapes[0][1]):
            continue
        ends = np.cumsum([shape[0] for shape in shapes])[:-1]
        return [
            Delta(name.replace(prefix + "0.", f"{prefix}{number}."), delta.down[number], up)
            for number in range(len(delta.down))
            for name, up in zip(group, np.split(delta.up[number], ends), strict=True)
        ]
    return []


# -- sums -------------------------------------------------------------------------------------------------------------
def combined(parts: Sequence[tuple[AdapterWeights, float]]) -> AdapterWeights:
    """The sum of several adapters of one base, each with a factor."""
    (first, factor), *others = parts
    if not others and factor == 1.0:
        return first
    for adapter, _ in parts:
        if adapter.saved.nbytes:
            raise UnsupportedModelError(
                f"{adapter.path} has a head, an embedding or a classifier of its own, which cannot be scaled or added: "
                "use it alone, with factor 1"
            )
    embedding: tuple[LowRank, ...] = ()
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"bifolio-sum")
    for adapter, scale in parts:
        digest.update(adapter.digest + np.float32(scale).tobytes())
    products: dict[int, tuple[LowRank, ...]] = {}
    experts: dict[int, tuple[ExpertLowRank, ...]] = {}
    for adapter, scale in parts:
        embedding += _scaled(adapter.weights.embedding, scale)
        for site, found in adapter.weights.products.items():
            products[site] = products.get(site, ()) + _scaled(found, scale)
        for site, every in adapter.weights.experts.items():
            known = experts.get(site, (ExpertLowRank(),) * len(every))
            experts[site] = tuple(
                ExpertLowRank(old.up + _scaled(new.up, scale), old.down + _scaled(new.down, scale))
                for old, new in zip(known, every, strict=True)
            )
    return AdapterWeights(
        path=first.path,
        digest=digest.digest(),
        rank=sum(adapter.rank for adapter, _ in parts),
        num_parameters=sum(adapter.num_parameters for adapter, _ in parts),
        weights=Adapter(products, experts, embedding),
        saved=SavedEnds(),
    )


def _scaled(parts: tuple[LowRank, ...], scale: float) -> tuple[LowRank, ...]:
    return tuple(
        replace(part, up=scaled(part.up, scale), bias=None if part.bias is None else scaled(part.bias, scale))
        for part in parts
    )
