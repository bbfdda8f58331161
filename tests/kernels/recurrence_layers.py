"""Recurrent layers of transformers with random weights, and the same layers as `Recurrence` and its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import FalconH1Config, GraniteMoeHybridConfig, Lfm2Config, NemotronHConfig, Qwen3_5TextConfig
from transformers import Qwen3NextConfig as QwenNextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from bifolio.kernels.interface import Norm, Recurrence

SIZE = 24  # of the hidden states


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of transformers, and ours."""

    theirs: Any
    in_proj: np.ndarray  # [in_features, SIZE], rows in our order
    recurrence: Recurrence
    out_proj: np.ndarray  # [SIZE, out_features]

    def expected(self, hidden: np.ndarray) -> np.ndarray:
        """[t, SIZE]: one sequence from the empty state, computed by transformers in f64."""
        with torch.no_grad():
            return self.theirs.double()(torch.from_numpy(hidden).double()[None])[0].numpy()


def random_layer(module: Any, seed: int) -> Any:
    """Random parameters in the ranges of trained models: slow and fast decay, both signs of the projections."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                values = torch.rand(parameter.shape, generator=generator) * 3 - 2
            elif name in ("norm.weight", "o_norm.weight", "D"):
                values = 1 + 0.3 * values
            elif "proj" in name:
                values = 1.5 * values / SIZE**0.5
            parameter.copy_(values)
    return module.eval()


def values_of(parameter: Any) -> np.ndarray:
    return parameter.detach().float().numpy().copy()


def delta_layer(qwen35: bool) -> Layer:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    shared = {**sizes, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"]}
    config_class, layer_class = (
        (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet) if qwen35 else (QwenNextConfig, Qwen3NextGatedDeltaNet)
    )
    layer = random_layer(layer_class(config_class(hidden_size=SIZE, num_hidden_layers=1, **shared), 0), 3)
    groups, heads, key, value = 2, 4, 8, 12
    if qwen35:
        parts = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
        in_proj = np.concatenate([values_of(part.weight) for part in parts])
    else:
        own = heads // groups * value  # rows of a group's values: [q | k | v | z] of each group, [b | a] of each group
        mixed = values_of(layer.in_proj_qkvz.weight).reshape(groups, -1, SIZE)
        gates = values_of(layer.in_proj_ba.weight).reshape(groups, -1, SIZE)
        parts = [*np.split(mixed, [key, 2 * key, 2 * key + own], axis=1), *np.split(gates, 2, axis=1)]
        in_proj = np.concatenate([part.reshape(-1, SIZE) for part in parts])
    recurrence = Recurrence(
        "delta", 1, 4, 2 * groups * key + heads * value, heads, groups, key, value,
        values_of(layer.conv1d.weight)[:, 0], None, -np.exp(values_of(layer.A_log)), values_of(layer.dt_bias),
        norm=Norm(values_of(layer.norm.weight), None, layer.layer_norm_epsilon),
    )  # fmt: skip
    return Layer(layer, in_proj, recurrence, values_of(layer.out_proj.weight))


def keyed_layer() -> Layer:
    heads, size = 3, 8
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = theirs.KimiLinearConfig(
        hidden_size=SIZE, num_hidden_layers=1, linear_head_dim=size, linear_num_heads=heads, rms_norm_eps=1e-3,
        layer_types=["linear_attention"],
    )  # fmt: skip
    layer = random_layer(theirs.KimiLinearDeltaAttention(config, 0), 3)
    gates = layer.forget_gate
    q, k, v, beta = (values_of(part.weight) for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj))
    z = values_of(layer.g_b_proj.weight) @ values_of(layer.g_a_proj.weight)
    a = values_of(gates.f_b_proj.weight) @ values_of(gates.f_a_proj.weight)
    recurrence = Recurrence(
        "keyed", 1, 4, 3 * heads * size, heads, heads, size, size, values_of(layer.conv1d.weight)[:, 0], None,
        -np.exp(values_of(gates.A_log)).reshape(-1), values_of(gates.dt_bias),
        norm=Norm(values_of(layer.o_norm.weight), None, 1e-3),
    )  # fmt: skip
    return Layer(layer, np.concatenate([q, k, v, z, beta, a]), recurrence, values_of(layer.o_proj.weight))


def conv_layer(width: int) -> Layer:
    config = Lfm2Config(hidden_size=SIZE, num_hidden_layers=1, conv_L_cache=width, layer_types=["conv"])
    layer = random_layer(Lfm2ShortConv(config, 0), 4)
    recurrence = Recurrence("conv", 1, width, SIZE, conv_weight=values_of(layer.conv.weight)[:, 0])
    return Layer(layer, values_of(layer.in_proj.weight), recurrence, values_of(layer.out_proj.weight))


def mamba_layer(family: str) -> Layer:
    heads, value, key, groups, width = 6, 8, 16, 2, 4
    names = {"mamba_n_heads": heads, "mamba_d_head": value, "mamba_d_state": key, "mamba_n_groups": groups}
    if family == "granite":
        config = GraniteMoeHybridConfig(hidden_size=SIZE, num_hidden_layers=1, layer_types=["mamba"], **names)
        layer = GraniteMoeHybridMambaLayer(config, 0)
    elif family == "nemotron":
        config = NemotronHConfig(
            hidden_size=SIZE, layers_block_type=["mamba"], mamba_num_heads=heads, mamba_head_dim=value,
            ssm_state_size=key, n_groups=groups, conv_kernel=width,
        )  # fmt: skip
        layer = NemotronHMamba2Mixer(config, 0)
    else:
        norm = {"mamba_rms_norm": family != "falcon without norm", "mamba_norm_before_gate": family == "falcon"}
        config = FalconH1Config(
            hidden_size=SIZE, num_hidden_layers=1, mamba_d_ssm=heads * value, ssm_in_multiplier=0.7,
            ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.9], **names, **norm,
        )  # fmt: skip
        layer = FalconH1Mixer(config, 0)
        layer.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    layer = random_layer(layer, 5)
    in_proj = values_of(layer.in_proj.weight)
    if family.startswith("falcon"):
        in_proj *= config.ssm_in_multiplier * values_of(layer.mup_vector)[0, 0][:, None]
    has_norm = family != "falcon without norm"
    # Older releases of transformers norm all heads of a Granite layer at once, whatever the number of groups.
    norm_groups = groups if family != "granite" or hasattr(layer.norm, "group_size") else 1
    recurrence = Recurrence(
        "mamba", 1, width, heads * value + 2 * groups * key, heads, groups, key, value,
        values_of(layer.conv1d.weight)[:, 0], values_of(layer.conv1d.bias), -np.exp(values_of(layer.A_log)),
        values_of(layer.dt_bias), values_of(layer.D),
        Norm(values_of(layer.norm.weight), None, layer.norm.variance_epsilon) if has_norm else None,
        norm_first=family == "falcon", norm_groups=norm_groups,
        dt_limits=tuple(layer.time_step_limit),
    )  # fmt: skip
    return Layer(layer, in_proj, recurrence, values_of(layer.out_proj.weight))


LAYERS = {
    "qwen3_next": lambda: delta_layer(False),
    "qwen3_5": lambda: delta_layer(True),
    "kimi_linear": keyed_layer,
    "lfm2": lambda: conv_layer(3),
    "lfm2 of width 7": lambda: conv_layer(7),
    "granitemoehybrid": lambda: mamba_layer("granite"),
    "nemotron_h": lambda: mamba_layer("nemotron"),
    "falcon_h1": lambda: mamba_layer("falcon"),
    "falcon_h1, gate first": lambda: mamba_layer("falcon gate first"),
    "falcon_h1 without norm": lambda: mamba_layer("falcon without norm"),
}
