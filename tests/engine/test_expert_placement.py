"""Mixtures whose experts stay in the memory of the host, beside a network on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import peft_adapter
from bifolio import LLM, SamplingParams
from bifolio.engine import expert_placement
from bifolio.engine.expert_placement import place_experts, read_cpu_experts
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter
from bifolio.kernels.native import NativeKernels
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.quant import QuantFormat
from helpers import random_prompt, tiny_folder, tiny_model

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_model_len": 96, "kernels": "torch", "device": "cpu"}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)


def outputs(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and their logprobs."""
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    every = [output for result in results for output in result.outputs]
    return [
        (list(o.token_ids), np.array([place[t].logprob for t, place in zip(o.token_ids, o.logprobs, strict=True)]))
        for o in every
    ]


def assert_close(ours: list[tuple[list[int], np.ndarray]], theirs: list[tuple[list[int], np.ndarray]]) -> None:
    for (tokens, logprobs), (expected, others) in zip(ours, theirs, strict=True):
        assert tokens == expected
        assert np.abs(logprobs - others).max() < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3moe", "deepseek3", "gptoss"])
@pytest.mark.parametrize("placement", ["all", 1])
def test_answers_are_those_of_experts_on_the_device(architecture: str, placement: str | int) -> None:
    """Gates of several kinds, biases of experts, shared experts and dense first layers."""
    _, folder = tiny_model(architecture)
    prompts = [random_prompt(n, seed=n) for n in (3, 33, 50)]
    with LLM(folder, **SIZES) as plain, LLM(folder, cpu_experts=placement, **SIZES) as placed:
        mixtures = [layer for layer in plain.model.weights.layers if layer.moe is not None]
        assert placed.plan.host_layers == (1 if placement == 1 else len(mixtures))
        assert placed.plan.host_bytes > 0
        expected = outputs(plain, prompts)
        assert_close(outputs(placed, prompts), expected)
        assert_close([outputs(placed, [prompt])[0] for prompt in prompts], expected)  # their prompts are cached now


@pytest.mark.full
def test_the_host_multiplies_the_formats_of_a_file(tmp_path: Path) -> None:
    _, folder = tiny_model("qwen3moe")
    write_gguf(tmp_path / "m.gguf", load_folder(folder), QuantFormat.Q8_0)
    prompts = [random_prompt(20)]
    with LLM(tmp_path / "m.gguf", cpu_experts="all", activations="int16", **SIZES) as placed:
        with LLM(tmp_path / "m.gguf", **SIZES) as plain:
            ours, theirs = outputs(placed, prompts)[0], outputs(plain, prompts)[0]
        assert np.abs(ours[1] - theirs[1]).max() < 1e-2
        experts = placed.engine.runner.weights.layers[0].moe.experts.prepared  # type: ignore[union-attr]
        assert isinstance(experts._host, NativeKernels)


@pytest.mark.full
def test_adapters_change_attention_beside_experts_on_the_host() -> None:
    """Those of experts are refused when they are loaded."""
    model, folder = tiny_model("qwen3moe")
    options = {**SIZES, "lora_modules": {"a": peft_adapter(model, target_modules=["q_proj", "o_proj"])[1]}}
    found = []
    for placement in (None, "all"):
        with LLM(folder, cpu_experts=placement, **options) as llm:
            prompt: Any = {"prompt_token_ids": random_prompt(20)}
            each = [llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=name)[0] for name in (None, "a")]
            found.append([output.outputs[0].token_ids for output in each])
            if placement is not None:
                with pytest.raises(ConfigError, match="adapters of experts do not go with cpu_experts"):
                    llm.engine.runner.kernels.prepare_adapter(Adapter(experts={5: ()}))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


class SmallDevice(TorchKernels):
    """A device with some memory, which a test sets."""

    free = 0

    def memory(self) -> Any:
        return self

    def free_bytes(self) -> int:
        return self.free


@pytest.mark.full
def test_auto_gives_the_host_the_layers_that_the_device_lacks_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_placement, "STEP_RESERVE", 0)
    _, folder = tiny_model("qwen3moe")
    model, kernels = load_folder(folder), SmallDevice()
    with LLM(folder, **SIZES) as llm:
        config = replace(llm.engine.config, max_num_seqs=1, token_budget=1)
    counts = []
    for free in (0, *np.linspace(10_000, 2_000_000, 40, dtype=int)):
        kernels.free = int(free)
        placed = place_experts(model, kernels, config, "auto", host=NativeKernels, utilisation=0.9)
        flags = [x.moe.experts.host is not None for x in placed.weights.layers if x.moe]
        assert flags == sorted(flags, reverse=True)  # the first layers
        counts.append(sum(flags))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (len(flags), 0)
    assert any(0 < count < len(flags) for count in counts)


def test_placements_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder()
    with pytest.raises(ConfigError, match="has no experts"):
        LLM(folder, cpu_experts="all", **SIZES)
    with LLM(folder, cpu_experts="auto", **SIZES) as llm:
        assert llm.plan.host_layers == 0
    with pytest.raises(ConfigError, match="tensor_parallel_size 1"):
        LLM(folder, cpu_experts="all", tensor_parallel_size=2)
    for value in ("some", "-1", True, 1.5):
        with pytest.raises(ConfigError, match="'all', 'auto' or a number of layers"):
            read_cpu_experts(value)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_cpu_and_a_host_without_memory_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = tiny_model("qwen3moe")
    with pytest.raises(ConfigError, match="cpu_experts goes with a GPU"):
        LLM(folder, cpu_experts="all", device="cpu")
    monkeypatch.setattr(expert_placement, "free_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="in the memory of the host, where 1 kB are free"):
        LLM(folder, cpu_experts="all", **SIZES)
