"""Hunyuan with experts (Hunyuan-A13B): the attention of Hunyuan, experts beside a shared MLP of the same width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading
from bifolio.model.expert_fields import ADD_UP, EXPERTS
from bifolio.model.families import hunyuan_dense
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key

NEEDED = {"use_cla": False, "use_qk_norm": True, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0,
          "mlp_bias": False, "num_shared_expert": 1}  # fmt: skip


def of_all_layers(values: Reading, key: str, default: int | None = None) -> int:
    """A number that config.json may name once for each layer."""
    found: Any = values.json.get(key)
    if not isinstance(found, list) or not found:
        return values.json.count(key, default)
    if any(value != found[0] for value in found):
        raise UnsupportedModelError(f"Hunyuan with different values of {key} by layer is not supported")
    return values.json.with_values({key: found[0]}).count(key)


def mlp_size(values: Reading) -> int:
    size = of_all_layers(values, "intermediate_size")
    if of_all_layers(values, "moe_intermediate_size", size) != size:
        raise UnsupportedModelError("Hunyuan with experts of another width than the shared MLP is not supported")
    return size


FAMILY = Family(
    name="hunyuan_moe",
    network=hunyuan_dense.NETWORK,
    fields=(
        *EXPERTS,
        ADD_UP,
        hunyuan_dense.ROPES,
        Field("intermediate_size", hf=Key("intermediate_size", reader=mlp_size)),
        Field("moe.top_k", hf=Key("moe_topk", reader=lambda v: of_all_layers(v, "moe_topk"))),
        Field("moe.expert_size", hf=None, default=lambda v: v["intermediate_size"]),
        Field("moe.shared_size", hf=None, default=lambda v: v["intermediate_size"]),
    ),
    hf_types=("hunyuan_v1_moe",),
    hf_class="HunYuanMoEV1ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1, "bos_token_id": 1, "eos_token_id": 2},
    hf_always=("attention_bias",),
    hf_needed=NEEDED,
    hf_names=replace(
        hunyuan_dense.HF_NAMES,
        router="mlp.gate.wg",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
    gguf_architectures=("hunyuan-moe",),
)
