"""DeepSeek-V2 and V3, and GLM-4.7-Flash: attention over cached latents (MLA), shared experts, groups of experts.

In V3 and GLM a bias changes the choice of experts, and sigmoids weigh them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import LatentConfig, ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, expert_count
from bifolio.model.model_file import TensorSource
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.tensor_names import HF_LATENT
from bifolio.quant.tensor import QuantizedTensor

METHODS = ("greedy", "group_limited_greedy", BIASED := "noaux_tc")  # of choosing experts; the last one is DeepSeek-V3's
GROUP_BEST = 2  # experts that rank a group in DeepSeek-V3
GLM = "glm4_moe_lite"
KV_UP = "self_attn.kv_b_proj"  # of folders: key and value projections, head by head


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if raw.get("attention_bias"):
        raise UnsupportedModelError("DeepSeek-V2 with biases in attention is not supported")
    if not raw.get("rope_interleave", True):
        raise UnsupportedModelError("DeepSeek models whose rope is not interleaved are not supported")
    rope, nope = int(raw["qk_rope_head_dim"]), int(raw["qk_nope_head_dim"])
    mla = LatentConfig(
        latent_size=int(raw["kv_lora_rank"]),
        rope_size=rope,
        nope_size=nope,
        value_size=int(raw["v_head_dim"]),
        query_rank=int(raw.get("q_lora_rank") or 0),
    )
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    return decoder_from_hf(
        {**raw, "head_dim": rope},
        name,
        head_dim=rope + mla.latent_size,
        num_kv_heads=1,
        rope_interleaved=True,
        attention_scale=_score_scale(rope + nope, parameters.get("factor"), parameters.get("mscale_all_dim")),
        mla=mla,
        moe=_experts_from_hf(raw),
    )


def _experts_from_hf(raw: Raw) -> MoeConfig:
    kind = raw.get("model_type")
    method = raw.get("topk_method") or (BIASED if kind in ("deepseek_v3", GLM) else "greedy")
    if method not in METHODS:
        raise UnsupportedModelError(f"the routing {method!r} is not supported; supported: {', '.join(METHODS)}")
    in_groups, is_biased = method != "greedy", method == BIASED
    size = int(raw["moe_intermediate_size"])
    dense = list(range(int(raw.get("first_k_dense_replace", 1 if kind == GLM else 0))))
    if layers := raw.get("mlp_layer_types"):
        dense = [layer for layer, mlp in enumerate(layers) if mlp == "dense"]
    chosen: dict[str, Any] = {}
    if is_biased:  # DeepSeek-V3
        renormalise = bool(raw.get("norm_topk_prob", True))
        chosen = {"scoring": "sigmoid", "renormalise": renormalise, "selection_bias": True, "group_best": GROUP_BEST}
    return MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=size,
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=int(raw.get("n_group") or 1) if in_groups else 1,
        top_groups=int(raw.get("topk_group") or 1) if in_groups else 1,
        shared_size=size * int(raw.get("n_shared_experts") or 0),
        dense_layers=tuple(dense),
        **chosen,
    )


def _score_scale(size: int, factor: float | None, multiplier: float | None) -> float:
    """The factor of scores; yarn with `mscale_all_dim` enlarges it."""
    larger = 1 + 0.1 * multiplier * math.log(factor) if multiplier and factor and factor > 1 else 1.0
    return float(larger**2 / math.sqrt(size))


def _enlargement(config: ModelConfig) -> float:
    """The factor of scores by yarn: mscale_all_dim, or 0."""
    mla, factor = config.mla, config.ropes[0].factor
    if mla is None or factor <= 1:
        return 0.0
    larger = math.sqrt(config.scale * math.sqrt(mla.rope_size + mla.nope_size))
    return round((larger - 1) / (0.1 * math.log(factor)), 6)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe, mla = config.moe, config.mla
    if moe is None or mla is None:
        raise UnsupportedModelError("a DeepSeek-V2 folder describes experts and attention over latents")
    fields = decoder_to_hf(config) | {"num_key_value_heads": config.num_heads, "head_dim": mla.rope_size}
    if fields["rope_scaling"] is not None and (multiplier := _enlargement(config)):
        fields["rope_scaling"] |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    method = BIASED if moe.selection_bias else "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    third = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rope_interleave": True}
    return {
        **(third if moe.selection_bias else {}),
        **fields,
        "kv_lora_rank": mla.latent_size,
        "q_lora_rank": mla.query_rank or None,
        "qk_rope_head_dim": mla.rope_size,
        "qk_nope_head_dim": mla.nope_size,
        "v_head_dim": mla.value_size,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.renormalise,
        "topk_method": method,
        "scoring_func": moe.scoring,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    if not metadata.has(".attention.key_length_mla"):
        raise UnsupportedModelError(f"{file.path}: the file holds no projections by head: convert the model again")
    rope = metadata.count(".rope.dimension_count")
    mla = LatentConfig(
        latent_size=metadata.count(".attention.kv_lora_rank"),
        rope_size=rope,
        nope_size=metadata.count(".attention.key_length_mla") - rope,
        value_size=metadata.count(".attention.value_length_mla"),
        query_rank=metadata.count(".attention.q_lora_rank", 0) if "blk.0.attn_q_a.weight" in file.entries else 0,
    )
    if metadata.has(".attention.temperature_scale"):
        raise UnsupportedModelError(f"{file.path}: queries that grow with the position are not supported with latents")
    choice: dict[str, Any] = {}
    if any(entry.endswith("exp_probs_b.bias") for entry in file.entries):  # DeepSeek-V3 and GLM
        choice["group_best"] = GROUP_BEST
        if not metadata.has(".expert_gating_func"):
            choice["scoring"] = "sigmoid"
    moe = experts_from_gguf(file, metadata, **choice)
    layers = metadata.count(".block_count") - metadata.count(".nextn_predict_layers", 0)
    fields: dict[str, Any] = {"mla": mla, "moe": moe, "rope_interleaved": True, "num_kv_heads": 1, "num_layers": layers}
    config = decoder_from_gguf(file, metadata, name, **fields)
    multiplier = metadata.number(".rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    scale = _score_scale(rope + mla.nope_size, config.ropes[0].factor, multiplier)
    if multiplier:  # scores are enlarged instead of queries and keys
        config = replace(config, ropes=(replace(config.ropes[0], attention_factor=1.0),))
    return replace(config, attention_scale=scale)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    mla = config.mla
    if mla is None:
        return {}
    entries: dict[str, Value] = {
        "attention.key_length": config.head_dim,
        "attention.value_length": mla.latent_size,
        "attention.key_length_mla": mla.nope_size + mla.rope_size,
        "attention.value_length_mla": mla.value_size,
        "attention.kv_lora_rank": mla.latent_size,
    }
    if mla.query_rank:
        entries["attention.q_lora_rank"] = mla.query_rank
    if multiplier := _enlargement(config):
        if not math.isclose(config.ropes[0].attention_factor, 1.0, rel_tol=1e-6):
            raise UnsupportedModelError("GGUF cannot describe yarn that enlarges scores, queries and keys at once")
        entries |= {"rope.scaling.yarn_log_multiplier": 0.1 * multiplier, "rope.scaling.attn_factor": 1.0}
    return entries


@dataclass(frozen=True, slots=True)
class SplitByHead:
    """A folder's tensors, with the projections of keys and values by head."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        mla = self.config.mla
        role = next((role for role in (HF_LATENT.key_up, HF_LATENT.value_up) if f"{role}.weight" in name), None)
        if mla is None or role is None:
            return self.source.view(name, shape)
        heads, rows = self.config.num_heads, mla.nope_size + mla.value_size
        joined = self.source.view(name.replace(role, KV_UP), (heads * rows, mla.latent_size))
        by_head = np.arange(heads * rows).reshape(heads, rows)
        if role == HF_LATENT.value_up:
            return joined.select_rows(by_head[:, mla.nope_size :].reshape(-1)).reshape(*shape)
        keys = joined.select_rows(by_head[:, : mla.nope_size].reshape(-1)).dequantize()
        return QuantizedTensor.from_array(np.ascontiguousarray(keys.reshape(heads, -1, mla.latent_size).swapaxes(1, 2)))


def joined_by_head(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `SplitByHead`."""
    keys: NamedTensor | None = None
    for tensor in tensors:
        if HF_LATENT.key_up in tensor.name:
            keys = tensor
        elif HF_LATENT.value_up in tensor.name and keys is not None:
            parts = [keys.rearranged().dequantize().swapaxes(1, 2), tensor.rearranged().dequantize()]
            rows = np.concatenate(parts, axis=1)
            joined = QuantizedTensor.from_array(rows.reshape(-1, rows.shape[-1]))
            yield NamedTensor(tensor.name.replace(HF_LATENT.value_up, KV_UP), joined, "matrix")
        else:
            yield tensor


FAMILY = Family(
    name="deepseek2",
    hf_types=("deepseek_v2", "deepseek_v3", GLM),
    hf_class="DeepseekV2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_interleaved=True,
    folder_source=SplitByHead,
    folder_tensors=joined_by_head,
    gguf_architectures=("deepseek2",),
    written_as="deepseek2",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
    gguf_scale=lambda config: config.scale,
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)
