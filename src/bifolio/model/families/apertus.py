"""Apertus: Llama with norms of each head, and an ungated MLP whose activation (xIELU) each layer has learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError
from bifolio.model.decoder_fields import activation
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_ropes, rope_object
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.weights import ModelWeights
from bifolio.model.xielu import LINEAR, MOST
from bifolio.quant.tensor import QuantizedTensor

NAMES = ("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n")
KEYS = ("xielu.alpha_p", "xielu.alpha_n")  # in GGUF files, where they are entries with a number for each layer
FIXED = {"mlp.act_fn.beta": LINEAR, "mlp.act_fn.eps": MOST}


def with_fixed(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The coefficients that all networks share, which transformers reads from folders."""
    for tensor in tensors:
        yield tensor
        if tensor.name.endswith(NAMES[1]):
            for name, value in FIXED.items():
                own = QuantizedTensor.from_array(np.array(value, np.float32).reshape(()))
                yield NamedTensor(tensor.name.replace(NAMES[1], name), own, "state")


@dataclass(frozen=True, slots=True)
class WithEntries:
    """A GGUF file's tensors, with the coefficients of its entries."""

    source: Any  # the tensors of a file

    def has(self, name: str) -> bool:
        return bool(self.source.has(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        key, file = next((key for key in KEYS if name.endswith(key)), None), getattr(self.source, "file", None)
        if key is None or file is None:
            tensor: QuantizedTensor = self.source.view(name, shape)
            return tensor
        layer, values = int(name.split(".")[1]), file.metadata.get(key)
        if not isinstance(values, np.ndarray) or values.ndim != 1 or len(values) <= layer:
            raise ModelFileError(f"{file.path}: {key} must hold a number for each layer")
        return QuantizedTensor.from_array(values[layer : layer + 1].astype(np.float32))


def gguf_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return WithEntries(source)


def without_coefficients(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    return (tensor for tensor in tensors if not tensor.name.endswith(KEYS))


def entries(weights: ModelWeights) -> dict[str, Any]:
    own = np.array([layer.xielu for layer in weights.layers], np.float32)
    count = len(weights.layers)
    shared = {"xielu.beta": np.full(count, LINEAR, np.float32), "xielu.eps": np.full(count, MOST, np.float32)}
    return {KEYS[0]: own[:, 0].copy(), KEYS[1]: own[:, 1].copy(), **shared}


FAMILY = Family(
    name="apertus",
    network={"qk_norm": True, "gated_mlp": False},
    fields=(
        Field("activation", hf=activation("hidden_act", xielu="xielu")),
        Field("ropes", hf=Form(read_ropes, lambda v: {PARAMETERS: rope_object(v.config.ropes[0])})),
    ),
    hf_types=("apertus",),
    hf_class="ApertusForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "hidden_act": "xielu", "rope_theta": 12000000.0, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied={"mlp_bias": False},
    hf_always=("attention_bias",),
    hf_needed={"hidden_act": "xielu"},
    hf_names=replace(
        HF_LLAMA,
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        up=("mlp.up_proj",),
        xielu=NAMES,
    ),
    folder_tensors=with_fixed,
    gguf_architectures=("apertus",),
    gguf_implied={"activation": "xielu"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",), xielu=KEYS),
    gguf_source=gguf_source,
    gguf_tensors=without_coefficients,
    gguf_entries=entries,
)  # fmt: skip
