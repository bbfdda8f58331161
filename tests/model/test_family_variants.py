"""Descriptions that a family refuses, defaults that config.json leaves out, and other forms of a family's tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, SIZES, row_folder, row_model, save_row
from whole_prompt import prompt_logits

from bifolio.api.language_model import LanguageModel
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.families import glm
from bifolio.model.gguf.loader import GgufTensors, config_from_gguf, load_gguf
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.stored_form import either_qkv
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from helpers import random_prompt, transformers_logits

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("apertus", {"hidden_act": "silu"}, "hidden_act"),
    ("bitnet", {"weight_bits": 1}, "weight_bits"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ("cohere", {"use_qk_norm": True}, "layer norms of their own"),
    ("ernie4_5moe", {"use_bias": True}, "biases"),
    ("ernie4_5moe", {"moe_norm_min": 0.1}, "moe_norm_min"),
    ("falcon", {"alibi": True}, "alibi"),
    ("falcon", {"parallel_attn": False}, "parallel_attn"),
    ("gemma", {"use_bidirectional_attention": True}, "attend to later ones"),
    ("afmoe", {"attention_bias": True}, "attention_bias"),
    ("afmoe", {"score_func": "softmax"}, "score_func"),
    ("glm4", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope scaling 'spiral'"),
    ("glm4", {"rope_scaling": {"rope_type": "dynamic", "alpha": 2.0}}, "with alpha"),
    ("gpt_bigcode", {"add_cross_attention": True}, "cross attention"),
    ("gpt_bigcode", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("hunyuan_v3", {"mlp_bias": True}, "mlp_bias"),
    ("hunyuan_moe", {"use_cla": True}, "use_cla"),
    ("hunyuan_moe", {"moe_topk": [1, 2] * 16}, "moe_topk by layer"),
    ("hunyuan_moe", {"moe_intermediate_size": 1024}, "another width"),
    ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("llama4", {"text_config": {**ROWS["llama4"].real["text_config"], "layer_types": ["other"] * 48}}, "'other'"),
    ("minimax", {"layernorm_mlp_alpha": 2.0}, "layernorm_mlp_alpha is 2.0"),
    ("minimax", {"layernorm_linear_attention_beta": 2.0}, "layernorm_linear_attention_beta is 2.0"),
    ("minimax", {"hidden_act": "gelu"}, "hidden_act"),
    ("minimax", {"postnorm": False}, "postnorm"),
    ("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ("minimax", {"sliding_window": 128}, "sliding_window"),
    ("minimax", {"layer_types": ["other"] * 80}, "'other'"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
    ("mimo_v2_flash", {"attention_bias": True}, "attention_bias"),
    ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts"),
    ("mimo_v2_flash", {"swa_head_dim": 128}, "swa_head_dim is 128"),
    ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
    ("mpt", {"attn_config": {"clip_qkv": 6.0}}, "attn_config.clip_qkv"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("phimoe", {"rope_scaling": {**ROWS["phimoe"].real["rope_scaling"], "short_mscale": 1.0}}, "short_mscale"),
    ("recurrent_gemma", {"block_types": ["recurrent", "other"]}, "'other'"),
    ("recurrent_gemma", {"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim"),
    ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
    ("phi", {"qk_layernorm": True}, "layer norms of their own"),
    ("qwen2moe", {"use_sliding_window": True}, "without layer_types"),
    ("zamba2", {"layers_block_type": ["other"] * 81}, "'other'"),
    ("minicpm", {"num_experts": 8}, "experts"),
    ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse"),
    ("youtu", {"attention_bias": True}, "biases in attention"),
    ("youtu", {"rope_interleave": False}, "rope_interleave"),
    ("zamba2", {"use_long_context": True}, "use_long_context"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
]


def test_dynamic_rope_scales_nothing_up_to_the_length_of_the_context() -> None:
    plain = config_from_hf(ROWS["glm4"].real)
    assert config_from_hf({**ROWS["glm4"].real, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}) == plain


@pytest.mark.parametrize(("name", "change", "reason"), REFUSED)
def test_a_folder_that_cannot_be_run_is_refused(name: str, change: dict[str, Any], reason: str) -> None:
    config_from_hf(ROWS[name].real)
    with pytest.raises(UnsupportedModelError, match=reason):
        config_from_hf({**ROWS[name].real, **change})


GGUF_REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("cohere", {}, ("blk.0.attn_q_norm.weight",), "layer norms of their own"),
    ("ernie4_5moe", {".interleave_moe_layer_step": 2}, (), "interleave_moe_layer_step is 2: .* with 1 only"),
    ("glm4", {".rope.dimension_sections": np.array([8, 12, 12, 0])}, (), "rope with sections"),
    ("granitemoe", {".expert_count": 0}, (), "'granitemoe.expert_count' is 0: it must be an integer from 1"),
    ("minimax", {".residual_scale": 0.0}, (), "'minimax-01.residual_scale' is 0.0: it must be a positive number"),
    ("olmo", {".attention.clamp_kqv": 8.0}, (), "clip_qkv"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "entries", "tensors", "reason"), GGUF_REFUSED)
def test_a_gguf_file_that_cannot_be_run_is_refused(
    name: str, entries: dict[str, Any], tensors: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", load_folder(row_folder(name)[1]), QuantFormat.F32)
    file = open_gguf(tmp_path / "model.gguf")
    config_from_gguf(file)
    architecture = str(file.metadata["general.architecture"])
    metadata = {**file.metadata, **{architecture + key: value for key, value in entries.items()}}
    some = next(iter(file.entries.values()))
    with pytest.raises(ModelFileError, match=reason):
        config_from_gguf(replace(file, metadata=metadata, entries={**file.entries, **dict.fromkeys(tensors, some)}))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["arcee", "cohere", "ernie4_5moe", "falcon", "flex_olmo", "gemma", "glm", "glm4", "gptneox", "granite_swa",
     "granitemoe", "granitemoe_swa", "hunyuan_moe", "jais2", "mimo_v2_flash", "minimax", "nanochat",
     "nemotron", "olmo", "phi", "qwen2moe", "recurrent_gemma", "solar_open", "vaultgemma", "youtu"],
)  # fmt: skip
def test_fields_that_config_json_leaves_out_have_the_values_of_transformers(name: str) -> None:
    import transformers

    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"model_type": ROWS[name].real["model_type"], **{key: SIZES[key] for key in kept}}
    raw |= {"num_attention_heads": 16, "hidden_size": 256}
    whole = getattr(transformers, ROWS[name].config)(**raw).to_dict()
    assert config_from_hf(raw) == config_from_hf(whole)


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "activation"), [("bitnet", "silu"), ("bitnet-25", "relu2")])
def test_the_architecture_of_a_gguf_file_of_bitnet_names_its_activation(
    architecture: str, activation: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", load_folder(row_folder("bitnet")[1]), QuantFormat.F32)
    file = open_gguf(tmp_path / "model.gguf")
    written = str(file.metadata["general.architecture"])
    renamed = {key.replace(written, architecture, 1): value for key, value in file.metadata.items()}
    config = config_from_gguf(replace(file, metadata=renamed | {"general.architecture": architecture}))
    assert config == replace(config_from_gguf(file), activation=activation)


VARIANTS: list[tuple[str, dict[str, Any], str]] = [  # the last is the reason why GGUF cannot describe it, or none
    ("bitnet", {"attention_bias": True, "tie_word_embeddings": False}, ""),
    ("bitnet", {"hidden_act": "silu"}, "activation 'silu'"),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}, ""),
    ("cohere", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}, ""),
    ("dots1", {"attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0}, ""),
    ("ernie4_5moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 2}, ""),
    ("ernie4_5moe", {"moe_layer_interval": 2, "moe_layer_end_index": 2}, "plain MLPs in the layers"),
    ("falcon", {"new_decoder_architecture": False, "bias": True, "tie_word_embeddings": False}, ""),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}, ""),
    ("falcon", {"num_ln_in_parallel_attn": 1}, ""),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False}, ""),
    ("glm4", {"attention_bias": False, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
        "partial_rotary_factor": 0.5}}, ""),
    ("gptneox", {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}, ""),
    ("gptneox", {"hidden_act": "gelu_fast"}, "activation = 'gelu_tanh'"),
    ("mimo_v2_flash", {"attention_value_scale": None, "v_head_dim": 24, "norm_topk_prob": False}, ""),
    ("minimax", {"layer_types": None, "tie_word_embeddings": True, "num_attention_heads": 8}, ""),
    ("recurrent_gemma", {"block_types": ["attention", "recurrent"], "attention_bias": True,
                         "tie_word_embeddings": False, "num_key_value_heads": 4}, ""),
    ("recurrent_gemma", {"hidden_activation": "gelu"}, "activation = 'gelu'"),
    ("qwen2moe", {"qkv_bias": False, "use_sliding_window": False, "layer_types": None, "mlp_only_layers": [0]}, ""),
    ("qwen2moe", {"norm_topk_prob": True}, "add up to 1"),
    ("cwm", {"layer_types": None, "mlp_bias": True}, ""),
    ("exaone", {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ""),
    ("flex_olmo", {"norm_topk_prob": True, "attention_bias": True}, ""),
    ("granite_swa", {"layer_rope_theta": None, "attention_bias": True, "mlp_bias": True}, ""),
    ("granitemoe_swa", {"layer_rope_theta": [1e4, 1e4, 500.0, 0]}, "several bases"),
    ("granitemoe_swa", {"shared_intermediate_size": 0}, ""),
    ("helium", {"attention_bias": True}, ""),
    ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}, ""),
    ("nanochat", {"final_logit_softcapping": None, "tie_word_embeddings": True}, ""),
    ("solar_open", {"attention_bias": True, "norm_topk_prob": False, "n_group": 2, "topk_group": 1}, ""),
    ("vaultgemma", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": None}, ""),
    ("youtu", {"q_lora_rank": None, "tie_word_embeddings": False}, ""),
    ("zamba2", {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False,
                "add_bias_linear": True}, ""),
    ("zamba2", {"hidden_act": "silu"}, "activation = 'silu'"),
]  # fmt: skip


@pytest.mark.full
def test_gguf_files_of_minimax_may_name_the_period_of_layers_with_attention(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", load_folder(row_folder("minimax")[1]), QuantFormat.F32)
    file = open_gguf(tmp_path / "model.gguf")
    own = {key: value for key, value in file.metadata.items() if not key.endswith("recurrent_layers")}
    config = config_from_gguf(replace(file, metadata=own | {"minimax-01.full_attention_interval": 2}))
    assert config.attention_layers == (1, 3)


@pytest.mark.full
def test_the_first_folders_of_minimax_describe_the_same_network() -> None:
    """Their keys have other names, and their layers have numbers."""
    _, folder = row_folder("minimax")
    raw = json.loads((folder / "config.json").read_text())
    assert raw.pop("model_type") == "minimax"
    own = {"model_type": "minimax_text_01", "rotary_dim": raw["head_dim"], "postnorm": True}
    own["attn_type_list"] = [int(kind == "full_attention") for kind in raw.pop("layer_types")]
    for kind, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            own[f"layernorm_{name}_{factor}"] = raw.pop(f"{kind}_{factor}_factor")
    assert config_from_hf({**raw, **own}) == load_folder(folder).config


@pytest.mark.full
@pytest.mark.parametrize(("name", "change", "refused"), VARIANTS)
def test_variants_give_transformers_logits(name: str, change: dict[str, Any], refused: str, tmp_path: Path) -> None:
    model = row_model(name, **change)
    save_row(name, model, tmp_path / "folder")
    prompt, loaded = random_prompt(13), load_folder(tmp_path / "folder")
    theirs = transformers_logits(model, prompt)
    np.testing.assert_allclose(prompt_logits(loaded.weights, prompt), theirs, atol=1e-4)
    if refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
        return
    write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
    again = load_gguf(tmp_path / "model.gguf")
    np.testing.assert_allclose(prompt_logits(again.weights, prompt), theirs, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["falcon", "olmo", "phi"])  # joined matrices, norms without weights, biased logits
def test_language_models_compute_and_save_the_network(name: str, tmp_path: Path) -> None:
    import torch

    model, folder = row_folder(name)
    prompt = random_prompt(13)
    ours = LanguageModel.from_pretrained(folder)
    ours.save_pretrained(tmp_path)
    for each in (ours, LanguageModel.from_pretrained(tmp_path)):
        logits = each.prefill(torch.tensor([prompt]))[0][0].detach().numpy()
        np.testing.assert_allclose(logits, transformers_logits(model, prompt), atol=1e-4)


class Tensors:
    """Tensors in memory as those of a file."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        assert self.tensors[name].shape == shape
        return QuantizedTensor.from_array(self.tensors[name])


