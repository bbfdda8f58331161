"""Recurrent layers on a GPU: sizes of well-known models against torch in float32, chunks, and engines of hybrids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from check_bench import TOLERANCE, relative_error
from recurrence_cases import new_recurrence, normal, state_batch, state_storage

from bifolio.kernels.reference import ReferenceKernels
from bifolio.sampling_params import SamplingParams
from built_engines import built_engine
from helpers import drain, output_ids, random_prompt
from hybrid_models import VOCABULARY, tiny_hybrid

LONG = 64  # tokens of a sequence that is scanned in chunks, at least
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("delta", {"heads": 32, "groups": 16, "key_size": 128, "value_size": 128}),
    "kimi_linear": ("keyed", {"heads": 32, "key_size": 128, "value_size": 128}),
    "granite": ("mamba", {"heads": 48, "groups": 1, "key_size": 128, "value_size": 64}),
    "nemotron_h": ("mamba", {"heads": 128, "groups": 8, "key_size": 128, "value_size": 64, "norm_groups": 8}),
    "rwkv7": ("rwkv", {"heads": 32, "key_size": 64, "value_size": 64}),
    "lfm2": ("conv", {"channels": 2048}),
    "lfm3": ("conv", {"channels": 2048, "width": 7}),
}
BATCHES = {  # starts, reads, tokens whose states are stored besides the last ones
    "a prompt": ([0, 300], [0], []),
    "a decode step": (list(range(18)), [0, *range(1, 17)], []),
    "a mixed step": ([0, 1, 2, 150, 157], [3, 4, 0, 5], []),
    "prompts with checkpoints": ([0, 65, 66, 700, 764, 1100], [0, 3, 4, 5, 0], [31, 67, 257, 321, 763]),
}
CHUNKED_STATES = 2e-3  # relative error of states that chunks compute in TF32


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_recurrence(name: str, dtype: str, batch: str, gpu_kernels: Callable[..., Any]) -> None:
    import torch

    from bifolio.kernels.torch_reference import TorchKernels

    kernels = gpu_kernels(dtype)
    (kind, sizes), (starts, reads, checkpoints) = SHAPES[name], BATCHES[batch]
    rng = np.random.default_rng(1)
    recurrence = new_recurrence(rng, kind, **sizes)
    rows = torch.from_numpy(normal(rng, starts[-1], recurrence.in_features)).to(kernels.device)
    writes = np.full(starts[-1], -1)
    writes[checkpoints] = np.arange(len(checkpoints)) + 25
    writes[np.array(starts[1:]) - 1] = np.arange(len(reads)) + 20
    results = []
    for each in (kernels, TorchKernels(kernels.device, "f32")):
        storage, filled = state_storage(each, recurrence, 40), np.random.default_rng(2)
        for array in (storage.convolutions[1], storage.recurrent[1]):
            array[1:20] = torch.from_numpy(normal(filled, *array[1:20].shape, scale=0.3)).to(array.device)
        own = each.prepare_recurrence(recurrence)
        out = each.recur(rows.to(each.dtype), own, state_batch(each, starts, reads, writes.tolist()), storage)
        results.append((out, storage.convolutions[1], storage.recurrent[1]))
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if theirs.numel():
            error, tolerance = relative_error(ours, theirs), TOLERANCE[kernels.dtype if number == 0 else torch.float32]
            if number == 2 and dtype != "f32" and max(np.diff(starts)) >= LONG:
                tolerance = CHUNKED_STATES
            assert error < tolerance, f"output {number}: {error:.2e}"


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("name", SHAPES)
def test_passes_of_any_size_give_equal_bits(name: str, gpu_kernels: Callable[..., Any]) -> None:
    """In deterministic mode, which promises it."""
    import torch

    kernels = gpu_kernels("bf16", deterministic=True)
    kind, sizes = SHAPES[name]
    rng = np.random.default_rng(1)
    recurrence = new_recurrence(rng, kind, **sizes)
    own = kernels.prepare_recurrence(recurrence)
    rows = torch.from_numpy(normal(rng, 65, recurrence.in_features)).to(kernels.device, kernels.dtype)
    results = []
    for chunk in (65, 1, 7, 64):
        storage, parts = state_storage(kernels, recurrence, 2), []
        for first in range(0, 65, chunk):
            part = rows[first : first + chunk]
            batch = state_batch(kernels, [0, len(part)], [1 if first else 0], [*[-1] * (len(part) - 1), 1])
            parts.append(kernels.recur(part, own, batch, storage))
        results.append((torch.cat(parts), storage.convolutions[1], storage.recurrent[1]))
    for found in results[1:]:
        for ours, theirs in zip(found, results[0], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "granite"])
def test_equal_tokens_in_a_long_prompt(name: str, gpu_kernels: Callable[..., Any]) -> None:
    """Keys that are all equal, with little decay: the hardest system of equations of a chunk, for 2,000 tokens."""
    import torch

    from bifolio.kernels.torch_reference import TorchKernels

    kind, sizes = SHAPES[name]
    rng = np.random.default_rng(1)
    recurrence = new_recurrence(rng, kind, **sizes)
    recurrence = replace(recurrence, bias=recurrence.bias - 6)
    row = normal(rng, 1, recurrence.in_features)
    results, kernels = [], gpu_kernels("bf16")
    for each in (kernels, gpu_kernels("bf16", deterministic=True), TorchKernels(kernels.device, "f32")):
        own, storage = each.prepare_recurrence(recurrence), state_storage(each, recurrence, 2)
        rows = torch.from_numpy(row).to(each.device, torch.bfloat16).expand(2000, -1).contiguous().to(each.dtype)
        out = each.recur(rows, own, state_batch(each, [0, 2000], [0], [*[-1] * 1999, 1]), storage)
        results.append((out.float(), storage.recurrent[1]))
    for ours, theirs in zip(results[0], results[2], strict=True):
        assert relative_error(ours, theirs) < 1e-2
    for ours, theirs in zip(results[1], results[2], strict=True):
        assert relative_error(ours, theirs) < 1e-2


@pytest.mark.parametrize("kind", ["delta", "keyed", "mamba", "rwkv"])
def test_an_engine_with_prompts_in_chunks_gives_the_tokens_of_the_cpu(
    kind: str, gpu_kernels: Callable[..., Any]
) -> None:
    """Prompts of several chunks, in passes of 100 tokens, and one that continues a checkpoint between them."""
    prompt = random_prompt(300, seed=1, vocab_size=VOCABULARY)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    answers = []
    for kernels in (ReferenceKernels(), gpu_kernels("f32")):
        options = {"max_model_len": 400, "token_budget": 128, "chunk_size": 100, "block_size": 16}
        engine = built_engine(tiny_hybrid(kind), kernels=kernels, checkpoint_tokens=48, **options)
        requests = [engine.add_request("first", prompt, params), engine.add_request("other", prompt[90:180], params)]
        drain(engine)
        requests.append(engine.add_request("second", [*prompt[:200], 5, 6], params))
        drain(engine)
        assert requests[-1].metrics.num_cached_tokens == 192
        answers.append([output_ids(request) for request in requests])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["conv", "delta", "keyed", "mamba", "wide conv"])
def test_an_engine_of_a_hybrid_gives_the_tokens_of_the_cpu(kind: str, gpu_kernels: Callable[..., Any]) -> None:
    """Decode steps in CUDA graphs, shared prefixes, and a second turn that continues a checkpoint."""
    shared = random_prompt(20, seed=1, vocab_size=VOCABULARY)
    prompts = [shared, [*shared[:16], 5, 6], random_prompt(4, seed=2, vocab_size=VOCABULARY)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    answers = []
    for kernels in (ReferenceKernels(), gpu_kernels("f32")):
        engine = built_engine(tiny_hybrid(kind), kernels=kernels, checkpoint_tokens=8)
        requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        drain(engine)
        history = [*shared, *output_ids(requests[0])[0], 7]
        requests.append(engine.add_request("second turn", history, params))
        drain(engine)
        assert requests[-1].metrics.num_cached_tokens > 0
        answers.append([output_ids(request) for request in requests])
    assert answers[0] == answers[1]
