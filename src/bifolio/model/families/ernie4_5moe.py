"""ERNIE 4.5 with experts: softmax scores with a bias in the choice, shared experts, plain MLPs in the first layers."""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, leading_dense, of_expert_size
from bifolio.model.families import ernie4_5
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.tensor_names import HF_LLAMA

SMALLEST_SUM = 1e-12  # sums of weights below it do not occur
SELECTION_BIAS = "mlp.moe_statics.e_score_correction_bias"
FIRST, LAST, STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


def dense_layers(values: Reading) -> tuple[bool, ...]:
    json, layers = values.json, values.layers
    if json.number("moe_norm_min", 0.0) > SMALLEST_SUM:
        raise UnsupportedModelError(f"ERNIE 4.5 with moe_norm_min above {SMALLEST_SUM} is not supported")
    first, last, step = json.count(FIRST, 1, least=0), json.count(LAST, -1, least=-1), json.count(STEP, 1)
    last = len(layers) - 1 if last == -1 else last
    return tuple(not first <= layer <= last or (layer + 1) % step != 0 for layer in layers)


def write_dense_layers(values: Writing) -> dict[str, int]:
    return {FIRST: leading_dense(values), LAST: values["num_layers"] - 1, STEP: 1}


def folder_form(config: ModelConfig) -> StoredForm:
    return StoredForm(rows=(SELECTION_BIAS,))


FAMILY = Family(
    name="ernie4_5moe",
    fields=(
        *EXPERTS,
        ADD_UP,
        Field("moe.num_experts", hf="moe_num_experts"),
        Field("moe.top_k", hf="moe_k"),
        Field("moe.selection_bias", default=True),
        Field("moe.shared_size", hf=of_expert_size("moe_num_shared_experts")),
        Field("layers.dense", hf=Form(dense_layers, write_dense_layers)),
    ),
    hf_types=("ernie4_5_moe",),
    hf_class="Ernie4_5_MoeForCausalLM",
    hf_defaults={**ernie4_5.FAMILY.hf_defaults, "num_key_value_heads": 4, "max_position_embeddings": 131072,
                 "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
                 "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False},
    hf_refused={"use_bias": "ERNIE 4.5 with experts and biases is not supported"},
    hf_names=replace(HF_LLAMA, selection_bias=SELECTION_BIAS),
    hf_interleaved=True,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    gguf_architectures=("ernie4_5-moe",),
    gguf_written={"interleave_moe_layer_step": 1},
    gguf_needed={".interleave_moe_layer_step": 1},
    gguf_interleaved=True,
)  # fmt: skip
