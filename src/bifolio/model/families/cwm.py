"""CWM: Llama with a window on three of four layers. GGUF files are those of bifolio alone."""

from __future__ import annotations

from bifolio.model.description import Reading
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.window_fields import BY_TYPE, TYPES, Windows, of_layers

PERIOD = 4  # of folders that do not name the layers


def windows(values: Reading) -> Windows:
    if values.json.get(TYPES) is not None:
        found: Windows = BY_TYPE.read(values)
        return found
    return of_layers(values, [layer % PERIOD > 0 for layer in values.layers])


FAMILY = Family(
    name="cwm",
    fields=(
        Field("layers.window", hf=Form(windows, BY_TYPE.write)),
        Field("bos_token_id", hf=Key("bos_token_id", optional=True)),  # transformers takes no null
    ),
    hf_types=("cwm",),
    hf_class="CwmForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "sliding_window": 8192, "num_key_value_heads": 8, "head_dim": 128,
                 "rope_theta": 1000000.0, "max_position_embeddings": 131072, "bos_token_id": 128000,
                 "eos_token_id": [128001, 128008, 128009]},
    hf_implied={"qkv_bias": False, "output_bias": False},
    hf_always=("mlp_bias",),
    gguf_architectures=("cwm",),
)  # fmt: skip
