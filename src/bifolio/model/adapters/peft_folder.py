"""Adapters of PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors`.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, r]
    base_model.model.model.layers.0.mlp.experts.lora_A.weight        [count * r, in]   of a stack of matrices
    base_model.model.model.layers.0.mlp.experts.lora_B.weight        [out, r * count]  rank by rank
    base_model.model.model.embed_tokens.lora_embedding_A             [r, vocab]
    base_model.model.model.embed_tokens.lora_embedding_B             [d, r]
    base_model.model.lm_head.weight                                  [vocab, d]        in place of the base's
    base_model.model.lm_head.base_layer.weight                       [vocab, d]        a copy of the base's, not read

The tensors decide which modules are changed; the configuration must agree, and gives the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.adapters.delta import Changes, Delta, Matrix, in_parallel
from bifolio.model.huggingface.hf_loader import read_json
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
REFUSED = {
    "use_dora": "DoRA, which also scales every column of the base",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "trainable_token_indices": "changed rows of the embedding",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA, which begins at certain tokens",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that need another base
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.(?P<kind>weight|bias)")
_OF_TABLE = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<side>[AB])(\.default)?")
_WHOLE = re.compile(r"(?P<module>.+?)(?P<copy>\.base_layer)?(\.modules_to_save(\.default)?)?\.(?P<kind>weight|bias)")
MAX_PATTERN, MAX_NAME, MAX_REPEATS = 2000, 512, 2
WHOLE, COPY = ("whole weight", "whole bias"), "copy of weight"
TIED = "lm_head"  # a target beside the embedding that target_modules names


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of `adapter_config.json` that change results."""

    path: Path
    rank: int
    alpha: float
    by_root: bool  # use_rslora: the scale is alpha / sqrt(r)
    ranks: Mapping[str, int]  # by pattern
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...]
    parameters: tuple[str, ...]  # target_parameters: with the name of the parameter behind that of its module
    has_bias: bool
    saved: tuple[str, ...]  # modules_to_save
    ties: bool  # ensure_weight_tying: changes of the embedding are those of a tied head

    def scale(self, module: str, rank: int) -> float:
        """The factor of the change of a module, whose matrices have this rank."""
        stated = next((value for key, value in self.ranks.items() if ends_with(key, module, self.path)), self.rank)
        if stated != rank:
            raise ModelFileError(
                f"{self.path}: the matrices of {module!r} have rank {rank} where the configuration says {stated}: "
                "the files do not belong together"
            )
        return self.scale_of(rank, self.alpha_of(module))

    def alpha_of(self, module: str) -> float:
        return next((value for key, value in self.alphas.items() if ends_with(key, module, self.path)), self.alpha)

    def scale_of(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def check_target(self, module: str) -> None:
        """Raise unless the module is one of `target_modules`."""
        if isinstance(self.targets, str):
            found = self.targets == "all-linear" or matches(self.targets, module, self.path)
        else:
            found = any(module == target or module.endswith("." + target) for target in self.targets)
        weight = f".{module}.weight"  # of a router, which is no Linear in transformers
        if not found and not any(weight.endswith("." + parameter) for parameter in self.parameters):
            raise ModelFileError(
                f"{self.path}: the weights change {module!r}, which target_modules does not name: the files do not "
                "belong together"
            )


def read_config(folder: Path) -> PeftConfig:
    """Read and check `adapter_config.json`."""
    path = folder / CONFIG
    json = JsonObject(read_json(path), path)
    kind = json.text("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedModelError(f"{path}: adapters of type {kind} are not supported: only those of type LORA are")
    for field, meaning in REFUSED.items():
        if json.get(field):
            raise UnsupportedModelError(f"{path}: {field} means {meaning}, which is not supported: merge the adapter")
    if json.text("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias={json.get('bias')!r} changes biases of the base: only 'none' can be")
    start = json.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASES):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights={start!r} belongs to a base that it changed: convert the adapter to plain LoRA"
        )
    return PeftConfig(
        path=path,
        rank=json.count("r", 8),
        alpha=json.number("lora_alpha", 8.0),
        by_root=json.flag("use_rslora", False),
        ranks={key: json.object("rank_pattern").count(key) for key in json.get("rank_pattern") or {}},
        alphas={key: json.object("alpha_pattern").number(key) for key in json.get("alpha_pattern") or {}},
        targets=_targets(json),
        parameters=json.texts("target_parameters") if json.get("target_parameters") else (),
        has_bias=json.flag("lora_bias", False),
        saved=json.texts("modules_to_save") if json.get("modules_to_save") else (),
        ties=json.flag("ensure_weight_tying", False),
    )


