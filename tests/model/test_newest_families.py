"""Families with new kinds of layers beside their rows: variants, refusals, other names of tensors, sizes."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, row_folder, row_model, save_row
from newest_rows import NEWEST_ROWS
from test_wrong_fields import changed, check
from whole_prompt import prompt_logits

from bifolio.config import ModelConfig
from bifolio.errors import BifolioError, UnsupportedModelError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.reader import open_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.quant import QuantFormat
from helpers import random_prompt, transformers_logits

PROMPT, TOLERANCE = random_prompt(20), 1e-4
FULL, LINEAR, LOCAL = "full_attention", "linear_attention", "sliding_attention"


def logits(folder: Path) -> np.ndarray:
    return prompt_logits(load_folder(folder).weights, PROMPT)


VARIANTS: list[tuple[str, dict[str, Any], str]] = [  # the last is the reason why GGUF cannot describe it, or none
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "attention_bias": True, "num_key_value_heads": 4}, ""),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "layer_types": None,
                     "tie_word_embeddings": True}, ""),
    ("olmo_hybrid", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                     "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 16}, ""),
    ("bailing_hybrid", {"kda_safe_gate": False}, "decays without a bound"),
    ("bailing_hybrid", {"layer_types": None, "layer_group_size": 2, "norm_topk_prob": False, "n_group": 1,
                        "topk_group": 1, "short_conv_kernel_size": 3}, ""),
    ("bailing_hybrid", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "plain MLPs in the layers"),
    ("mistral4", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}, ""),
    ("mistral4", {"q_lora_rank": None, "tie_word_embeddings": True}, ""),
    ("longcat_flash", {"zero_expert_num": 0, "moe_topk": 2}, ""),
    ("longcat_flash", {"zero_expert_num": 0, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
                       "num_hidden_layers": 2, "num_layers": 1}, ""),
    ("cohere2_moe", {"rms_norm_eps": 1e-3, "num_shared_experts": 0, "attention_bias": True}, ""),
    ("cohere2_moe", {"expert_selection_fn": "softmax", "norm_topk_prob": False}, ""),
    ("cohere2_moe", {"norm_topk_prob": False, "shared_expert_combination_strategy": "sum"}, "experts that are added"),
    ("cohere2_moe", {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2}, ""),
    ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 2}, "no window and no rope"),
    ("cohere2_moe", {"prefix_dense_intermediate_size": None, "tie_word_embeddings": False}, ""),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "overrides", "refused"), VARIANTS)
def test_variants_from_folders_and_from_gguf_files(
    name: str, overrides: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    model = row_model(name, **overrides)
    save_row(name, model, tmp_path / "folder")
    theirs, loaded = transformers_logits(model, PROMPT), load_folder(tmp_path / "folder")
    assert loaded.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    np.testing.assert_allclose(prompt_logits(loaded.weights, PROMPT), theirs, atol=TOLERANCE)
    write_folder(tmp_path / "again", loaded, QuantFormat.F32)
    assert load_folder(tmp_path / "again").config == loaded.config
    np.testing.assert_allclose(logits(tmp_path / "again"), theirs, atol=TOLERANCE)
    if refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            write_gguf(tmp_path / "m.gguf", loaded, QuantFormat.F32)
        return
    write_gguf(tmp_path / "m.gguf", loaded, QuantFormat.F32)
    written = load_gguf(tmp_path / "m.gguf").weights
    np.testing.assert_allclose(prompt_logits(written, PROMPT), theirs, atol=TOLERANCE)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmo_hybrid", {"layer_types": ["conv"] * 32}, "kind 'conv'"),
    ("olmo_hybrid", {"layer_types": [FULL] * 32}, "no recurrent layer"),
    ("olmo_hybrid", {"mlp_bias": True}, "biases in its MLPs"),
    ("olmo_hybrid", {"sliding_window": 128}, "with windows is not supported"),
    ("bailing_hybrid", {"layer_types": ["conv"] * 24}, "kind 'conv'"),
    ("bailing_hybrid", {"no_kda_lora": False}, "no_kda_lora is False"),
    ("bailing_hybrid", {"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity"),
    ("bailing_hybrid", {"score_function": "softmax"}, "score_function is 'softmax'"),
    ("bailing_hybrid", {"moe_shared_expert_intermediate_size": 96}, "moe_shared_expert_intermediate_size"),
    ("bailing_hybrid", {"expert_swiglu_limit_list": [None, 7.0]}, "expert_swiglu_limit_list has limits"),
    ("bailing_hybrid", {"use_bias": True}, "use_bias is True"),
    ("bailing_hybrid", {"kda_lower_bound": 5}, "bound"),
    ("bailing_hybrid", {"kda_lower_bound": None, "kda_safe_gate": None, "short_conv_kernel_size": None},
     "Ling 2.5, with lightning attention"),
    ("mistral4", {"attention_bias": True}, "biases in attention"),
    ("mistral4", {"rope_interleave": False}, "rope_interleave is False"),
    ("mistral4", {"sliding_window": 4096}, "with windows"),
    ("longcat_flash", {"zero_expert_type": "copy"}, "zero_expert_type is 'copy'"),
    ("longcat_flash", {"mla_scale_kv_lora": False}, "mla_scale_kv_lora is False"),
    ("longcat_flash", {"router_bias": True}, "bias of the router"),
    ("longcat_flash", {"zero_expert_num": 1 << 20}, "return their input"),
    ("longcat_flash", {"num_layers": 0}, "num_layers"),
    ("cohere2_moe", {"expert_selection_fn": "sparsemax"}, "by 'sparsemax'"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "product"}, "combination 'product'"),
    ("cohere2_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED)
def test_unsupported_models_are_refused_by_name(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        config_from_hf({**ROWS[name].real, **overrides})


@pytest.mark.parametrize("name", NEWEST_ROWS)
def test_real_descriptions_are_written_and_read_again(name: str) -> None:
    config = config_from_hf(ROWS[name].real)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.full
@pytest.mark.parametrize("name", NEWEST_ROWS)
def test_wrong_values_of_fields_are_named_errors(name: str) -> None:
    for message, raw in changed(ROWS[name].real):
        check(message, partial(config_from_hf, raw))


@pytest.mark.parametrize(
    ("theta", "num_ropes"),
    [({}, 1), ({"rope_parameters": None}, 1), ({"rope_theta": None}, 0), ({"rope_theta": 5e5}, 1),
     ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, 0),
     ({"rope_parameters": {"rope_type": "default"}}, 1)],
)  # fmt: skip
def test_olmo_hybrid_has_no_rope_where_its_base_is_null(theta: dict[str, Any], num_ropes: int) -> None:
    """As in the class of transformers, which has a base by default."""
    real = {field: value for field, value in ROWS["olmo_hybrid"].real.items() if field != "rope_parameters"}
    assert len(config_from_hf({**real, **theta}).ropes) == num_ropes


def test_the_sizes_of_real_models() -> None:
    def of(name: str) -> ModelConfig:
        return config_from_hf(ROWS[name].real)

    assert round(of("olmo_hybrid").num_parameters / 1e9, 1) == 7.4
    assert round(of("bailing_hybrid").num_parameters / 1e9, 1) == 7.9  # Ling 3 Tiny: 7.9 billion, 1.3 of them active
    assert round(of("mistral4").num_parameters / 1e9) == 119
    assert round(of("cohere2_moe").num_parameters / 1e9) == 30
    assert round(of("longcat_flash").num_parameters / 1e9) == 561


def test_the_text_part_of_mistral_small_4_is_its_own_family() -> None:
    inner = ROWS["mistral4"].real
    outer = {"model_type": "mistral3", "text_config": inner, "vision_config": {}}
    from bifolio.model.families import family_of_folder

    assert family_of_folder(outer).name == "mistral4"
    assert family_of_folder({**outer, "text_config": {**inner, "model_type": "ministral3"}}).name == "mistral3"
    assert config_from_hf(outer) == config_from_hf(inner)


def test_the_text_parts_of_models_of_cohere_for_images() -> None:
    for name in ("cohere2", "cohere2_moe"):
        outer = {"model_type": "cohere2_vision", "text_config": ROWS[name].real, "vision_config": {}}
        assert config_from_hf(outer) == config_from_hf(ROWS[name].real)
        assert config_from_hf(outer).architecture == name


def renamed(folder: Path, target: Path, change: Any) -> Path:
    """A copy of a folder with other names of tensors."""
    shutil.copytree(folder, target)
    tensors = open_safetensors(folder / "model.safetensors").tensors
    values = {change(name): np.array(tensor.dequantize()) for name, tensor in tensors.items()}
    assert values.keys() != tensors.keys()
    write_safetensors(target / "model.safetensors", values)
    return target


@pytest.mark.full
def test_norms_of_olmo_hybrid_have_either_name(tmp_path: Path) -> None:
    _, folder = row_folder("olmo_hybrid")

    def other(name: str) -> str:
        for one, two in (("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm",
                                                                        "feedforward_layer_norm")):  # fmt: skip
            if ".layers.2." not in name:  # the layer with attention
                name = name.replace(two, one) if two in name else name.replace(one, two)
        return name

    np.testing.assert_array_equal(logits(renamed(folder, tmp_path / "renamed", other)), logits(folder))


@pytest.mark.full
def test_the_output_projection_of_ling_3_has_either_name(tmp_path: Path) -> None:
    _, folder = row_folder("bailing_hybrid")

    def other(name: str) -> str:
        name = name.replace(".dense.", ".o_proj.").replace("model.word_embeddings.", "model.embed_tokens.")
        return name.replace(".attention.", ".self_attn.")

    np.testing.assert_array_equal(logits(renamed(folder, tmp_path / "renamed", other)), logits(folder))


@pytest.mark.full
def test_ling_3_may_compress_its_queries(tmp_path: Path) -> None:
    """Released models do, and the class of transformers does not: the product of two matrices is a query matrix."""
    _, folder = row_folder("bailing_hybrid")
    shutil.copytree(folder, tmp_path / "low")
    rank, rng = 12, np.random.default_rng(1)
    stored = open_safetensors(folder / "model.safetensors").tensors
    tensors = {name: np.array(tensor.dequantize()) for name, tensor in stored.items()}
    name = "model.layers.2.attention.q_proj.weight"
    rows, columns = tensors[name].shape
    up, down = rng.standard_normal((rows, rank)) * 0.3, rng.standard_normal((rank, columns)) * 0.3
    low = {key: value for key, value in tensors.items() if key != name}
    low["model.layers.2.attention.q_a_proj.weight"] = down.astype(np.float32)
    low["model.layers.2.attention.q_b_proj.weight"] = up.astype(np.float32)
    low["model.layers.2.attention.q_a_layernorm.weight"] = np.ones(rank, np.float32)
    write_safetensors(tmp_path / "low" / "model.safetensors", low)
    path = tmp_path / "low" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "q_lora_rank": rank}))
    loaded = load_folder(tmp_path / "low")
    latent = loaded.weights.layers[2].latent
    assert latent is not None
    assert latent.query_down is not None
    assert np.isfinite(prompt_logits(loaded.weights, PROMPT)).all()
    write_gguf(tmp_path / "low.gguf", loaded, QuantFormat.F32)
    found = prompt_logits(load_gguf(tmp_path / "low.gguf").weights, PROMPT)
    np.testing.assert_allclose(found, prompt_logits(loaded.weights, PROMPT), atol=TOLERANCE)


@pytest.mark.full
def test_gguf_files_of_ling_3_hold_positive_decays(tmp_path: Path) -> None:
    """As those of llama.cpp's converter, which has no logarithms either."""
    _, folder = row_folder("bailing_hybrid")
    write_gguf(tmp_path / "m.gguf", load_folder(folder), QuantFormat.F32)
    file = open_gguf(tmp_path / "m.gguf")
    decay = file.tensor("blk.0.ssm_a")
    assert decay.shape == (4, 1)
    assert (decay.dequantize() > 0).all()
    assert file.tensor("blk.0.ssm_conv1d_q.weight").shape[-1] == 4


def test_the_text_part_of_kimi_k25_is_that_of_kimi_k2() -> None:
    inner = ROWS["kimi_k2"].real
    outer = {"model_type": "kimi_k25", "text_config": inner, "vision_config": {}}
    assert config_from_hf(outer) == config_from_hf(inner)
    assert config_from_hf({**outer, "text_config": {**inner, "model_type": "deepseek_v3"}}) == config_from_hf(inner)
