"""A model whose text is known, and draft heads that are right in a given share of the places.

Row j of the output matrix is the embedding of token j - 1, and the layers add little to the embedding of the last
token: the model continues t with t + 1, t + 2, ... A head reads embeddings of its own, in which some tokens have the
row of another one: after those its draft is wrong. Layers have random weights, so that a pass has the usual cost, and
the output of every engine can be checked.

    tokens    |  not used  |<-- drafts are right after `share` of them -->|<-- drafts are wrong -->|
              0            FIRST                                       half                     num_known

The head for multi-token prediction is in the model's folder, which has the layout of GLM-4.5; the EAGLE-3 head has one
of its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_files import RandomWeights, vector, write_tokenizer
from bifolio.config import ModelConfig
from bifolio.model.eagle import write_eagle
from bifolio.model.families import family_of
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

FIRST = 4  # first token of a text
SMALLER = 3  # binary digits: matrices that add to the residual stream are smaller by so many
SMALL = 2.0**-SMALLER
WRONG = 7  # a wrong draft is the token that follows so many tokens later
Half = NDArray[np.float16]


class PredictableWeights(RandomWeights):
    """Random matrices whose layers add little to the embeddings, which are large."""

    def matrix(self, name: str, size: tuple[int, ...]) -> QuantizedTensor:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = embeddings(*size)
            return QuantizedTensor.from_array(rows if "embed" in name else np.roll(rows, 1, axis=0))
        tensor = super().matrix(name, size)
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            return tensor
        words = np.ascontiguousarray(tensor.data).view(np.uint16)
        small = np.where(words & 0x7F80 > SMALLER << 7, words - np.uint16(SMALLER << 7), words & 0x8000)
        return QuantizedTensor(tensor.format, small.astype(np.uint16).view(np.uint8), size, name)


def embeddings(vocab_size: int, width: int) -> Half:
    """f16[vocab, width], normally distributed."""
    pool = np.random.default_rng(0).standard_normal((1 << 22) + 1, dtype=np.float32).astype(np.float16)
    count = vocab_size * width
    return np.ascontiguousarray(np.tile(pool, -(-count // len(pool)))[:count].reshape(vocab_size, width))


def num_known(vocab_size: int) -> int:
    """Tokens that occur in texts, and that the EAGLE-3 head knows: about as many as published heads do."""
    return min(vocab_size - 2 * WRONG, 32000)


def is_right(vocab_size: int, share: float) -> NDArray[np.bool_]:
    """bool[vocab]: after which tokens a head proposes the model's own."""
    found = np.random.default_rng(1).random(vocab_size) < share
    found[num_known(vocab_size) // 2 :] = False
    return found


def head_embeddings(vocab_size: int, width: int, share: float) -> Half:
    """f16[vocab, width]: embeddings, of which those of wrong drafts are those of other tokens."""
    places = np.arange(vocab_size) + WRONG * ~is_right(vocab_size, share)
    return np.ascontiguousarray(embeddings(vocab_size, width)[places % vocab_size])


def write_pair(folder: Path, config: ModelConfig, share: float) -> None:
    """Write a model of a shape like Llama's with a head for multi-token prediction."""
    from bifolio.train.mtp_head import pair_config

    names = family_of(config).hf_names
    format = QuantFormat.BF16
    weights = assemble(config, names, PredictableWeights(config, format).matrix, vector)
    pair = pair_config(weights)
    model = LoadedModel(folder, pair, weights=replace(weights, config=pair))
    fields = {"num_nextn_predict_layers": 1}
    write_folder(folder, model, format, overwrite=True, fields=fields, tensors=next_token_tensors(pair, share))
    write_tokenizer(folder, config.vocab_size)


def next_token_tensors(config: ModelConfig, share: float) -> dict[str, np.ndarray]:
    """The head's tensors by their published names: its layer's input is the embedding of the newest token."""
    assert config.moe is not None
    d, size, vocab = config.hidden_size, config.moe.expert_size, config.vocab_size
    draw = Draw(2)
    experts = {"gate_proj": draw(size, d), "up_proj": draw(size, d), "down_proj": draw(d, size) * np.float16(SMALL)}
    named: dict[str, np.ndarray] = {
        "embed_tokens.weight": head_embeddings(vocab, d, share),
        "eh_proj.weight": np.concatenate([np.eye(d, dtype=np.float16), draw(d, d) * np.float16(SMALL)], axis=1),
        "self_attn.q_proj.weight": draw(config.query_size, d),
        "self_attn.k_proj.weight": draw(config.kv_size, d),
        "self_attn.v_proj.weight": draw(config.kv_size, d),
        "self_attn.o_proj.weight": draw(d, config.query_size) * np.float16(SMALL),
        "mlp.gate.weight": np.zeros((config.moe.num_experts, d), np.float32),
        "mlp.gate.e_score_correction_bias": np.zeros(config.moe.num_experts, np.float32),
    }
    for norm in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        named[f"{norm}.weight"] = np.ones(d, np.float32)
    for part in ["shared_experts", *(f"experts.{number}" for number in range(config.moe.num_experts))]:
        named |= {f"mlp.{part}.{name}.weight": value for name, value in experts.items()}
    return {f"model.layers.{config.num_layers}.{name}": value for name, value in named.items()}


def write_head(folder: Path, config: ModelConfig, share: float) -> None:
    """Write an EAGLE-3 head for a model that `write_pair` has written with this configuration.

    Keys equal queries of the same token, so that attention reads the newest token; its value is the beginning of its
    embedding, which is added to a small residual stream.
    """
    d, kv, heads, size = config.hidden_size, config.kv_size, config.num_heads, config.head_dim
    group, ffn, count, draw = (
        heads // config.num_kv_heads,
        config.intermediate_size,
        num_known(config.vocab_size),
        Draw(3),
    )
    keys = draw(kv, d) * np.float16(2.0)
    queries = np.repeat(keys.reshape(-1, size, d), group, axis=0).reshape(-1, d)
    output = draw(d, heads * size) * np.float16(0.01)
    for place in range(min(kv, d)):
        output[place, place // size * group * size + place % size] = 1.0
    parts = {"q": queries, "k": keys, "v": np.eye(kv, d, dtype=np.float16)}
    tensors: dict[str, np.ndarray] = {
        "embed_tokens.weight": head_embeddings(config.vocab_size, d, share),
        "fc.weight": draw(d, 3 * d),
        "norm.weight": np.ones(d, np.float32),
        "lm_head.weight": np.ascontiguousarray(np.roll(embeddings(config.vocab_size, d), 1, axis=0)[:count]),
        "midlayer.input_layernorm.weight": np.ones(d, np.float32),
        "midlayer.hidden_norm.weight": np.full(d, 0.05, np.float32),
        "midlayer.post_attention_layernorm.weight": np.ones(d, np.float32),
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.mlp.gate_proj.weight": draw(ffn, d),
        "midlayer.mlp.up_proj.weight": draw(ffn, d),
        "midlayer.mlp.down_proj.weight": draw(d, ffn) * np.float16(SMALL),
    }
    for name, part in parts.items():
        own = np.concatenate([part, draw(len(part), d) * np.float16(SMALL)], axis=1)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = own
    taps = sorted({min(2, config.num_layers), config.num_layers // 2, max(config.num_layers - 3, 0)})
    taps = taps if len(taps) == 3 else [0, 1, 2]
    one_layer = replace(config, num_layers=1, layers=config.layers[:1], architecture="llama", tie_embeddings=False)
    write_eagle(folder, one_layer, taps, np.arange(count), tensors)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "norm_before_residual": True}, indent=2))


class Draw:
    """Random matrices out of a pool, each with a beginning of its own."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._pool = self._random.standard_normal((1 << 22) + 1, dtype=np.float32)

    def __call__(self, rows: int, columns: int) -> Half:
        """f16[rows, columns] with the variance 1 / columns."""
        count, start = rows * columns, int(self._random.integers(len(self._pool)))
        pool = np.roll(self._pool, -start) * np.float32(1 / math.sqrt(columns))
        return np.tile(pool.astype(np.float16), -(-count // len(pool)))[:count].reshape(rows, columns)


def text_after(token: int, count: int, vocab_size: int) -> list[int]:
    """The tokens that the model writes after this one."""
    return [(token + place) % vocab_size for place in range(1, count + 1)]
