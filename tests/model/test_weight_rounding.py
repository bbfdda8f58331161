"""Dense models that are rounded while they are loaded: to the values of a file of `bifolio quantize`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.weight_rounding import rounded_model
from bifolio.model.weights import ModelWeights
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from helpers import cpu_kernel_names, make_kernels, random_prompt, tiny_folder, tiny_model, tiny_tensors

FAMILIES = ["qwen3moe", "deepseek3", "gemma3"]


def quantised(weights: ModelWeights) -> Counter[bytes]:
    """The bytes of the quantised matrices."""
    found = [m for m in weights.matrices() if isinstance(m, QuantizedTensor) and m.format.is_quantized]
    return Counter(matrix.data.tobytes() for matrix in found)


def outputs(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """Logprobs of each place of the prompts."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return np.array([
        place[token].logprob
        for prompt, result in zip(prompts, results, strict=True)
        for token, place in zip(prompt[1:], (result.prompt_logprobs or [])[1:], strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_an_engine_computes_as_with_a_file(name: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tie_word_embeddings=tied, intermediate_size=64)
    write_gguf(tmp_path / "m.gguf", load_folder(folder), QuantFormat[name.upper()])
    prompts = [random_prompt(n, seed=n, vocab_size=61) for n in (5, 40)]
    kernels = "reference"  # they round no activations
    with (
        LLM(folder, quantization=name, kernels=kernels) as llm,
        LLM(tmp_path / "m.gguf", kernels=kernels) as of_file,
        LLM(folder, kernels=kernels) as dense,
    ):
        ours, theirs, exact = (outputs(each, prompts) for each in (llm, of_file, dense))
        assert np.abs(ours - theirs).max() < 1e-4  # sums in another order: files of a llama rotate neighbours
        assert np.abs(ours - exact).max() > 1e-3
        assert llm.plan.weight_bytes == of_file.plan.weight_bytes < 0.6 * dense.plan.weight_bytes


@pytest.mark.full
@pytest.mark.parametrize("architecture", FAMILIES)
def test_matrices_of_other_networks_are_those_of_a_file(architecture: str, tmp_path: Path) -> None:
    """Experts, latents and recurrent layers; routers and norms stay dense."""
    _, folder = tiny_model(architecture)
    model = load_folder(folder)
    write_gguf(tmp_path / "m.gguf", model, QuantFormat.Q8_0)
    rounded = rounded_model(model, "q8_0", make_kernels(cpu_kernel_names()[0])).weights
    expected = quantised(load_gguf(tmp_path / "m.gguf").weights)
    assert expected.total() > 5
    assert quantised(rounded) == expected


def test_ranks_take_their_part_of_the_rounded_matrices() -> None:
    from bifolio.model.shards import shard

    weights = rounded_model(load_folder(tiny_folder(intermediate_size=64)), "q8_0", make_kernels()).weights
    whole = weights.layers[0].down.parts[0].data
    parts = [shard(weights, rank, 2, exact=False, spread_embedding=False).layers[0].down.parts[0] for rank in range(2)]
    assert np.array_equal(np.concatenate([part.data for part in parts], axis=1), whole)


def test_blocks_of_a_rounded_model_are_no_blocks_of_the_dense_one() -> None:
    model, kernels = load_folder(tiny_folder()), make_kernels()
    digests = [rounded_model(model, name, kernels).later_digest()() for name in (None, "q8_0", "q4_0")]
    assert len(set(digests)) == 3


def test_matrices_that_cannot_be_rounded(tmp_path: Path) -> None:
    """Rows that are no multiple of 32 values stay dense; a value that is no number is refused by name."""
    folder = tiny_folder(tmp_path / "m")
    layer = rounded_model(load_folder(folder), "q8_0", make_kernels()).weights.layers[0]
    assert [part.format for part in (*layer.up.parts, *layer.down.parts)] == [QuantFormat.Q8_0] * 2 + [QuantFormat.F32]  # type: ignore[union-attr]
    tensors = tiny_tensors(json.loads((folder / "config.json").read_text()))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.up_proj"):
        LLM(folder, quantization="q8_0")


def test_a_model_without_dense_matrices_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", load_folder(tiny_folder(intermediate_size=64)), QuantFormat.Q8_0)
    with pytest.raises(ConfigError, match=r"this model has none: leave quantization out"):
        LLM(tmp_path / "m.gguf", quantization="q4_0")


@pytest.mark.parametrize("name", ["q5_k", "int4", "fp8"])
def test_unknown_names_and_missing_kernels_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="q8_0"):
        LLM(tiny_folder(), quantization=name)