def test_older_files_of_glm_have_queries_keys_and_values_in_one_matrix() -> None:
    config = replace(config_from_hf({**ROWS["glm"].real, **SIZES, "head_dim": 16}), num_layers=1)
    rows = config.query_size + 2 * config.kv_size
    weight = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    bias = np.arange(rows, dtype=np.float32)
    source = either_qkv(Tensors({"blk.0.attn_qkv.weight": weight, "blk.0.attn_qkv.bias": bias}), config)
    first = 0
    for name, size in (("q", config.query_size), ("k", config.kv_size), ("v", config.kv_size)):
        part = slice(first, first + size)
        assert source.has(f"blk.0.attn_{name}.bias")
        found = source.view(f"blk.0.attn_{name}.weight", (size, 64)).dequantize()
        np.testing.assert_array_equal(found, weight[part])
        np.testing.assert_array_equal(source.view(f"blk.0.attn_{name}.bias", (size,)).dequantize(), bias[part])
        first += size
    plain = Tensors({"blk.0.attn_q.weight": weight})
    assert either_qkv(plain, config) is plain
    assert glm.FAMILY.gguf_source is either_qkv


@pytest.mark.full
def test_leading_dimensions_of_1_of_gguf_tensors_are_ignored(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", load_folder(row_folder("qwen2moe")[1]), QuantFormat.F32)
    file = open_gguf(tmp_path / "model.gguf")
    name = "blk.0.ffn_gate_inp_shexp.weight"
    entry = file.entries[name]
    assert entry.shape == (64,)
    for stored in ((64,), (1, 64)):
        tensors = GgufTensors(replace(file, entries={**file.entries, name: entry._replace(shape=stored)}))
        for shape in ((64,), (1, 64)):
            assert tensors.view(name, shape).shape == shape
        with pytest.raises(ModelFileError, match="where the metadata implies"):
            tensors.view(name, (64, 1))
