"""Blocks of attention and an MLP that layers share: their matrices are held and prepared once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bifolio.config import ModelConfig, RecurrentConfig, RopeConfig, SharedBlockConfig, layers_of
from bifolio.errors import ConfigError
from bifolio.model.families.zamba2 import FAMILY
from bifolio.model.shards import check_size
from bifolio.model.tensor_names import assemble, network_tensors
from bifolio.model.weights import ModelWeights, prepare
from bifolio.quant.tensor import QuantizedTensor
from helpers import cpu_kernel_names, make_kernels

ATTENDS = (False, True, True, False, True)
CONFIG = ModelConfig(
    "zamba2", vocab_size=11, hidden_size=8, num_layers=5, num_heads=2, num_kv_heads=2, head_dim=8,
    intermediate_size=12, max_position=32, activation="gelu", ropes=(RopeConfig(rotary_dim=8),), tie_embeddings=True,
    layers=layers_of(5, attention=ATTENDS, recurrent=(True,) * 5, mlp=ATTENDS),
    recurrent=RecurrentConfig("mamba", 4, 32, heads=4, groups=1, key_size=8, value_size=4, norm_first=False,
                              conv_bias=True),
    shared_blocks=SharedBlockConfig(2, 3, adapts_attention=True),
)  # fmt: skip


def random_weights(config: ModelConfig) -> ModelWeights:
    rng = np.random.default_rng(1)

    def vector(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def fetch(name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return QuantizedTensor.from_array(vector(name, shape))

    return assemble(config, FAMILY.hf_names, fetch, vector)


@pytest.mark.parametrize("kernels", cpu_kernel_names())
def test_matrices_of_a_block_are_held_and_prepared_once(kernels: str) -> None:
    weights = random_weights(CONFIG)
    first, second, third = (weights.layers[layer] for layer in CONFIG.attention_layers)
    for role in ("qkv", "output", "up", "down"):
        parts, others = getattr(first, role).parts, getattr(second, role).parts
        assert all(one is again for one, again in zip(parts, getattr(third, role).parts, strict=True))
        assert not any(one is other for one, other in zip(parts, others, strict=True))
    sizes = [np.prod(matrix.shape) for matrix in weights.matrices()]
    matrices = [shape for name, shape in network_tensors(CONFIG, FAMILY.hf_names).items() if len(shape) == 2]
    assert sum(sizes) == sum(np.prod(shape) for shape in matrices)
    prepared = prepare(weights, make_kernels(kernels)).layers
    for role in ("qkv", "output", "up", "down"):
        one, again = (getattr(prepared[layer], role) for layer in (1, 4))
        assert all(part is other for part, other in zip(one.parts, again.parts, strict=True))


def test_parameters_are_counted_once() -> None:
    stored = sum(int(np.prod(shape)) for shape in network_tensors(CONFIG, FAMILY.hf_names).values())
    assert CONFIG.num_parameters == stored


def test_ranks_and_other_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="share blocks"):
        check_size(CONFIG, 2)
    with pytest.raises(ConfigError, match="share blocks of attention"):
        replace(CONFIG, layers=layers_of(5, attention=ATTENDS, recurrent=(True,) * 5))
    with pytest.raises(ConfigError, match="plain"):
        replace(CONFIG, attention_gate=True)
    with pytest.raises(ConfigError, match="blocks, not 0"):
        SharedBlockConfig(0, 3)
    with pytest.raises(ConfigError, match="rank"):
        SharedBlockConfig(1, 0)
