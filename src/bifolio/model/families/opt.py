"""OPT: layer norms with biases, learned positions, an ungated MLP with ReLU. Folders store two more positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.decoder_fields import activation
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames
from bifolio.quant.tensor import QuantizedTensor

POSITIONS, UNUSED = "model.decoder.embed_positions", 2
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


@dataclass(frozen=True, slots=True)
class WithoutUnused:
    """A folder's tensors, without the rows of positions that stand for padding."""

    source: TensorSource

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if name != f"{POSITIONS}.weight":
            return self.source.view(name, shape)
        stored = self.source.view(name, (shape[0] + UNUSED, *shape[1:]))
        return stored.select_rows(slice(UNUSED, None))


def with_unused(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `WithoutUnused`."""
    for tensor in tensors:
        if tensor.name != f"{POSITIONS}.weight":
            yield tensor
            continue
        rows = tensor.rearranged().dequantize()
        padded = np.concatenate([np.zeros((UNUSED, rows.shape[1]), rows.dtype), rows])
        yield replace(tensor, tensor=QuantizedTensor.from_array(padded))


FAMILY = Family(
    name="opt",
    network={"norm": "layer", "gated_mlp": False, "learned_positions": True, "ropes": ()},
    fields=(
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field("intermediate_size", hf="ffn_dim"),
        Field(
            "max_position",
            gguf=Key("context_length", reader=lambda v: v.header.shape("position_embd.weight")[0]),
        ),
        Field("norm_eps", hf=None, default=1e-5),
        Field("activation", hf=activation("activation_function", relu="relu")),
    ),
    hf_types=("opt",),
    hf_class="OPTForCausalLM",
    hf_defaults={"activation_function": "relu", "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2},
    hf_implied={**BIASES, "layers.window": ()},
    hf_written={"dropout": 0.0, "word_embed_proj_dim": None},
    hf_needed={"do_layer_norm_before": True, "enable_bias": True, "layer_norm_elementwise_affine": True},
    hf_refused={"_remove_final_layer_norm": "OPT models without a last norm are not supported"},
    hf_names=TensorNames(
        embedding="model.decoder.embed_tokens",
        positions=POSITIONS,
        layer="model.decoder.layers.{}.",
        attention_norm="self_attn_layer_norm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
        final_norm="model.decoder.final_layer_norm",
        head="lm_head",
    ),
    folder_source=lambda source, config: WithoutUnused(source),
    folder_tensors=with_unused,
    gguf_architectures=("opt",),
    gguf_implied={"activation": "relu"},
    gguf_names=replace(GGUF_LLAMA, positions="position_embd", up=("ffn_up",)),
)
