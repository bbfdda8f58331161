"""DeepSeek-V4: attention to windows and to compressed entries, mixed residual streams, experts by the id of the token.

Folders have the names of the published checkpoints, or those that transformers writes; both are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import SILU_LIMIT
from bifolio.model.compressed_tensors import CompressedNames, CompressorNames, HyperNames
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS, MLP_TYPES
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form
from bifolio.model.gguf.rope_fields import read_rope as read_gguf_rope
from bifolio.model.huggingface import rope_fields
from bifolio.model.huggingface.rope_fields import PARAMETERS, rope_object, rope_parameters
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import TYPES, named_kinds
from bifolio.quant.tensor import QuantizedTensor

WINDOWS, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SPARSE_TOKENS, HEAVY_TOKENS = 4, 128  # of an entry, where files do not say it
RATES, RATIOS, HASH_LAYERS = "compress_rates", "compress_ratios", "num_hash_layers"
OLD_RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
USUAL_HASH_LAYERS = 3
HASHED, ROUTED = "hash_moe", "moe"
SCORES = {"sqrtsoftplus": "sqrt_softplus", "softmax": "softmax", "sigmoid": "sigmoid"}
GGUF_SCORES = {1: "softmax", 2: "sigmoid", 4: "sqrt_softplus"}
ACTIVATION, LIMIT = "silu_clamped", "swiglu_limit"
GGUF_LIMITS = (".swiglu_clamp_exp", ".swiglu_clamp_shexp")
GGUF_RATIOS, GGUF_HASHED = ".attention.compress_ratios", ".hash_layer_count"
COMPRESS_THETA, ROTATED = "compress_rope_theta", "qk_rope_head_dim"


# -- layers -----------------------------------------------------------------------------------------------------------
def entries_from_hf(values: Reading) -> tuple[tuple[int, bool], ...]:
    """(tokens of an entry, whether entries are chosen) of each layer."""
    json = values.json
    if json.get(TYPES) is None and json.get(RATIOS) is not None:
        ratios = json.counts(RATIOS, least=0)[: len(values.layers)]
        if len(ratios) != len(values.layers) or not set(ratios) <= {0, SPARSE_TOKENS, HEAVY_TOKENS}:
            raise json.wrong(RATIOS, f"0, {SPARSE_TOKENS} or {HEAVY_TOKENS} for each of {len(values.layers)} layers")
        return tuple((ratio, ratio == SPARSE_TOKENS) for ratio in ratios)
    usual = (HEAVY, HEAVY, *(SPARSE if layer % 2 else HEAVY for layer in range(max(len(values.layers) - 2, 0))))
    kinds = usual[: len(values.layers)] if json.get(TYPES) is None else named_kinds(values)
    tokens = {SPARSE: SPARSE_TOKENS, HEAVY: HEAVY_TOKENS}
    rates = {kind: json.object(RATES).count(kind, json.count(OLD_RATES[kind], n)) for kind, n in tokens.items()}
    if unknown := sorted(set(kinds) - {WINDOWS, *rates}):
        raise UnsupportedModelError(
            f"{json.path}: {TYPES} has {unknown[0]!r}; supported: {WINDOWS}, {', '.join(rates)}"
        )
    return tuple((rates.get(kind, 0), kind == SPARSE) for kind in kinds)


def entries_to_hf(values: Writing) -> dict[str, Any]:
    """One number of tokens for each kind of layers."""
    both = list(zip(values["layers.entry_tokens"], values["layers.chooses_entries"], strict=True))
    rates = {SPARSE: SPARSE_TOKENS, HEAVY: HEAVY_TOKENS}
    for kind, chooses in ((SPARSE, True), (HEAVY, False)):
        found = {tokens for tokens, chosen in both if tokens and chosen == chooses}
        if len(found) > 1:
            raise values.refusal(f"entries of {sorted(found)} tokens in layers of one kind")
        rates[kind] = min(found, default=rates[kind])
    kinds = [WINDOWS if not tokens else SPARSE if chosen else HEAVY for tokens, chosen in both]
    return {TYPES: kinds, RATES: rates}


def ratios_from_gguf(values: Reading) -> tuple[int, ...]:
    header, found = values.header, values.header.array(GGUF_RATIOS)
    if found is None or len(found) < len(values.layers):
        raise header.wrong(GGUF_RATIOS, f"a list for {len(values.layers)} layers")
    return tuple(int(ratio) for ratio in found[: len(values.layers)].tolist())


def ratios_to_gguf(values: Writing) -> dict[str, Any]:
    """Entries of four tokens are those that are chosen."""
    tokens = values["layers.entry_tokens"]
    if tuple(ratio == SPARSE_TOKENS for ratio in tokens) != values["layers.chooses_entries"]:
        raise values.refusal("chosen entries that do not stand for 4 tokens")
    return {GGUF_RATIOS[1:]: np.array(tokens, np.int32)}


def hashed_from_hf(values: Reading) -> tuple[bool, ...]:
    json = values.json
    if json.get(MLP_TYPES) is None:
        return first(values, json.count(HASH_LAYERS, USUAL_HASH_LAYERS, least=0))
    kinds = named_kinds(values, MLP_TYPES)
    if unknown := sorted(set(kinds) - {HASHED, ROUTED}):
        raise UnsupportedModelError(f"{json.path}: {MLP_TYPES} has {unknown[0]!r}; supported: {HASHED}, {ROUTED}")
    return tuple(kind == HASHED for kind in kinds)


def first(values: Reading, count: int) -> tuple[bool, ...]:
    return tuple(layer < count for layer in values.layers)


def hashed_to_gguf(values: Writing) -> dict[str, Any]:
    hashed = values["layers.hashed"]
    if sorted(hashed, reverse=True) != list(hashed):
        raise values.refusal("tables of experts behind layers without", "tables of experts in the first layers")
    return {GGUF_HASHED[1:]: sum(hashed)}


# -- rope -------------------------------------------------------------------------------------------------------------
def rotated_size(values: Reading) -> int:
    if values.json.get(ROTATED) is not None:
        return values.json.count(ROTATED, least=2)
    return int(values["head_dim"] * (values.json.number("partial_rotary_factor", 0.0) or 0.125))


def ropes_from_hf(values: Reading) -> tuple[RopeConfig, ...]:
    """The rope of layers without entries, and that of layers with entries: it may be scaled, without a factor."""
    json, own, dim = values.json, rope_parameters(values), rotated_size(values)
    plain = {"partial_rotary_factor": 1.0}
    theta = {"rope_theta": json.number(COMPRESS_THETA, 160000.0)}
    if own.get("main") is not None and own.get("compress") is not None:
        main, scaled = own.needed_object("main"), own.needed_object("compress").with_defaults(theta)
    else:
        main, scaled = own.with_values({"type": "default", "rope_type": "default"}), own.with_values(theta)
        main = main.with_values({"rope_theta": json.number("rope_theta", 10000.0)})
    scaled = scaled.with_defaults({"attention_factor": 1.0})
    return tuple(rope_fields.read_rope(values, each.with_values(plain), dim) for each in (main, scaled))


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    main, scaled = values.config.ropes
    share = {"partial_rotary_factor": main.rotary_dim / values.config.head_dim}
    both = {"main": {**rope_object(main), **share}, "compress": {**rope_object(scaled), **share}}
    thetas = {"rope_theta": main.theta, COMPRESS_THETA: scaled.theta}
    return {PARAMETERS: both, **thetas, ROTATED: main.rotary_dim, **share}


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    scaled = read_gguf_rope(values)
    theta = values.header.number(GGUF_THETA, 160000.0)
    return RopeConfig(scaled.theta, scaled.rotary_dim), replace(scaled, theta=theta, attention_factor=1.0)


def ropes_to_gguf(values: Writing) -> dict[str, Any]:
    main, scaled = values.config.ropes
    entries = {"rope.dimension_count": main.rotary_dim, "rope.freq_base": main.theta, GGUF_THETA[1:]: scaled.theta}
    if scaled.scaling == "none":
        return entries
    if main.scaling != "none" or scaled.scaling != "yarn" or scaled.attention_factor != 1.0 or not scaled.truncate:
        raise values.refusal("rope that is scaled otherwise than by yarn in layers with entries")
    scaling = {"type": "yarn", "factor": scaled.factor, "original_context_length": scaled.original_max_position,
               "yarn_beta_fast": scaled.beta_fast, "yarn_beta_slow": scaled.beta_slow}  # fmt: skip
    return {**entries, **{f"rope.scaling.{key}": value for key, value in scaling.items()}}


GGUF_THETA = ".attention.compress_rope_freq_base"


def ropes_of_layers(values: Reading) -> tuple[int, ...]:
    return tuple(int(tokens > 0) for tokens in values["layers.entry_tokens"])


# -- experts ----------------------------------------------------------------------------------------------------------
def scores_from_hf(values: Reading) -> str:
    name = values.json.text("scoring_func", "sqrtsoftplus")
    if name not in SCORES:
        raise UnsupportedModelError(f"{values.json.path}: scoring_func is {name!r}; supported: {', '.join(SCORES)}")
    return SCORES[name]


def scores_from_gguf(values: Reading) -> str:
    kind = values.header.count(".expert_gating_func", 4)
    if kind not in GGUF_SCORES:
        raise UnsupportedModelError(f"{values.header.path}: the scores of experts are of the unknown kind {kind}")
    return GGUF_SCORES[kind]


def write_shared(values: Writing) -> dict[str, Any]:
    if values["moe.shared_size"] != values["moe.expert_size"]:
        raise values.refusal(f"a shared MLP of {values['moe.shared_size']}", "one as wide as an expert")
    return {"n_shared_experts": 1}


def number_of(scoring: str) -> int:
    return next(number for number, name in GGUF_SCORES.items() if name == scoring)


def activation_from_gguf(values: Reading) -> str:
    """The limits of all layers are equal."""
    for key in GGUF_LIMITS:
        limits = values.header.array(key)
        if limits is not None and not (limits == SILU_LIMIT).all():
            raise UnsupportedModelError(f"{values.header.path}: {key}: experts are clamped at {SILU_LIMIT} only")
    return ACTIVATION


def limits_to_gguf(values: Writing) -> dict[str, Any]:
    limits = np.full(values.config.num_layers, SILU_LIMIT, np.float32)
    return {key[1:]: limits for key in GGUF_LIMITS}


# -- tensors ----------------------------------------------------------------------------------------------------------
PUBLISHED = {  # parts of names -> those of the published checkpoints, in this order
    "model.embed_tokens.": "embed.", "lm_head.": "head.", "model.hc_head.hc_": "hc_head_", "model.norm.": "norm.",
    "model.layers.": "layers.", ".input_layernorm.": ".attn_norm.", ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.compressor.indexer.scorer.weights_proj.": ".attn.indexer.weights_proj.",
    ".self_attn.compressor.indexer.q_b_proj.": ".attn.indexer.wq_b.",
    ".self_attn.compressor.indexer.": ".attn.indexer.compressor.", ".compressor.kv_norm.": ".compressor.norm.",
    ".self_attn.": ".attn.", ".mlp.": ".ffn.", ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_",
    ".sinks": ".attn_sink", ".position_bias": ".ape", ".compressor.gate_proj.": ".compressor.wgate.",
    ".q_a_proj.": ".wq_a.", ".q_b_proj.": ".wq_b.", ".kv_proj.": ".wkv.", ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.", ".q_a_norm.": ".q_norm.", ".gate.e_score_correction_bias": ".gate.bias",
    ".shared_experts.gate_proj.": ".shared_experts.w1.", ".shared_experts.down_proj.": ".shared_experts.w2.",
    ".shared_experts.up_proj.": ".shared_experts.w3.",
}  # fmt: skip


def published(name: str) -> str:
    for part, other in PUBLISHED.items():
        name = name.replace(part, other)
    return name


def spellings(name: str) -> tuple[str, ...]:
    """The published name, those that transformers writes, and its own."""
    whole = published(name)
    return whole, f"model.{whole}", f"model.{whole.replace('.attn.kv_norm.', '.attn.norm.')}", name


@dataclass(frozen=True, slots=True)
class Spelled:
    """A folder's tensors under the names of transformers."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return any(self.source.has(each) for each in spellings(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        found = next((each for each in spellings(name) if self.source.has(each)), name)
        return self.source.view(found, shape)


