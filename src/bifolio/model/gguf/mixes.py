"""The formats of a written file: one for all matrices, or a mix that gives more bits to those that suffer most.

    q4_k_m   Q4_K; Q6_K for the output, and for values and down projections of the first and last eighth of the layers
             and of every third between
    q5_k_m   the same with Q5_K
    q4_k_s   Q4_K; Q5_K for the values of the first four layers and the down projections of the first eighth
    q5_k_s, q6_k, iq4_nl, iq4_xs   that format; Q6_K for the output, Q5_K where an IQ4 file needs it

These are the mixes of llama.cpp, so that a name means the same file everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError
from bifolio.model.export import NamedTensor
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
# Where rows are no multiple of 256 values.
_SHORT_ROWS = {
    QuantFormat.Q4_K: QuantFormat.Q5_0,
    QuantFormat.Q5_K: QuantFormat.Q5_1,
    QuantFormat.Q6_K: QuantFormat.Q8_0,
    QuantFormat.IQ4_XS: QuantFormat.IQ4_NL,
}


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of file: its name, the format of most matrices, and its number in `general.file_type`."""

    name: str
    format: QuantFormat
    file_type: int

    @property
    def is_plain(self) -> bool:
        """Whether all matrices have one format, but for the vocabulary's."""
        return self.format in ENCODABLE_FORMATS

    def format_of(self, source: NamedTensor, config: ModelConfig, *, has_importance: bool) -> QuantFormat:
        """The format of a tensor in the file."""
        if source.kind == "numbers":
            return QuantFormat.I32
        if len(source.tensor.shape) < 2 or source.kind in ("norm", "bias", "positions", "router", "state"):
            return QuantFormat.F32
        return _fitting(self._wanted(source, config, has_importance), source.tensor.shape[-1])

    def _wanted(self, source: NamedTensor, config: ModelConfig, has_importance: bool) -> QuantFormat:
        if self.is_plain:
            at_least_8_bits = self.format in (QuantFormat.Q4_0, QuantFormat.Q4_1) and source.kind in (
                "embedding",
                "head",
            )
            return QuantFormat.Q8_0 if at_least_8_bits else self.format
        if source.kind == "head" or (source.kind == "embedding" and config.tie_embeddings):
            return QuantFormat.Q6_K
        found = _LAYER.fullmatch(source.name)
        if found is None:
            return self.format
        return self._in_layer(int(found[1]), found[2], config, has_importance)

    def _in_layer(self, layer: int, role: str, config: ModelConfig, has_importance: bool) -> QuantFormat:
        layers = config.num_layers
        role = "ffn_down" if role == "ffn_down_exps" else role
        if self.name in ("q4_k_m", "q5_k_m"):
            if role == "attn_qkv":
                return QuantFormat.Q5_K if self.name == "q4_k_m" else QuantFormat.Q6_K
            more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
            return QuantFormat.Q6_K if more and role in ("attn_v", "ffn_down") else self.format
        early = layer < layers // 8
        if self.name == "q4_k_s":
            more = (role == "attn_v" and layer < 4) or (role == "ffn_down" and early)
            return QuantFormat.Q5_K if more else self.format
        if self.name in ("iq4_nl", "iq4_xs"):
            shared = config.num_heads // config.num_kv_heads >= 4
            more = (role == "attn_v" and shared) or (role == "ffn_down" and early and not has_importance)
            return QuantFormat.Q5_K if more else self.format
        return self.format


def _fitting(format: QuantFormat, width: int) -> QuantFormat:
    """The format, or the nearest that can cut rows of `width` values into blocks."""
    if width % format.block_elements and format in _SHORT_ROWS:
        format = _SHORT_ROWS[format]
    return QuantFormat.F16 if width % format.block_elements else format


MIXES = {
    mix.name: mix
    for mix in (
        Mix("f32", QuantFormat.F32, 0),
        Mix("f16", QuantFormat.F16, 1),
        Mix("bf16", QuantFormat.BF16, 32),
        Mix("q8_0", QuantFormat.Q8_0, 7),
        Mix("q4_0", QuantFormat.Q4_0, 2),
        Mix("q4_1", QuantFormat.Q4_1, 3),
        Mix("q4_k_s", QuantFormat.Q4_K, 14),
        Mix("q4_k_m", QuantFormat.Q4_K, 15),
        Mix("q5_k_s", QuantFormat.Q5_K, 16),
        Mix("q5_k_m", QuantFormat.Q5_K, 17),
        Mix("q6_k", QuantFormat.Q6_K, 18),
        Mix("iq4_nl", QuantFormat.IQ4_NL, 25),
        Mix("iq4_xs", QuantFormat.IQ4_XS, 30),
    )
}


def parse_mix(name: str) -> Mix:
    """The mix called `name`; ConfigError lists those that exist."""
    aliases = {"q4_k": "q4_k_m", "q5_k": "q5_k_m"}
    key = name.strip().lower()
    mix = MIXES.get(aliases.get(key, key))
    if mix is None:
        raise ConfigError(f"there is no format {name!r} to write: use one of {', '.join(MIXES)}")
    return mix
