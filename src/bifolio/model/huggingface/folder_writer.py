"""A loaded model → a Hugging Face-layout folder with dense weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, UnsupportedModelError
from bifolio.model.export import NamedTensor, named_tensors
from bifolio.model.families import family_of
from bifolio.model.file_access import check_target, make_folder
from bifolio.model.gguf.writer import Progress, WriteReport, WrittenTensor, converted
from bifolio.model.head_order import with_head_order
from bifolio.model.huggingface.config import config_to_hf
from bifolio.model.huggingface.safetensors_file import TensorPlan, write_planned
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import inverse_frequencies
from bifolio.model.world_tokens import END_ID, write_world
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.longest_match import LongestMatchTokenizer

TABULATED = ("longrope", "proportional")  # their frequency divisors are not those of llama3 scaling
NOTHING: Mapping[str, Any] = {}
DENSE = {QuantFormat.F32: "float32", QuantFormat.F16: "float16", QuantFormat.BF16: "bfloat16"}


def write_folder(
    path: str | Path,
    model: LoadedModel,
    format: QuantFormat,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    fields: Mapping[str, Any] = NOTHING,
    tensors: Mapping[str, np.ndarray] = NOTHING,
) -> WriteReport:
    """Write config, weights and tokenizer. The folder appears only when it is complete.

    `fields` of config.json and `tensors` are added to those of the model.
    """
    if format not in DENSE:
        raise ConfigError(f"a folder holds f32, f16 or bf16 weights: write a .gguf file for {format.name.lower()}")
    if not model.config.language_head:
        raise UnsupportedModelError(
            "models without a language head are not written to folders: use the folder as it is, or write a .gguf file"
        )
    path = Path(path)
    config = folder_config(model.config)
    with _atomic_folder(path, overwrite) as folder:
        _write_json(folder / "config.json", {**config_to_hf(config, DENSE[format]), **fields})
        _write_tokenizer(folder, model)
        more = [NamedTensor(name, QuantizedTensor.from_array(value), "matrix") for name, value in tensors.items()]
        written = _write_weights(folder, model, config, format, progress, more)
    return WriteReport(path, written, ())


def folder_config(config: ModelConfig) -> ModelConfig:
    """Convert the configuration to that of a folder: half-split rope, scaling as parameters instead of a table."""
    config = replace(config, architecture=family_of(config).folder_family(config))
    family = family_of(config)
    config = replace(config, rope_interleaved=family.hf_interleaved, norm_offset=family.norm_offset, weight_factors=())
    if config.ropes and config.ropes[0].scaling not in TABULATED and config.ropes[0].frequency_factors:
        config = replace(config, ropes=(llama3_from_factors(config.ropes[0]), *config.ropes[1:]))
    return config


def llama3_from_factors(rope: RopeConfig) -> RopeConfig:
    """Recover the parameters of llama3 scaling from its table of frequency divisors.

    Between the frequencies that are kept and those divided by `factor`, the kept share grows linearly with the
    frequency: share = (original / wavelength - low) / (high - low). With low = 1, which only fixes the unit, a linear
    fit gives the other two.
    """
    divisors = np.array(rope.frequency_factors, np.float64)
    factor = float(divisors.max())
    plain = inverse_frequencies(RopeConfig(rope.theta, rope.rotary_dim))[0].astype(np.float64)
    between = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
    original, high = 8192.0, 4.0  # as in the Llama 3 models
    if between.sum() >= 2:
        share = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, negative = np.polyfit(plain[between] / (2 * np.pi), share, 1)
        high = 1 - 1 / negative
        original = -slope / negative
    result = RopeConfig(
        theta=rope.theta,
        rotary_dim=rope.rotary_dim,
        scaling="llama3",
        factor=factor,
        original_max_position=round(original),
        high_freq_factor=round(float(high), 4),
    )
    if not np.allclose(plain / inverse_frequencies(result)[0], divisors, rtol=1e-3):
        raise UnsupportedModelError("config.json cannot describe the rope frequency divisors of this file")
    return result


def _write_weights(
    folder: Path,
    model: LoadedModel,
    config: ModelConfig,
    format: QuantFormat,
    progress: Progress | None,
    more: Sequence[NamedTensor],
) -> tuple[WrittenTensor, ...]:
    # Reorder query and key rows from the rope layout of the model to that of the folder.
    family = family_of(config)
    weights = with_head_order(model.weights, tiled=False)
    tensors = named_tensors(weights, family.hf_names, interleaved=config.rope_interleaved)
    sources = {source.name: source for source in (*family.folder_tensors(tensors, config), *more)}
    lines: list[WrittenTensor] = []

    def produce(name: str) -> QuantizedTensor:
        source = sources[name]
        tensor = _in_folder_form(config, source, format)
        old = source.tensor
        lines.append(WrittenTensor(name, old.shape, old.format, format, old.nbytes, tensor.nbytes))
        if progress is not None:
            progress(lines[-1])
        return tensor

    plans = [TensorPlan(s.name, format, _folder_shape(config, s)) for s in sources.values()]
    write_planned(folder / "model.safetensors", plans, produce, {"format": "pt"})
    return tuple(lines)


def _lies_transposed(config: ModelConfig, source: NamedTensor) -> bool:
    return family_of(config).hf_names.is_transposed(source.name, source.tensor.shape)


def _folder_shape(config: ModelConfig, source: NamedTensor) -> tuple[int, ...]:
    shape = source.tensor.shape
    return shape[::-1] if _lies_transposed(config, source) else shape


def _in_folder_form(config: ModelConfig, source: NamedTensor, format: QuantFormat) -> QuantizedTensor:
    if source.kind == "norm" and config.norm_offset:
        weight = source.rearranged().dequantize() - np.float32(config.norm_offset)
        source = replace(source, tensor=QuantizedTensor.from_array(weight))
    tensor = converted(source, format)
    return tensor.transposed() if _lies_transposed(config, source) else tensor


def _write_tokenizer(folder: Path, model: LoadedModel) -> None:
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
    settings["model_max_length"] = model.config.max_position
    if model.chat_template is not None:
        settings["chat_template"] = model.chat_template
    if (tokenizer := model.tokenizer) is not None:
        if isinstance(tokenizer, LongestMatchTokenizer):
            write_world(folder, tokenizer)
            settings |= {"tokenizer_class": "RwkvTokenizer", "eos_token": tokenizer.token(END_ID)}
        else:
            (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", settings)
    ends = list(model.config.eos_token_ids)
    generation = {"bos_token_id": model.config.bos_token_id, "eos_token_id": ends} if ends else {}
    _write_json(folder / "generation_config.json", {**generation, **model.generation_config})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_writable(path: Path, overwrite: bool) -> None:
    """Refuse to replace anything but an empty folder or a model folder, to protect data from a mistyped path."""
    if path.exists():
        if not overwrite:
            raise ConfigError(f"{path} exists already: choose another name or pass --force to replace it")
        if not path.is_dir() or (any(path.iterdir()) and not (path / "config.json").is_file()):
            raise ConfigError(f"{path} is not a model folder and will not be replaced: choose another name")
    check_target(path, overwrite)


@contextmanager
def _atomic_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` when the block ends without an error."""
    check_writable(path, overwrite)
    make_folder(path.parent)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
