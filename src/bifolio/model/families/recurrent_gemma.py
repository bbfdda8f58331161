"""RecurrentGemma (Griffin): linear recurrent units with gates, and attention with a window in every third layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import NORM_OFFSET, TANH
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.recurrent_fields import EITHER, HEADS_BY_LAYER
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.stored_form import StoredForm, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.unit_tensors import UnitNames
from bifolio.model.window_fields import GGUF_WINDOWS, largest_window

BLOCKS, WINDOW = "block_types", "attention_window_size"
RECURRENT, ATTENTION = "recurrent", "attention"
GATES = tuple(f"temporal_block.rg_lru.{name}_gate" for name in ("recurrent", "input"))
FOLDER_FORM = StoredForm(  # gates are stored as [blocks, in, out]
    renamed=tuple((f"{gate}.{kind}", f"{gate}_{kind}") for gate in GATES for kind in ("weight", "bias")),
    turned=tuple(f"{gate}.weight" for gate in GATES),
)


def embedding_scale(values: Values) -> float:
    """The root of the hidden size, rounded to bfloat16 in any type of the weights."""
    part, exponent = math.frexp(math.sqrt(values["hidden_size"]))
    return math.ldexp(round(part * 256), exponent - 8)


def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    """The kinds of the first layers, which repeat."""
    kinds = values.json.texts(BLOCKS)
    if not kinds:
        raise values.json.wrong(BLOCKS, "a list of kinds of layers")
    for kind in kinds:
        if kind not in (RECURRENT, ATTENTION):
            raise UnsupportedModelError(f"{values.json.path}: layers of the kind {kind!r} ({BLOCKS}) are not supported")
    return tuple(kinds[layer % len(kinds)] == ATTENTION for layer in values.layers)


def attention_to_hf(values: Writing) -> dict[str, Any]:
    return {BLOCKS: [ATTENTION if attends else RECURRENT for attends in values["layers.attention"]]}


def windows(values: Reading) -> tuple[int | None, ...]:
    size = values.json.count(WINDOW)
    return tuple(size if attends else None for attends in values["layers.attention"])


def write_windows(values: Writing) -> dict[str, Any]:
    window, sizes = largest_window(values), set()
    for attends, size in zip(values["layers.attention"], values["layers.window"], strict=True):
        sizes |= {size} if attends else set()
    if len(sizes) > 1 or sizes == {None}:
        raise values.refusal(f"windows that differ between layers, or without windows: {sizes}")
    return {} if window is None else {WINDOW: window}


def folder_form(config: ModelConfig) -> StoredForm:
    return FOLDER_FORM


FAMILY = Family(
    name="recurrent_gemma",
    network={"output_bias": True, "mlp_bias": True, "recurrent.kind": "lru", "recurrent.heads": 1,
             "recurrent.groups": 1, "recurrent.key_size": 1, "recurrent.conv_bias": True, "recurrent.has_norm": False,
             "recurrent.projection_bias": True},
    fields=(
        *HEADS_BY_LAYER,
        EITHER,
        Field("activation", hf=activation("hidden_activation")),
        Field("embedding_scale", default=embedding_scale),
        Field("intermediate_size",
              hf=Key("intermediate_size", read=lambda size: size // 2, write=lambda size: 2 * size)),
        Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf)),
        Field("layers.window", hf=Form(windows, write_windows), gguf=GGUF_WINDOWS),
        Field("logit_softcap", hf=Key("logits_soft_cap", optional=False, default=REQUIRED)),
        Field("recurrent.width", hf="conv1d_width", gguf="ssm.conv_kernel", default=REQUIRED),
        Field("recurrent.channels", hf=Key("lru_width", default=lambda v: v["hidden_size"]), gguf="ssm.inner_size",
              default=REQUIRED),
        Field("recurrent.value_size", default=lambda v: v["recurrent.channels"]),
        Field("recurrent.gate_blocks", default=lambda v: v["num_heads"]),
    ),
    hf_types=("recurrent_gemma",),
    hf_class="RecurrentGemmaForCausalLM",
    hf_defaults={BLOCKS: [RECURRENT, RECURRENT, ATTENTION], WINDOW: 2048, "conv1d_width": 4, "logits_soft_cap": 30.0,
                 "partial_rotary_factor": 0.5, "hidden_activation": TANH, "tie_word_embeddings": True,
                 "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1},
    hf_always=("attention_bias", "partial_rotary_factor"),
    hf_needed={"embeddings_scale_by_sqrt_dim": True},
    hf_names=replace(
        HF_LLAMA,
        attention_norm="temporal_pre_norm",
        qkv=("temporal_block.q_proj", "temporal_block.k_proj", "temporal_block.v_proj"),
        output="temporal_block.o_proj",
        mlp_norm="channel_pre_norm",
        up=("mlp_block.gate_proj", "mlp_block.up_proj"),
        down="mlp_block.down_proj",
        final_norm="model.final_norm",
        recurrent=RecurrentNames(
            (("temporal_block.linear_y", 1), ("temporal_block.linear_x", 1)),
            conv="temporal_block.conv_1d",
            output="temporal_block.linear_out",
            conv_axis=True,
            units=UnitNames(GATES[0], GATES[1], parameter="temporal_block.rg_lru.recurrent_param"),
        ),
    ),
    norm_offset=NORM_OFFSET,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("recurrentgemma",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(
        GGUF_LLAMA,
        recurrent=RecurrentNames(
            (("ssm_in", 2),),
            conv="ssm_conv1d",
            output="ssm_out",
            units=UnitNames("ssm_recurrent_gate", "ssm_input_gate", parameter="ssm_a"),
        ),
    ),
)  # fmt: skip
