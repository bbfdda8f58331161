"""BitNet b1.58: a decoder like Llama with norms in front of the last projections, relu squared and ternary weights.

Folders hold packed ternary weights or those that training rounds (`huggingface.ternary_weights`). llama.cpp calls the
first models, with silu, `bitnet`.
"""

from typing import Any

from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form

FIRST, NEXT = "bitnet", ("bitnet-b1.58", "bitnet-25")


def read_activation(values: Reading) -> str:
    return "silu" if values.header.architecture == FIRST else "relu2"


def write_activation(values: Writing) -> dict[str, Any]:
    if values["activation"] != "relu2":
        raise values.refusal(f"the activation {values['activation']!r}", "relu2")
    return {}


FAMILY = Family(
    name="bitnet",
    network={"sub_norms": True},
    fields=(Field("activation", hf=activation("hidden_act"), gguf=Form(read_activation, write_activation)),),
    hf_types=("bitnet",),
    hf_class="BitNetForCausalLM",
    hf_defaults={"hidden_act": "relu2", "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "bos_token_id": 128000,
                 "eos_token_id": 128001},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_refused={"weight_bits": "BitNet models that round their weights and activations in code of their own "
                               "(`weight_bits`) are not supported: use bitnet-b1.58-2B-4T, or a GGUF file"},
    gguf_architectures=(*NEXT, FIRST),
)  # fmt: skip
