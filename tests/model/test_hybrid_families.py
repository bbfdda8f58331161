"""Hybrid families beside their rows: folders of whole models, variants, layers that are not used, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, row_folder, row_model, save_row
from test_family_rows import LENGTH, worst_chunks
from whole_prompt import prompt_logits

from bifolio.errors import BifolioError, UnsupportedModelError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.quant import QuantFormat
from helpers import cpu_kernel_names, make_kernels, random_prompt, transformers_logits

pytestmark = pytest.mark.full  # transformers is slow to import
PROMPT = random_prompt(20)
TOLERANCE = 1e-4


def logits(folder: Path) -> np.ndarray:
    return prompt_logits(load_folder(folder).weights, PROMPT)


def rewritten(
    folder: Path, target: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], wrap: bool = False
) -> Path:
    """A copy of a folder with other tensors; with `wrap` as the text part of a model of text and images."""
    shutil.copytree(folder, target)
    tensors = open_safetensors(folder / "model.safetensors").tensors
    write_safetensors(
        target / "model.safetensors", change({name: np.array(t.dequantize()) for name, t in tensors.items()})
    )
    if wrap:
        inner = json.loads((target / "config.json").read_text())
        outer = {"model_type": inner["model_type"].removesuffix("_text"), "text_config": inner, "vision_config": {}}
        (target / "config.json").write_text(json.dumps(outer))
    return target


def test_the_text_part_of_a_model_for_images_is_read_without_its_other_tensors(tmp_path: Path) -> None:
    _, folder = row_folder("qwen35")
    others = {"model.visual.merger.weight": np.ones((2, 2), np.float32), "mtp.fc.weight": np.ones((2, 2), np.float32)}

    def whole(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
        return renamed | others

    found = logits(rewritten(folder, tmp_path / "whole", whole, wrap=True))
    np.testing.assert_array_equal(found, logits(folder))


def test_experts_of_a_folder_may_lie_in_one_tensor(tmp_path: Path) -> None:
    _, folder = row_folder("qwen35moe")

    def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts."
            by_role = {
                role: np.stack([tensors[f"{prefix}{e}.{role}_proj.weight"] for e in range(6)])
                for role in ("gate", "up", "down")
            }
            found[prefix + "gate_up_proj"] = np.concatenate([by_role["gate"], by_role["up"]], axis=1)
            found[prefix + "down_proj"] = by_role["down"]
        return found

    np.testing.assert_array_equal(logits(rewritten(folder, tmp_path / "fused", fused)), logits(folder))


def test_the_heads_of_a_gguf_file_stay_in_its_order(tmp_path: Path) -> None:
    """Matrices are views of the file, though its heads are in another order than those of a folder."""
    _, folder = row_folder("qwen35")
    source = load_folder(folder)
    write_gguf(tmp_path / "m.gguf", source, QuantFormat.F16)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert source.config.recurrent is not None
    assert loaded.config.recurrent is not None
    assert (source.config.recurrent.tiled, loaded.config.recurrent.tiled) == (False, True)
    ours, theirs = (model.weights.layers[0].recurrent for model in (source, loaded))
    assert ours is not None
    assert theirs is not None
    assert not any(part.data.flags.owndata for part in (*theirs.input.parts, *theirs.output.parts))
    order = [0, 2, 1, 3]  # two groups of two heads
    np.testing.assert_array_equal(theirs.recurrence.decay, ours.recurrence.decay[order])
    write_folder(tmp_path / "back", loaded, QuantFormat.F32)
    np.testing.assert_allclose(logits(tmp_path / "back"), prompt_logits(loaded.weights, PROMPT), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_layers_that_predict_ahead_are_not_used(name: str, tmp_path: Path) -> None:
    source = load_folder(row_folder(name)[1])
    write_gguf(tmp_path / "m.gguf", source, QuantFormat.F32)
    more = {f"{name}.block_count": 5, f"{name}.nextn_predict_layers": 1}
    write_gguf(tmp_path / "ahead.gguf", source, QuantFormat.F32, extra=more)
    plain, ahead = load_gguf(tmp_path / "m.gguf"), load_gguf(tmp_path / "ahead.gguf")
    assert ahead.config == plain.config


VARIANTS: list[tuple[str, dict[str, Any], str]] = [  # the last is the reason why GGUF cannot describe it, or none
    ("lfm2", {"conv_bias": True, "conv_L_cache": 4}, "conv_bias = True"),
    ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16}, ""),
    ("lfm3", {"attention_bias": True, "tie_word_embeddings": False, "norm_eps": 1e-2}, ""),
    ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "conv_L_cache": 5}, ""),
    ("lfm3", {"layer_types": ["conv", "sliding_attention", "conv", "sliding_attention"]}, ""),
    ("lfm3", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, ""),
    ("lfm3", {"layer_types": None, "num_hidden_layers": 5}, ""),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}}, ""),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 3.0},
                                  "sliding_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}}},
     "a rope of divided frequencies in the layers with a window"),
    ("lfm3", {"conv_bias": True}, "conv_bias = True"),
    ("qwen3next", {"mlp_only_layers": [1], "attention_bias": True}, "plain MLPs in the layers"),
    ("qwen35", {"linear_value_head_dim": 24}, "keys and values differ in size"),
    ("qwen35", {"linear_num_key_heads": 4, "tie_word_embeddings": True}, ""),
    ("kimi_linear", {"norm_topk_prob": False}, "do not add up to 1"),
    ("kimi_linear", {"q_lora_rank": 12, "n_group": 1, "linear_conv_kernel_dim": 3}, ""),
    ("kimi_linear", {"linear_num_heads": 2}, "2 recurrent heads beside 4"),
    ("kimi_linear", {"layer_types": None, "num_hidden_layers": 5, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3},
     ""),
    ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "plain MLPs in the layers"),
    ("granitehybrid", {"position_embedding_type": "rope", "attention_bias": True}, ""),
    ("granitehybrid", {"mamba_n_groups": 2}, ""),
    ("granitehybrid", {"mamba_conv_bias": False}, "convolution has no bias"),
    ("granitehybrid", {"time_step_limit": [0.4, 1.2]}, "dt_limits"),
    ("granitehybrid", {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}, "no recurrent layers"),
    ("bamba", {"mamba_n_groups": 2, "tie_word_embeddings": True}, ""),
    ("bamba", {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "partial_rotary_factor": 0.25}, ""),
    ("bamba", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4,
                                   "partial_rotary_factor": 0.75}}, ""),
    ("bamba", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}, ""),
    ("bamba", {"mamba_proj_bias": True}, "projection_bias = True"),
    ("bamba", {"time_step_limit": [0.4, 1.2]}, "dt_limits"),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, ""),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "norm comes before the gate"),
    ("falcon_h1", {"time_step_limit": [0.4, 1.2]}, "dt_limits"),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True}, "projection_bias = True"),
    ("nemotron_h", {"mlp_bias": True, "mamba_head_dim": 24}, ""),
    ("nemotron_h with experts", {"n_group": 3, "topk_group": 2}, "num_groups = 3"),
    ("nemotron_h with experts", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]}, "plain MLPs in"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "refused"), VARIANTS)
def test_variants_from_folders_and_from_gguf_files(
    name: str, overrides: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    model = row_model(name, **overrides)
    if "mamba_n_groups" in overrides and not hasattr(model.model.layers[0].mamba.norm, "group_size"):
        pytest.skip("this release of transformers norms all heads at once, whatever the number of groups")
    save_row(name, model, tmp_path / "folder")
    theirs, loaded = transformers_logits(model, PROMPT), load_folder(tmp_path / "folder")
    assert loaded.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    np.testing.assert_allclose(prompt_logits(loaded.weights, PROMPT), theirs, atol=TOLERANCE)
    if refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            write_gguf(tmp_path / "m.gguf", loaded, QuantFormat.F32)
        return
    write_gguf(tmp_path / "m.gguf", loaded, QuantFormat.F32)
    written = load_gguf(tmp_path / "m.gguf").weights
    np.testing.assert_allclose(prompt_logits(written, PROMPT), theirs, atol=TOLERANCE)


def test_factors_of_a_folder_in_half_precision_are_put_into_its_weights() -> None:
    """Weights keep their type; each is rounded once more."""
    import safetensors.torch

    model, folder = row_folder("falcon_h1")
    target = folder.parent / f"{folder.name}-bf16"
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({name: t.bfloat16() for name, t in tensors.items()}, target / "model.safetensors")
    loaded = load_folder(target)
    layer = loaded.weights.layers[0]
    assert {part.format for part in (*layer.qkv.parts, *layer.up.parts)} == {QuantFormat.BF16}
    found = prompt_logits(loaded.weights, PROMPT)
    np.testing.assert_allclose(found, transformers_logits(model, PROMPT), atol=0.1)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [("lfm3", ("layer_types", "rope_parameters", "head_dim", "num_key_value_heads", "sliding_window", "conv_L_cache",
               "norm_eps", "use_sandwich_norm", "use_attention_gate", "max_position_embeddings", "bos_token_id",
               "eos_token_id", "tie_word_embeddings")),
     ("bamba", ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "mamba_n_heads", "mamba_d_head",
                "mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "rope_theta",
                "tie_word_embeddings", "hidden_act")),
     ("kimi_linear", ("rms_norm_eps", "model_max_length", "first_k_dense_replace", "moe_renormalize",
                      "num_expert_group", "num_shared_experts", "q_lora_rank", "topk_group", "hidden_act",
                      "bos_token_id", "eos_token_id"))],
)  # fmt: skip
def test_fields_that_a_folder_leaves_out_have_the_defaults_of_their_class(name: str, left_out: tuple[str, ...]) -> None:
    """Here the real model has the default values."""
    raw = ROWS[name].real
    assert set(left_out) <= raw.keys()
    short = {field: value for field, value in raw.items() if field not in left_out}
    assert config_from_hf(short) == config_from_hf(raw)


def test_folders_keep_the_limits_of_time_steps(tmp_path: Path) -> None:
    """The decay is stored as its logarithm: libraries round log and exp differently, so logits are only close."""
    for name in ("bamba", "granitehybrid"):
        model = row_model(name, time_step_limit=[0.4, 1.2])
        save_row(name, model, tmp_path / name)
        source = load_folder(tmp_path / name)
        write_folder(tmp_path / f"{name} again", source, QuantFormat.F32)
        again = load_folder(tmp_path / f"{name} again")
        assert again.config.recurrent is not None
        assert again.config.recurrent.dt_limits == (0.4, 1.2)
        assert again.config == source.config
        np.testing.assert_allclose(logits(tmp_path / f"{name} again"), logits(tmp_path / name), atol=TOLERANCE)


@pytest.mark.parametrize("kernels", cpu_kernel_names())
def test_heads_that_are_rotated_in_part_as_neighbouring_pairs(kernels: str, tmp_path: Path) -> None:
    """A GGUF file of Bamba, whose rows are in another order than those of the folder."""
    model, folder = row_folder("bamba")
    write_gguf(tmp_path / "m.gguf", load_folder(folder), QuantFormat.F32)
    loaded = load_gguf(tmp_path / "m.gguf")
    assert (loaded.config.architecture, loaded.config.rope_interleaved) == ("granitehybrid", True)
    assert loaded.config.ropes[0].rotary_dim == loaded.config.head_dim // 2
    theirs = transformers_logits(model, random_prompt(LENGTH + 7))
    assert worst_chunks(loaded, theirs, (1, 4, LENGTH), 4, make_kernels(kernels)) < TOLERANCE


def test_gates_may_have_the_name_of_the_class(tmp_path: Path) -> None:
    _, folder = row_folder("lfm3")

    def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert "model.layers.1.self_attn.gate_proj.weight" in tensors
        return {name.replace("gate_proj", "g_proj"): value for name, value in tensors.items()}

    np.testing.assert_array_equal(logits(rewritten(folder, tmp_path / "renamed", renamed)), logits(folder))


def test_plain_mlps_of_kimi_linear_may_have_the_names_of_experts(tmp_path: Path) -> None:
    """transformers saves them so; released folders, and ours, have the usual names."""
    _, folder = row_folder("kimi_linear")
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in open_safetensors(folder / "model.safetensors").tensors
    write_folder(tmp_path / "again", load_folder(folder), QuantFormat.F32)
    assert "model.layers.0.mlp.up_proj.weight" in open_safetensors(tmp_path / "again" / "model.safetensors").tensors
    np.testing.assert_allclose(logits(tmp_path / "again"), logits(folder), atol=TOLERANCE)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("falcon_h1", {"mlp_bias": True}, "biases"),
    ("nemotron_h with experts", {"moe_latent_size": 64}, "experts over latents"),
    ("nemotron_h with experts", {"mlp_bias": True}, "biases in its experts"),
    ("nemotron_h", {"hybrid_override_pattern": "M-R*"}, "kind 'R'"),
    ("nemotron_h", {"hybrid_override_pattern": None}, "which layers are recurrent"),
    ("nemotron_h", {"hybrid_override_pattern": "----", "num_hidden_layers": 4}, "without any attention or"),
    ("nemotron_h", {"mamba_num_heads": 12}, "12 recurrent heads cannot share 8"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1: it must be an integer from 2"),
    ("lfm3", {"layer_types": ["conv", "linear_attention"] * 12}, "kind 'linear_attention'"),
    ("lfm3", {"sliding_window": None}, "how long its window is"),
    ("lfm3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0},
                                  "sliding_attention": {"rope_type": "default"}}}, "'yarn' is not supported"),
    ("lfm3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "no field 'rope_parameters.full"),
    ("lfm2moe", {"layer_types": ["conv"] * 23}, "kinds of 24 layers, not of 23"),
    ("qwen3next", {"layer_types": ["full_attention"]}, "kinds of 48 layers, not of 1,"),
    ("nemotron_h", {"attention_bias": True}, "biases in attention"),
    ("granitehybrid", {"layer_types": ["attention"] * 40}, "without positions"),
    ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False: kimi_linear models are supported with True only"),
    ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
    ("kimi_linear", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
    ("kimi_linear", {"attention_bias": True}, "biases in attention"),
    ("kimi_linear", {"layer_types": ["conv"] * 27}, "kind 'conv'"),
    ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 4]}}, "each of 27 layers"),
    ("kimi_linear", {"linear_attn_config": {"head_dim": 0}}, "linear_attn_config.head_dim is 0"),
    ("bamba", {"attn_layer_indices": list(range(32))}, "no recurrent layer"),
    ("bamba", {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED)
def test_impossible_and_unsupported_models_are_refused(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        config_from_hf({**ROWS[name].real, **overrides})


@pytest.mark.parametrize(
    ("key", "value"),
    [("ssm.time_step_rank", 0), ("ssm.time_step_rank", 3), ("ssm.group_count", 3), ("full_attention_interval", 0),
     ("ssm.conv_kernel", 1), ("attention.recurrent_layers", np.array([True]))],
)  # fmt: skip
def test_damaged_descriptions_of_gguf_files_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    source = load_folder(row_folder("qwen35")[1])
    write_gguf(tmp_path / "m.gguf", source, QuantFormat.F32, extra={f"qwen35.{key}": value})
    with pytest.raises(BifolioError):
        load_gguf(tmp_path / "m.gguf")
