"""Experts on the Triton kernels, in the interpreter: their order, the fused operations, and every way to multiply."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from expert_cases import EXPERTS, new_experts

from adapter_files import peft_adapter
from bifolio.config import CacheConfig, EngineConfig
from bifolio.engine.expert_placement import place_experts
from bifolio.kernels.interface import Experts, Linear, Norm, Router
from bifolio.kernels.native import NativeKernels
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton import experts as moe
from bifolio.kernels.triton.expert_order import cut_pairs
from bifolio.kernels.triton.lazy_fusion import Mixture, Normed, tensor
from bifolio.kernels.triton.quantised import QuantisedWeight
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from exotic_weights import exotic_tensor
from helpers import drain, make_engine, random_prompt, run_alone, tiny_model
from moe_models import MOE_ARCHITECTURES

WIDTH, DEPTH = 64, 96


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (5, 16), (300, 16), (300, 64)])
def test_pairs_are_ordered_by_expert_and_cut_into_tiles(tokens: int, rows: int) -> None:
    chosen = np.random.default_rng(tokens).integers(0, EXPERTS - 1, (tokens, 3)).astype(np.int32)  # the last: no token
    tiles = cut_pairs(torch.from_numpy(chosen), EXPERTS, rows)
    expected = np.argsort(chosen.ravel(), kind="stable")
    assert tiles.pairs.tolist() == expected.tolist()
    covered = []
    for expert, begin, end in zip(tiles.expert.tolist(), tiles.begin.tolist(), tiles.end.tolist(), strict=True):
        if expert == EXPERTS:
            continue
        assert 0 < end - begin <= rows
        assert (chosen.ravel()[expected[begin:end]] == expert).all()
        covered += range(begin, end)
    assert covered == list(range(3 * tokens))


def some_experts(kind: str) -> Experts:
    if kind == "dense":
        return new_experts(np.random.default_rng(3), WIDTH, DEPTH, "swiglu_clamped", bias=True)
    up = [
        Linear(tuple(exotic_tensor("MXFP4", WIDTH, DEPTH, e + 20 * i) for i in range(2)), (None, None))
        for e in range(EXPERTS)
    ]
    down = [Linear((exotic_tensor("MXFP4", DEPTH, WIDTH, e + 80),), (None,)) for e in range(EXPERTS)]
    return Experts(tuple(up), tuple(down), "silu")


@pytest.mark.parametrize("kind", ["dense", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 40])
def test_the_norm_before_and_the_residual_behind_are_fused(kind: str, tokens: int) -> None:
    kernels, oracle = TritonKernels("cpu", "f32"), TorchKernels("cpu", "f32")
    experts, generator = some_experts(kind), torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, DEPTH, generator=generator)
    norm = Norm(torch.rand(DEPTH, generator=generator) + 0.5, None, 1e-5)
    logits, router = torch.randn(tokens, EXPERTS, generator=generator), Router(3, renormalise=True)
    normed = kernels.norm(x, norm)
    assert isinstance(normed, Normed) == (tokens == 1)
    mixed = kernels.mix_experts(normed, kernels.route(logits, router), kernels.prepare_experts(experts))
    assert isinstance(mixed, Mixture)
    ours = tensor(kernels.add(x, mixed))
    assert mixed.value is None
    theirs = x + oracle.mix_experts(oracle.norm(x, norm), oracle.route(logits, router), oracle.prepare_experts(experts))
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [64, 128])
def test_weights_in_blocks_are_dequantised_for_many_tokens(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, experts = TritonKernels("cpu", "f32"), some_experts("MXFP4")
    prepared = kernels.prepare_experts(experts)
    assert all(isinstance(stack.weight, QuantisedWeight) for stack in prepared.prepared)
    x, logits = torch.randn(rows, DEPTH), torch.randn(rows, EXPERTS)
    routing = kernels.route(logits, Router(3))
    found = []
    for fewest in (1, 10**6):
        monkeypatch.setattr(moe, "DEQUANTISED_ROWS", fewest)
        found.append(tensor(kernels.mix_experts(x, routing, prepared)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_tiles_are_read_by_descriptors_where_the_device_has_them() -> None:
    kernels = TritonKernels("cpu", "f16")
    prepared = kernels.prepare_experts(replace(some_experts("dense"), activation="silu"))
    x, logits = torch.randn(9, DEPTH).half(), torch.randn(9, EXPERTS)
    routing = kernels.route(logits, Router(3, renormalise=True))
    oracle = TorchKernels("cpu", "f32")
    theirs = oracle.mix_experts(
        x.float(), routing, oracle.prepare_experts(replace(some_experts("dense"), activation="silu"))
    )
    ours = tensor(kernels.mix_experts(x, routing, prepared)).float()
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", MOE_ARCHITECTURES)
def test_an_engine_writes_the_tokens_of_the_reference(name: str) -> None:
    from bifolio.sampling_params import SamplingParams

    model, params = load_folder(tiny_model(name)[1]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = [
        run_alone(random_prompt(7), params, model=model, kernels=kernels).sequences[0].output_token_ids
        for kernels in (TorchKernels("cpu"), TritonKernels("cpu", "f32"))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3", "gptoss"])
def test_experts_on_the_host_give_the_tokens_of_the_reference(name: str) -> None:
    """Decode steps are launched as those of other models, and shared experts stay on the device."""
    from bifolio.sampling_params import SamplingParams

    model, params = load_folder(tiny_model(name)[1]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    kernels = TritonKernels("cpu", "f32")
    config = EngineConfig(CacheConfig(20, 4), 64, 2, 64)
    placed = place_experts(model, kernels, config, "all", host=NativeKernels, utilisation=0.9)
    engine = make_engine(placed, kernels=kernels, chunk_size=512, token_budget=512)
    assert engine.slots.device is not None
    found = [engine.add_request(str(n), random_prompt(n, seed=n), params) for n in (7, 30)]
    drain(engine)
    for n, request in zip((7, 30), found, strict=True):
        alone = run_alone(random_prompt(n, seed=n), params, model=model, kernels=TorchKernels("cpu"))
        assert request.sequences[0].output_token_ids == alone.sequences[0].output_token_ids


@pytest.mark.parametrize("gated", [True, False])
def test_a_copied_layer_has_the_weights_of_a_prepared_one(gated: bool) -> None:
    """Matrices lie one after the other, as a stream copies them."""
    from concurrent.futures import ThreadPoolExecutor

    from bifolio.kernels.triton import quantised
    from bifolio.kernels.triton.expert_stream import layer_of, write_rows
    from bifolio.kernels.triton.experts import prepare_stack

    rng = np.random.default_rng(0)

    def linear(out: int, width: int, parts: int) -> Linear:
        values = [rng.normal(size=(out, width)).astype(np.float32) for _ in range(parts)]
        return Linear(tuple(QuantizedTensor.quantize(each, QuantFormat.Q8_0) for each in values), (None,) * parts)

    sides = tuple(linear(96, 64, 1 + gated) for _ in range(5)), tuple(linear(64, 96, 1) for _ in range(5))
    layer = layer_of(Experts(*sides, "silu" if gated else "gelu_tanh"), 0)
    assert layer is not None
    memory = np.zeros(layer.nbytes, np.uint8)
    with ThreadPoolExecutor(2) as copiers:
        write_rows(memory, (layer.up, layer.down), copiers)
    for linears, side in zip(sides, (layer.up, layer.down), strict=True):
        theirs = prepare_stack(linears, TorchKernels("cpu")).weight
        ours = quantised.pack((side.copied(torch.from_numpy(memory)),), "cpu")
        assert ours.shape == theirs.shape
        torch.testing.assert_close(
            quantised.dequantise(ours, torch.float32), quantised.dequantise(theirs, torch.float32), atol=0, rtol=0
        )


@pytest.mark.parametrize("placement", [None, "all"])
def test_adapters_of_attention_run_beside_experts(placement: str | None) -> None:
    from bifolio import LLM, SamplingParams

    model, folder = tiny_model("qwen3moe")
    adapter = peft_adapter(model, target_modules=["q_proj", "o_proj"])[1]
    params, found = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), []
    for kernels, placed in ((TritonKernels("cpu", "f32"), placement), (TorchKernels("cpu"), None)):
        options: Any = {"lora_modules": {"a": adapter}, "max_model_len": 64, "num_blocks": 40, "block_size": 4}
        with LLM(folder, kernels=kernels, cpu_experts=placed, max_num_seqs=2, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": random_prompt(9)}] * 2, params, lora_request=[None, "a"])
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert all(found[0])
