"""Networks with experts, cached latents and attention sinks against transformers, on the CPU kernel sets."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.api.llm import LLM
from bifolio.errors import BifolioError, UnsupportedModelError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.model.huggingface.scaled_tensors import ggml_blocks
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.sampling_params import SamplingParams
from helpers import (
    cpu_kernel_names,
    fresh_folder,
    likeliest_tokens,
    make_kernels,
    make_runner,
    open_entry,
    random_prompt,
    run_chunks,
    tiny_model,
    transformers_logits,
)
from moe_models import MOE_ARCHITECTURES

LENGTH = 13
TOLERANCE = 1e-4
pytestmark = pytest.mark.full  # transformers is slow to import
SETS = [name for name in cpu_kernel_names() if name != "reference"]  # test_architectures.py runs the reference
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("architecture", MOE_ARCHITECTURES)
def test_every_chunk_and_block_size_gives_transformers_logits(architecture: str, kernels: str) -> None:
    """On a deterministic set the bits are those of the whole prompt, too."""
    model, folder = tiny_model(architecture)
    prompt = random_prompt(LENGTH)
    theirs, loaded = transformers_logits(model, prompt), load_folder(folder)
    whole: np.ndarray | None = None
    for block_size in (1, 4, 16):
        runner, blocks = make_runner(loaded, kernels=make_kernels(kernels), block_size=block_size, poison=True)
        for chunk_size in range(1, LENGTH + 1):
            entry = open_entry(runner, blocks)
            ours = run_chunks(runner, entry, prompt, chunk_size, decode=chunk_size == 1)
            assert worst(ours, theirs) < TOLERANCE, f"chunks of {chunk_size}, blocks of {block_size}"
            whole = ours if whole is None else whole
            assert not runner.kernels.deterministic or np.array_equal(ours, whole)
            blocks.release(entry.sequence_id)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("architecture", MOE_ARCHITECTURES)
def test_the_same_64_greedy_tokens_as_transformers(architecture: str, kernels: str) -> None:
    """In the recorded programs, with prompts of several lengths in one batch."""
    model, folder = tiny_model(architecture)
    prompts = [random_prompt(length, seed=length) for length in (LENGTH, 1, 17)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    llm = LLM(
        folder, kernels=make_kernels(kernels), block_size=4, chunk_size=5, max_num_seqs=3, poison_free_blocks=True
    )
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 64
        assert tokens == likeliest_tokens(model, prompt, tokens)


VARIANTS: list[tuple[str, dict[str, Any], str]] = [  # the last is the reason why GGUF cannot describe it, or none
    ("qwen3moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, "plain MLPs in the layers"),
    ("qwen3moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, "plain MLPs in the layers"),
    ("qwen3moe", {"norm_topk_prob": False}, "add up to 1"),
    ("mixtral", {"sliding_window": 5}, ""),
    ("glm4moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": False, "norm_topk_prob": False}, ""),
    ("deepseek2", {"q_lora_rank": None, "first_k_dense_replace": 0}, ""),
    ("deepseek2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
                   "routed_scaling_factor": 2.5}, ""),
    ("deepseek2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}, ""),
    ("glm4moelite", {}, ""),
    ("glm4moelite", {"mlp_layer_types": ["dense", "sparse", "dense"]}, "plain MLPs in the layers"),
    ("gptoss", {"rope_parameters": {**YARN, "truncate": False}}, ""),
    ("gptoss", {"rope_parameters": YARN, "num_experts_per_tok": 4, "num_hidden_layers": 3}, "whole dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "overrides", "refused"), VARIANTS)
def test_variants_from_folders_and_from_gguf_files(
    architecture: str, overrides: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    model, folder = tiny_model.__wrapped__(architecture, **deepcopy(overrides))
    prompt, loaded = random_prompt(LENGTH), load_folder(folder)
    theirs = transformers_logits(model, prompt)
    runner, blocks = make_runner(loaded, poison=True)
    assert worst(run_chunks(runner, open_entry(runner, blocks), prompt, 4), theirs) < TOLERANCE
    if refused:
        with pytest.raises(UnsupportedModelError, match=refused):
            write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
        return
    write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
    runner, blocks = make_runner(load_gguf(tmp_path / "model.gguf"), poison=True)
    assert worst(run_chunks(runner, open_entry(runner, blocks), prompt, 4), theirs) < TOLERANCE


def test_experts_of_a_gguf_file_are_views_of_it(tmp_path: Path) -> None:
    loaded = load_folder(tiny_model("qwen3moe")[1])
    write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.Q8_0)
    layer = load_gguf(tmp_path / "model.gguf").weights.layers[1]
    assert layer.moe is not None
    for linear in (*layer.moe.experts.up, *layer.moe.experts.down):
        for part in linear.parts:
            assert part.format is QuantFormat.Q8_0
            assert not part.data.flags.owndata
            assert not part.data.flags.writeable
    assert layer.moe.router.parts[0].format is QuantFormat.F32


def test_mxfp4_experts_of_a_folder_keep_their_blocks(tmp_path: Path) -> None:
    """A folder whose experts are blocks and scales gives the logits of the same values stored as floats."""
    import safetensors.numpy

    _, folder = tiny_model("gptoss", hidden_size=64, intermediate_size=64)
    tensors = {
        name: np.array(t.dequantize()) for name, t in open_safetensors(folder / "model.safetensors").tensors.items()
    }
    rng, dense, packed = np.random.default_rng(0), dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors[name].shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
        scales = rng.integers(121, 126, (experts, rows, columns // 32)).astype(np.uint8)
        data = ggml_blocks(blocks, scales).reshape(experts * rows, -1)
        values = QuantizedTensor(QuantFormat.MXFP4, data, (experts, rows, columns)).dequantize()
        np.testing.assert_allclose(values[0, 0, :2], mxfp4(blocks[0, 0, 0, 0], scales[0, 0, 0]))
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    found = []
    for content in (dense, packed):
        target = fresh_folder("mxfp4")
        (target / "config.json").write_text((folder / "config.json").read_text())
        safetensors.numpy.save_file(content, target / "model.safetensors")
        loaded = load_folder(target)
        runner, entries = make_runner(loaded)
        found.append(run_chunks(runner, open_entry(runner, entries), random_prompt(LENGTH), LENGTH))
    moe = loaded.weights.layers[0].moe
    assert moe is not None
    assert moe.experts.up[0].parts[0].format is QuantFormat.MXFP4
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def mxfp4(byte: int, scale: int) -> list[float]:
    """Both values of a byte, the low half first."""
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    codes = (int(byte) & 15, int(byte) >> 4)
    return [(-1.0 if code & 8 else 1.0) * magnitudes[code & 7] * 2.0 ** (int(scale) - 127) for code in codes]


def test_a_latent_is_cached_once() -> None:
    loaded = load_folder(tiny_model("deepseek2")[1])
    mla = loaded.config.mla
    assert mla is not None
    storage = make_runner(loaded)[0].storage
    assert storage.layout.bytes_per_token == loaded.config.num_layers * (mla.latent_size + mla.rope_size) * 4
    assert storage.values is storage.keys


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 9}, {"num_experts": 0}, {"moe_intermediate_size": -1}])
def test_impossible_experts_are_refused(change: dict[str, Any]) -> None:
    from bifolio.model.huggingface.config import config_from_hf

    raw = json.loads((tiny_model("qwen3moe")[1] / "config.json").read_text())
    raw.pop("num_local_experts", None)
    with pytest.raises(BifolioError):
        config_from_hf({**raw, "num_experts": 6, **change})
