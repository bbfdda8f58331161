"""Sparse updates of weights: the elements that a training step changed, against the digest of the weights before.

    folder of step n  ┐
                      ├─ write_delta ─▶ step.safetensors ─▶ LLM.load_weights / POST /update_weights
    folder of step n+1┘

For each changed tensor the file holds `NAME.index` (places in C order) and `NAME.value` (elements as in the folder).
Its metadata name the digests of the weights before and after: a delta for other weights is refused, and so is one
whose result differs by a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bifolio.errors import ConfigError
from bifolio.model.digests import model_digest
from bifolio.model.huggingface.hf_loader import folder_tensors, read_json
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loader import load_model
from bifolio.quant.tensor import QuantizedTensor

FORMAT = "bifolio-delta/1"
INDEX, VALUE = ".index", ".value"
Named = Mapping[str, QuantizedTensor]


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """Changed elements by tensor, and the digests of the weights before and after."""

    base: str
    result: str
    changes: Mapping[str, tuple[np.ndarray, np.ndarray]]  # name → i64[n] places, u8[n, bytes] elements

    def applied(self, tensors: Named) -> dict[str, QuantizedTensor]:
        """The changed tensors."""
        found = {}
        for name, (places, elements) in self.changes.items():
            known = tensors.get(name)
            if known is None:
                raise ConfigError(f"the model has no tensor {name!r}: pass a delta between folders of this model")
            rows = _elements(known)
            is_inside = len(places) and 0 <= places.min() <= places.max() < len(rows)
            if elements.shape[1] != rows.shape[1] or not is_inside:
                raise ConfigError(f"the delta of {name} has another shape or type: make it from folders of this model")
            changed = np.array(rows)
            changed[places] = elements
            found[name] = QuantizedTensor(known.format, changed.reshape(known.data.shape), known.shape, known.name)
        return found


def write_delta(old: str | Path, new: str | Path, file: str | Path) -> float:
    """Write the elements that differ between two folders of one network; return their share."""
    before, after = (_tensors(Path(folder)) for folder in (old, new))
    if set(before) != set(after):
        raise ConfigError(f"{old} and {new} have other tensors: a delta is between folders of one model")
    stored: dict[str, np.ndarray | QuantizedTensor] = {}
    num_changed = num_elements = 0
    for name, theirs in after.items():
        ours = before[name]
        if ours.format != theirs.format or ours.shape != theirs.shape:
            raise ConfigError(f"{name} has another type or shape in {new}: a delta is between folders of one model")
        left, right = _elements(ours), _elements(theirs)
        places = np.flatnonzero((left != right).any(axis=1))
        num_changed, num_elements = num_changed + len(places), num_elements + len(right)
        if len(places):
            stored[name + INDEX] = places.astype(np.int64)
            stored[name + VALUE] = QuantizedTensor(theirs.format, right[places].reshape(1, -1), (len(places),), name)
    base, result = (model_digest(load_model(str(folder)), whole=True) for folder in (old, new))
    facts = {"format": FORMAT, "base": base, "result": result}
    write_safetensors(file, stored or {INDEX: np.zeros(0, np.int64)}, facts)
    return num_changed / max(num_elements, 1)


def read_delta(file: Path) -> WeightDelta:
    """A delta from its file, checked."""
    opened = open_safetensors(file)
    facts = opened.metadata
    if facts.get("format") != FORMAT or not {"base", "result"} <= facts.keys():
        raise ConfigError(f"{file} is no delta of the format {FORMAT}: write it with bifolio.write_delta")
    changes = {}
    for name in opened.tensors:
        if name.endswith(INDEX) and name != INDEX:
            plain = name.removesuffix(INDEX)
            if plain + VALUE not in opened.tensors:
                raise ConfigError(f"{file} has no {plain + VALUE}: write the delta again")
            places = np.frombuffer(opened.tensors.bytes_of(name), np.int64)
            elements = _elements(opened.tensors[plain + VALUE])
            if len(places) != len(elements):
                counts = f"{len(places)} places and {len(elements)} values"
                raise ConfigError(f"{file} has {counts} of {plain}: write it again")
            changes[plain] = (places, elements)
    return WeightDelta(facts["base"], facts["result"], changes)


def _tensors(folder: Path) -> Named:
    return folder_tensors(folder, read_json(folder / "config.json"))


def _elements(tensor: QuantizedTensor) -> np.ndarray:
    """u8[n, bytes]: the elements of a dense tensor."""
    size = tensor.format.row_bytes(1) if tensor.format.block_elements == 1 else 0
    if not size:
        raise ConfigError(f"{tensor.name} is quantised: a delta is between folders of dense weights")
    return tensor.data.reshape(-1, size)
