"""A loaded model → a GGUF file, readable by bifolio and other programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.config import PoolingConfig
from bifolio.errors import ModelFileError
from bifolio.kernels.cpu import SEARCHED_FORMATS, encoded, quickly_converted
from bifolio.model.export import NamedTensor, named_tensors
from bifolio.model.families import family_of
from bifolio.model.file_access import atomic_path
from bifolio.model.gguf.metadata import gguf_architecture, model_metadata
from bifolio.model.gguf.mixes import MIXES, Mix
from bifolio.model.gguf.pooling import head_tensors, pooling_entries, template_entries
from bifolio.model.gguf.reader import StringArray, Value
from bifolio.model.gguf.rope_fields import rope_tensors
from bifolio.model.gguf.sampling import sampling_entries
from bifolio.model.gguf.split import open_whole_gguf
from bifolio.model.gguf.vocabulary import tokenizer_metadata
from bifolio.model.head_order import with_head_order
from bifolio.model.loaded import LoadedModel
from bifolio.quant.formats import QuantFormat, refuse_non_finite
from bifolio.quant.tensor import PANEL_ROWS, QuantizedTensor

# Metadata that is copied unchanged from a source GGUF file.
_COPIED = ("tokenizer.",)
_COPIED_GENERAL = (
    "name", "basename", "author", "organization", "license", "description", "languages", "tags", "size_label", "url"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One line of the report."""

    name: str
    shape: tuple[int, ...]
    old_format: QuantFormat
    new_format: QuantFormat
    old_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class WriteReport:
    """The written tensors, and notes on decisions of the writer."""

    path: Path
    tensors: tuple[WrittenTensor, ...]
    notes: tuple[str, ...]

    @property
    def old_bytes(self) -> int:
        return sum(tensor.old_bytes for tensor in self.tensors)

    @property
    def new_bytes(self) -> int:
        return sum(tensor.new_bytes for tensor in self.tensors)


Progress = Callable[[WrittenTensor], None]
Importance = Mapping[str, NDArray[np.float32]]


