"""StarCoder2: layer norms, an ungated MLP, biases everywhere, rope; some models have a window on every layer."""

from dataclasses import replace

from bifolio.model.decoder_fields import one_bias
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="starcoder2",
    network={"norm": "layer", "gated_mlp": False},
    fields=(*one_bias("use_bias"), Field("norm_eps", hf=Key("norm_epsilon", default=1e-5))),
    hf_types=("starcoder2",),
    hf_class="Starcoder2ForCausalLM",
    hf_defaults={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "tie_word_embeddings": True},
    hf_always=("sliding_window",),
    hf_names=replace(HF_LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
    gguf_architectures=("starcoder2",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
)
