"""ERNIE 4.5 with experts: softmax scores with a bias in the choice, shared experts, plain MLPs in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import ernie4_5
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.tensor_names import HF_LLAMA

SMALLEST_SUM = 1e-12  # sums of weights below it do not occur
DEFAULTS = {**ernie4_5.DEFAULTS, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
            "moe_norm_min": SMALLEST_SUM, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SELECTION_BIAS = "mlp.moe_statics.e_score_correction_bias"


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("use_bias"):
        raise UnsupportedModelError("ERNIE 4.5 with experts and biases is not supported")
    if float(raw["moe_norm_min"]) > SMALLEST_SUM:
        raise UnsupportedModelError(f"ERNIE 4.5 with moe_norm_min above {SMALLEST_SUM} is not supported")
    size, layers = int(raw["moe_intermediate_size"]), range(int(raw["num_hidden_layers"]))
    first, last, step = (int(raw[f"moe_layer_{end}"]) for end in ("start_index", "end_index", "interval"))
    last = len(layers) - 1 if last == -1 else last
    moe = MoeConfig(
        num_experts=int(raw["moe_num_experts"]),
        top_k=int(raw["moe_k"]),
        expert_size=size,
        renormalise=True,
        selection_bias=True,
        shared_size=size * int(raw["moe_num_shared_experts"]),
        dense_layers=tuple(layer for layer in layers if not first <= layer <= last or (layer + 1) % step),
    )
    return decoder_from_hf(raw, name, qkv_bias=False, output_bias=False, mlp_bias=False, moe=moe)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None or moe.dense_layers != tuple(range(len(moe.dense_layers))):
        raise UnsupportedModelError("a folder of this family is written only with experts in all layers but the first")
    return {
        **decoder_to_hf(config),
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "moe_num_shared_experts": moe.shared_size // moe.expert_size,
        "moe_layer_start_index": len(moe.dense_layers),
        "moe_layer_end_index": config.num_layers - 1,
        "moe_layer_interval": 1,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    if metadata.count(".interleave_moe_layer_step", 1) != 1:
        raise UnsupportedModelError(f"{file.path}: layers without experts behind the first are not supported")
    return decoder_from_gguf(file, metadata, name, moe=experts_from_gguf(file, metadata, renormalise=True))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {"interleave_moe_layer_step": 1}


def folder_form(config: ModelConfig) -> StoredForm:
    return StoredForm(rows=(SELECTION_BIAS,))


FAMILY = Family(
    name="ernie4_5moe",
    hf_types=("ernie4_5_moe",),
    hf_class="Ernie4_5_MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, selection_bias=SELECTION_BIAS),
    hf_interleaved=True,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    gguf_architectures=("ernie4_5-moe",),
    written_as="ernie4_5-moe",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
