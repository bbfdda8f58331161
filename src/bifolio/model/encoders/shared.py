"""The parts of tables that families of encoders share."""

from __future__ import annotations

from typing import Any

from bifolio.model.description import Reading, Writing
from bifolio.model.fields import Field, Form, Key

ENCODER: dict[str, Any] = {
    "bidirectional": True,
    "language_head": False,
    "tie_embeddings": True,
    "norm": "layer",
    "head_bias": False,
    "attention_scale": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "layers.window": (),
    "layers.rope": (),
}
BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
POST_NORMS: dict[str, Any] = {"pre_norms": False, "residual_norms": True, "embedding_norm": True}
BERT: dict[str, Any] = {**ENCODER, **BIASES, **POST_NORMS, "gated_mlp": False, "learned_positions": True, "ropes": ()}


def _stored_types(values: Reading) -> int:
    """Rows of the table of token types; files without one have none."""
    return values.header.shape("token_types.weight")[0] if values.header.has_tensor("token_types.weight") else 0


SIZES = (
    Field("num_kv_heads", hf=None),
    Field("head_dim", hf=None, gguf=Form(lambda v: v["hidden_size"] // v["num_heads"])),
    Field("norm_eps", hf=Key("layer_norm_eps", default=1e-12)),
)
TOKEN_TYPES = Field("token_types", hf="type_vocab_size", gguf=Form(_stored_types), default=0)


def padded_positions(pad_token: int) -> tuple[Field, ...]:
    """Positions that begin after the padding token's: the table has that many rows more than a text has tokens."""
    offset = pad_token + 1

    def read(values: Reading) -> int:
        return values.json.count("max_position_embeddings", least=offset + 1) - int(values["position_offset"])

    def write(values: Writing) -> dict[str, int]:
        return {"max_position_embeddings": values["max_position"] + values["position_offset"]}

    return (
        Field(
            "position_offset",
            hf=Key("pad_token_id", default=offset, read=lambda pad: pad + 1, write=lambda offset: offset - 1),
            gguf=Form(lambda values: 0, lambda values: {}),  # GGUF files leave those rows of the table out
        ),
        Field("max_position", hf=Form(read, write)),
    )