def _targets(json: JsonObject) -> str | tuple[str, ...]:
    found = json.get("target_modules")
    return found if isinstance(found, str) else json.texts("target_modules")


def read_peft(folder: Path) -> Changes:
    """The changes of an adapter folder, by the names of Hugging Face folders."""
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        others = [name for name in ("adapter_model.bin",) if (folder / name).is_file()]
        why = f"; {others[0]} can hold any program: save it with safe_serialization=True" if others else ""
        raise ModelFileError(f"{path} is missing: an adapter folder needs {CONFIG} and {WEIGHTS}{why}")
    modules: dict[str, dict[str, QuantizedTensor]] = {}
    tensors = open_safetensors(path).tensors
    for name in tensors:
        module, kind = _place_of(name, path)
        own = modules.setdefault(module.removeprefix("base_model.").removeprefix("model."), {})
        if kind in own:
            raise ModelFileError(f"{path}: {name!r} occurs under two names: save the adapter again")
        own[kind] = tensors[name]
    if not modules:
        raise ModelFileError(f"{path} holds no tensor: save the adapter again")
    saved: dict[str, QuantizedTensor] = {}
    copies: dict[str, tuple[int, ...]] = {}
    for module, own in modules.items():
        if COPY in own:
            copies[f"{module}.weight"] = own.pop(COPY).shape
        whole = {kind: own.pop(kind) for kind in WHOLE if kind in own}
        if whole and own:
            raise ModelFileError(
                f"{path}: {module!r} is saved as a whole and changed by low-rank matrices: save it in one of both ways"
            )
        saved |= {f"{module}.{kind.removeprefix('whole ')}": tensor for kind, tensor in whole.items()}
    deltas = in_parallel(lambda item: list(_deltas(config, *item)), [item for item in modules.items() if item[1]])
    return Changes([delta for each in deltas for delta in each], saved, copies, config.saved, config.ties)


def _place_of(name: str, path: Path) -> tuple[str, str]:
    """The module of a tensor, and its part in the change of the module."""
    if len(name) <= MAX_NAME:
        if found := _TENSOR.fullmatch(name):
            return found["module"], found["side"] if found["kind"] == "weight" else "bias"
        if found := _OF_TABLE.fullmatch(name):
            return found["module"], f"embedding_{found['side']}"
        if found := _WHOLE.fullmatch(name):
            return found["module"], f"{'copy of' if found['copy'] else 'whole'} {found['kind']}"
    raise UnsupportedModelError(f"{path}: the tensor {name[:MAX_NAME]!r} is no part of a low-rank change")


def _deltas(config: PeftConfig, module: str, own: Mapping[str, QuantizedTensor]) -> Iterator[Delta]:
    if any(kind.startswith("embedding") for kind in own):
        yield _of_table(config, module, own)
        return
    missing = sorted({"A", "B"} - own.keys())
    if missing:
        raise ModelFileError(f"{config.path.parent}: {module!r} lacks lora_{missing[0]}: save the adapter again")
    down, up = dense(own["A"]), dense(own["B"])
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
        raise ModelFileError(
            f"{config.path.parent}: the two matrices of {module!r} have the shapes {down.shape} and {up.shape}, which "
            "do not belong together: save the adapter again"
        )
    bias = own.get("bias")
    if (bias is not None) != config.has_bias:
        raise ModelFileError(f"{config.path}: lora_bias does not say whether {module!r} has a bias: save it again")
    plain = module.replace(".base_layer", "")
    if plain.endswith(".experts"):
        yield _stacked(config, plain, down, up)
        return
    if not (config.ties and plain.rpartition(".")[2] == TIED):
        config.check_target(plain)
    shift = None if bias is None else bias.dequantize()
    yield Delta(plain + ".weight", down, up, shift).scaled(config.scale(plain, down.shape[0]))


