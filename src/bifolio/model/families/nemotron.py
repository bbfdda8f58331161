"""Nemotron-4 and Minitron: layer norms stored minus one, an ungated MLP of squared ReLU, rope on a part of heads."""

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="nemotron",
    network={"norm": "layer", "gated_mlp": False},
    fields=(Field("norm_eps", hf=Key("norm_eps", default=1e-5)),),
    hf_types=("nemotron",),
    hf_class="NemotronForCausalLM",
    hf_defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "partial_rotary_factor": 0.5,
                 "bos_token_id": 2, "eos_token_id": 3},
    hf_always=("attention_bias", "mlp_bias", "partial_rotary_factor"),
    hf_names=replace(HF_LLAMA, up=("mlp.up_proj",)),
    norm_offset=1.0,
    gguf_architectures=("nemotron",),
    gguf_implied={"activation": "relu2"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
)  # fmt: skip