def as_published(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `Spelled`."""
    return (replace(tensor, name=published(tensor.name)) for tensor in tensors)


HF_COMPRESSED = CompressedNames(
    query_down="self_attn.q_a_proj",
    query_norm="self_attn.q_a_norm",
    query="self_attn.q_b_proj",
    key="self_attn.kv_proj",
    key_norm="self_attn.kv_norm",
    groups="self_attn.o_a_proj",
    compressor=CompressorNames(
        "self_attn.compressor.kv_proj",
        "self_attn.compressor.gate_proj",
        "self_attn.compressor.kv_norm",
        "self_attn.compressor.position_bias",
    ),
    index=CompressorNames(
        "self_attn.compressor.indexer.kv_proj",
        "self_attn.compressor.indexer.gate_proj",
        "self_attn.compressor.indexer.kv_norm",
        "self_attn.compressor.indexer.position_bias",
    ),
    index_query="self_attn.compressor.indexer.q_b_proj",
    index_weights="self_attn.compressor.indexer.scorer.weights_proj",
    attention=HyperNames("attn_hc.fn", "attn_hc.base", "attn_hc.scale"),
    mlp=HyperNames("ffn_hc.fn", "ffn_hc.base", "ffn_hc.scale"),
    end=HyperNames("model.hc_head.hc_fn", "model.hc_head.hc_base", "model.hc_head.hc_scale"),
    table="mlp.gate.tid2eid",
)
GGUF_COMPRESSED = CompressedNames(
    query_down="attn_q_a",
    query_norm="attn_q_a_norm",
    query="attn_q_b",
    key="attn_kv",
    key_norm="attn_kv_a_norm",
    groups="attn_output_a",
    compressor=CompressorNames(
        "attn_compressor_kv", "attn_compressor_gate", "attn_compressor_norm", "attn_compressor_ape.weight"
    ),
    index=CompressorNames(
        "indexer_compressor_kv", "indexer_compressor_gate", "indexer_compressor_norm", "indexer_compressor_ape.weight"
    ),
    index_query="indexer.attn_q_b",
    index_weights="indexer.proj",
    attention=HyperNames("hc_attn_fn.weight", "hc_attn_base.weight", "hc_attn_scale.weight"),
    mlp=HyperNames("hc_ffn_fn.weight", "hc_ffn_base.weight", "hc_ffn_scale.weight"),
    end=HyperNames("output_hc_fn.weight", "output_hc_base.weight", "output_hc_scale.weight"),
    table="ffn_gate_tid2eid.weight",
)

ENTRY_FIELDS = (
    Field("compressed.query_rank", hf="q_lora_rank", gguf="attention.q_lora_rank", default=REQUIRED),
    Field("compressed.output_groups", hf="o_groups", gguf="attention.output_group_count", default=REQUIRED),
    Field("compressed.output_rank", hf="o_lora_rank", gguf="attention.output_lora_rank", default=REQUIRED),
    Field("compressed.index_heads", hf="index_n_heads", gguf="attention.indexer.head_count"),
    Field("compressed.index_size", hf="index_head_dim", gguf="attention.indexer.key_length"),
    Field("compressed.index_top_k", hf="index_topk", gguf="attention.indexer.top_k"),
    Field(
        "layers.entry_tokens",
        hf=Form(lambda v: tuple(tokens for tokens, _ in entries_from_hf(v)), entries_to_hf),
        gguf=Form(ratios_from_gguf, ratios_to_gguf),
    ),
    Field(
        "layers.chooses_entries",
        hf=Form(lambda v: tuple(chosen for _, chosen in entries_from_hf(v))),
        gguf=Form(lambda v: tuple(tokens == SPARSE_TOKENS for tokens in v["layers.entry_tokens"])),
    ),
    Field("layers.rope", hf=Form(ropes_of_layers), gguf=Form(ropes_of_layers)),
    Field("ropes", hf=Form(ropes_from_hf, ropes_to_hf), gguf=Form(ropes_from_gguf, ropes_to_gguf)),
)
STREAM_FIELDS = (
    Field("hyper.count", hf="hc_mult", gguf="hyper_connection.count", default=REQUIRED),
    Field("hyper.iterations", hf="hc_sinkhorn_iters", gguf="hyper_connection.sinkhorn_iterations"),
    Field("hyper.eps", hf="hc_eps", gguf="hyper_connection.epsilon"),
)
EXPERT_FIELDS = (
    *EXPERTS,
    Field("intermediate_size", hf="moe_intermediate_size"),
    Field("moe.num_experts", hf=("n_routed_experts", "num_experts", "num_local_experts")),
    Field(
        "moe.scoring",
        hf=Form(
            scores_from_hf, lambda v: {"scoring_func": next(k for k, s in SCORES.items() if s == v["moe.scoring"])}
        ),
        gguf=Form(scores_from_gguf, lambda v: {"expert_gating_func": number_of(v["moe.scoring"])}),
    ),
    Field("moe.renormalise", hf=None, gguf=Form(lambda v: True, lambda v: {"expert_weights_norm": True}), default=True),
    Field("moe.scale", hf="routed_scaling_factor"),
    Field("moe.selection_bias", hf=None, gguf=None, default=True),
    Field("moe.shared_size", hf=Form(lambda v: v["moe.expert_size"], write_shared)),
    Field("layers.dense", hf=None, gguf=None),
    Field(
        "layers.hashed",
        hf=Form(hashed_from_hf, lambda v: {MLP_TYPES: [HASHED if own else ROUTED for own in v["layers.hashed"]]}),
        gguf=Form(lambda v: first(v, v.header.count(GGUF_HASHED, 0)), hashed_to_gguf),
    ),
    Field(
        "activation",
        hf=Form(lambda v: ACTIVATION, lambda v: {"hidden_act": "silu", LIMIT: SILU_LIMIT}),
        gguf=Form(activation_from_gguf, limits_to_gguf),
    ),
)
BIASES = dict.fromkeys(("attention_bias", "mlp_bias"), "DeepSeek-V4 with biases is not supported")

FAMILY = Family(
    name="deepseek4",
    network={"sinks": True, "num_kv_heads": 1},
    fields=(*ENTRY_FIELDS, *STREAM_FIELDS, *EXPERT_FIELDS),
    hf_types=("deepseek_v4",),
    hf_class="DeepseekV4ForCausalLM",
    hf_defaults={"moe_intermediate_size": 2048, "head_dim": 512, "q_lora_rank": 1024, "num_experts_per_tok": 6,
                 "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
                 "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
                 "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128,
                 "index_topk": 512, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1},
    hf_refused=BIASES,
    hf_needed={"num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": True, "hidden_act": "silu",
               LIMIT: SILU_LIMIT, "topk_method": "noaux_tc"},
    hf_written={"num_key_value_heads": 1, "norm_topk_prob": True},
    hf_names=replace(
        HF_LLAMA,
        output="self_attn.o_b_proj",
        expert_up=("mlp.experts.{}.w1", "mlp.experts.{}.w3"),
        expert_down="mlp.experts.{}.w2",
        compressed=HF_COMPRESSED,
    ),
    hf_interleaved=True,
    folder_source=Spelled,
    folder_tensors=as_published,
    gguf_architectures=("deepseek4",),
    gguf_written={"attention.head_count_kv": 1},
    gguf_names=replace(GGUF_LLAMA, output="attn_output_b", compressed=GGUF_COMPRESSED),
    gguf_interleaved=True,
)  # fmt: skip