def _of_table(config: PeftConfig, module: str, own: Mapping[str, QuantizedTensor]) -> Delta:
    """The change of an embedding [vocab, d], whose rows are the columns of PEFT's matrices."""
    sides = "embedding_A", "embedding_B"
    missing = [side for side in sides if side not in own]
    if missing or "A" in own or "B" in own:
        wrong = f"lacks lora_{missing[0]}" if missing else "is an embedding and a matrix"
        raise ModelFileError(f"{config.path.parent}: {module!r} {wrong}: save the adapter again")
    first, second = (dense(own[side]) for side in sides)
    if first.ndim != 2 or second.ndim != 2 or first.shape[0] != second.shape[1]:
        raise ModelFileError(
            f"{config.path.parent}: the two matrices of {module!r} have the shapes {first.shape} and {second.shape}, "
            "which do not belong together: save the adapter again"
        )
    config.check_target(module)
    delta = Delta(module + ".weight", np.ascontiguousarray(second.T), np.ascontiguousarray(first.T))
    return delta.scaled(config.scale(module, first.shape[0]))


def _stacked(config: PeftConfig, module: str, down: Matrix, up: Matrix) -> Delta:
    """The change of a parameter that holds one matrix for each expert.

    Its name follows from the shapes later, and so does its rank where patterns give parameters ranks of their own: the
    number of experts decides.
    """

    def of_rank(rank: int, scale: float) -> Delta:
        count = max(down.shape[0] // rank, 1)
        each = up.reshape(up.shape[0], -1, count).transpose(2, 0, 1)
        return Delta(module, down.reshape(count, -1, down.shape[1]), np.ascontiguousarray(each)).scaled(scale)

    alpha = config.alpha_of(module)
    possible = {
        rank: config.scale_of(rank, config.alphas.get(pattern, alpha))
        for pattern, rank in (("", config.rank), *config.ranks.items())
        if rank and down.shape[0] % rank == 0
    }
    stated = next((rank for key, rank in config.ranks.items() if ends_with(key, module, config.path)), config.rank)
    if stated not in possible:
        possible[down.shape[0]] = config.scale(module, down.shape[0])
    first, *others = (of_rank(*one) for one in possible.items())
    return replace(first, alternatives=tuple(others))


def dense(tensor: QuantizedTensor) -> Matrix:
    """The values as f32; those of f16 stay f16."""
    if tensor.format is QuantFormat.F16:
        return np.ascontiguousarray(tensor.data).view(np.float16).reshape(tensor.shape)
    return np.ascontiguousarray(tensor.dequantize())


def ends_with(pattern: str, module: str, path: Path) -> bool:
    """Whether a pattern of ranks or alphas names the end of a module."""
    return matches(rf"(.*\.)?({pattern})$", module, path, extra=1)


def matches(pattern: str, module: str, path: Path, extra: int = 0) -> bool:
    """Whether a regular expression of the file matches; those that could take long are refused."""
    if not pattern.replace("_", "").replace(".", "").replace("-", "").isalnum():
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > MAX_PATTERN or repeats > MAX_REPEATS + extra or re.search(r"[)][*+{]", pattern):
            raise UnsupportedModelError(
                f"{path}: the pattern {pattern[:80]!r} is too complex: use at most {MAX_REPEATS} repetitions, of "
                "single characters"
            )
    try:
        return re.fullmatch(pattern, module) is not None
    except (re.error, OverflowError) as error:
        raise ModelFileError(f"{path}: the pattern {pattern[:80]!r} is no regular expression: {error}") from None