def write_gguf(
    path: str | Path,
    model: LoadedModel,
    format: QuantFormat | Mix,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    extra: Mapping[str, Value] | None = None,
    importance: Importance | None = None,
) -> WriteReport:
    """Write the model with its matrices in `format`. The file appears only when it is complete.

    `extra` metadata, such as `general.license`, is written unchanged. `importance` weighs the errors of columns, by the
    name of a matrix (`bifolio imatrix`).
    """
    import gguf

    path = Path(path)
    config = model.config
    family = family_of(config)
    interleaved = family.gguf_interleaved or config.rope_interleaved
    mix = format if isinstance(format, Mix) else MIXES[format.name.lower()]
    importance = importance or {}
    entries, notes = _metadata(model, mix)
    entries |= {**family.gguf_entries(model.weights), **(extra or {})}
    weights = with_head_order(model.weights, tiled=family.gguf_tiled)
    tensors = named_tensors(weights, family.gguf_names, interleaved=interleaved)
    sources = [*family.gguf_tensors(tensors, config), *head_tensors(model.pooling, weights.pooler)]
    sources += [NamedTensor(name, tensor, "norm") for name, tensor in rope_tensors(config).items()]
    targets = [(source, mix.format_of(source, config, has_importance=bool(importance))) for source in sources]
    notes += _format_notes(targets, mix)
    logging.getLogger("gguf").setLevel(logging.ERROR)  # it logs every file that it writes
    size = sum(target.bytes_for(source.tensor.shape) for source, target in targets)
    with atomic_path(path, overwrite=overwrite, size=size) as temporary:
        writer = gguf.GGUFWriter(temporary, gguf_architecture(config))
        try:
            for key, value in entries.items():
                _add_entry(writer, key, value)
            for source, target in targets:
                byte_shape = (*source.tensor.shape[:-1], target.row_bytes(source.tensor.shape[-1]))
                kind = gguf.GGMLQuantizationType(target.ggml_type)
                writer.add_tensor_info(
                    source.name, byte_shape, np.dtype(np.uint8), target.bytes_for(source.tensor.shape), kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            written = tuple(_write_tensor(writer, source, target, importance, progress) for source, target in targets)
        finally:
            writer.close()
    return WriteReport(path, written, tuple(notes))


def converted(
    source: NamedTensor, format: QuantFormat, importance: NDArray[np.float32] | None = None
) -> QuantizedTensor:
    """Convert a tensor for the file; an error names the tensor if its values exceed the range of the format."""
    if format in SEARCHED_FORMATS:
        return encoded(source.rearranged(), format, source.name, importance)
    if format is QuantFormat.I32:
        return source.rearranged()
    tensor = quickly_converted(source.rearranged(), format, source.name)
    if format in (QuantFormat.F32, QuantFormat.BF16):
        for start in range(0, tensor.num_rows, PANEL_ROWS):
            refuse_non_finite(tensor.dequantize_rows(slice(start, start + PANEL_ROWS)), source.name)
        return tensor
    columns = 2 if format is QuantFormat.F16 else format.block_bytes
    halves = tensor.data.reshape(-1, columns)[:, :2].copy().view(np.float16)
    if not np.isfinite(halves).all():
        raise ModelFileError(f"{source.name} holds values too large for {format.name}: use f32 or bf16")
    return tensor


def _write_tensor(
    writer: Any, source: NamedTensor, format: QuantFormat, importance: Importance, progress: Progress | None
) -> WrittenTensor:
    tensor = converted(source, format, importance.get(source.name))
    writer.write_tensor_data(tensor.data)
    old = source.tensor
    line = WrittenTensor(source.name, old.shape, old.format, format, old.nbytes, tensor.nbytes)
    if progress is not None:
        progress(line)
    return line


def _format_notes(targets: list[tuple[NamedTensor, QuantFormat]], mix: Mix) -> list[str]:
    """Matrices whose rows cannot be cut into the blocks of a format."""
    notes = []
    matrices = [(source.name, target) for source, target in targets if source.kind == "matrix"]
    dense = [name for name, target in matrices if target is QuantFormat.F16 and mix.format is not QuantFormat.F16]
    if dense:
        notes.append(
            f"{len(dense)} matrices stay in F16 because their rows are no multiple of 32 values (e.g. {dense[0]})"
        )
    short = [
        name
        for name, target in matrices
        if not mix.is_plain and target.block_elements == 32 != mix.format.block_elements
    ]
    if short:
        notes.append(
            f"{len(short)} matrices have blocks of 32 because their rows are no multiple of 256 (e.g. {short[0]})"
        )
    return notes


def _metadata(model: LoadedModel, mix: Mix) -> tuple[dict[str, Value], list[str]]:
    entries = model_metadata(model.config, mix.file_type, model.path.stem) | sampling_entries(model.generation_config)
    notes: list[str] = []
    if model.path.suffix.lower() == ".gguf":
        entries |= _copied_entries(open_whole_gguf(model.path).metadata)
    elif (tokenizer := model.tokenizer) is not None:
        tokens, notes = tokenizer_metadata(tokenizer, model.config, model.special_tokens)
        entries |= tokens
    else:
        entries["tokenizer.ggml.model"] = "no_vocab"
    if model.chat_template is not None:
        entries["tokenizer.chat_template"] = model.chat_template
    if not model.config.language_head or model.pooling != PoolingConfig():
        own = pooling_entries(model.pooling)
        entries |= {f"{gguf_architecture(model.config)}.{name}": value for name, value in own.items()}
        entries |= template_entries(model.pair_template)
        notes += _lost_settings(model)
    return entries, notes


def _lost_settings(model: LoadedModel) -> list[str]:
    """Settings of sentence encoders for which files have no entries."""
    pooling = model.pooling
    lost = {
        "prompts": bool(pooling.prompts) and model.pair_template is None,
        "the length of texts": pooling.max_length is not None,
        "vectors without normalisation": not pooling.normalize and pooling.head is None,
    }  # fmt: skip
    found = [name for name, is_lost in lost.items() if is_lost]
    return [f"GGUF files have no entries for {', '.join(found)}: pass them with requests"] if found else []


def _copied_entries(metadata: Mapping[str, Value]) -> dict[str, Value]:
    general = {f"general.{name}" for name in _COPIED_GENERAL}
    return {
        key: list(value) if isinstance(value, StringArray) else value
        for key, value in metadata.items()
        if key.startswith(_COPIED) or key in general
    }


def _add_entry(writer: Any, key: str, value: Value) -> None:
    """Write numbers with the types that other programs expect."""
    import gguf

    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        writer.add_key_value(key, value, kinds.BOOL)
    elif isinstance(value, int):
        writer.add_key_value(key, value, kinds.UINT32 if 0 <= value < 1 << 32 else kinds.INT64)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kinds.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kinds.STRING)
    elif isinstance(value, np.ndarray):
        if value.size:
            writer.add_key_value(key, value.tolist(), kinds.ARRAY, kinds[_ARRAY_KINDS[value.dtype.name]])
    elif len(value):
        writer.add_key_value(key, list(value), kinds.ARRAY, kinds.STRING)


_ARRAY_KINDS = {f"{sign}int{bits}": f"{sign}int{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)}
_ARRAY_KINDS |= {"float32": "FLOAT32", "float64": "FLOAT64", "bool": "BOOL"}
