"""Attention to chosen positions in Triton's interpreter, and engines of networks with indexers on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from case_table import activations, new_context, normal

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from family_rows import row_folder

from bifolio.kernels.interface import AttentionShape, HeadLinear, KernelSet, Linear
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton import chosen_attention as chosen_kernels
from bifolio.kernels.triton.chosen_attention import chosen_attention
from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.step.decodes import StepKey
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt

LENGTHS = [90, 7, 33]
TOP_K = 21


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("heads", "dim", "block_size"), [(3, 40, 16), (20, 32, 4), (16, 24, 64)])
def test_results_are_those_of_torch(
    heads: int, dim: int, block_size: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that see all and those that choose, one piece and several, at once and one by one."""
    monkeypatch.setattr(chosen_kernels, "FIXED_PIECE", 16)
    kernels: KernelSet = TritonKernels("cpu", "f32")
    rng = np.random.default_rng(heads)
    context = new_context(kernels, rng, LENGTHS, 1, dim, block_size, shared_values=True)
    shape = AttentionShape(1, heads, 1, dim, 0.3, top_k=TOP_K)
    query = activations(kernels, normal(rng, 4, heads + 1, dim))[:, :heads]  # rows lie apart; the last is padding
    seen = np.array([*LENGTHS, 0])
    chosen = np.full((4, TOP_K), -1, np.int32)
    for row in (0, 2):
        chosen[row] = np.sort(rng.permutation(seen[row])[:TOP_K])
    owners = torch.tensor([0, 1, 2, 0], dtype=torch.int32)
    rows = PassRows(torch.from_numpy(seen.astype(np.int32)), torch.from_numpy(context.tables), owners, seen, 90)
    given: Any = (query, torch.from_numpy(chosen), shape, context.storage, rows)
    for processors in (1, 64):
        found = chosen_attention(*given, num_processors=processors, fixed=fixed)
        for row, length in enumerate(LENGTHS):
            keys = context.storage.gather(1, context.tables[row].tolist(), length)[0][:, 0]
            picked = keys[chosen[row]] if length > TOP_K else keys
            shares = torch.softmax(query[row] @ picked.T * shape.scale, dim=-1)
            torch.testing.assert_close(found[row].view(heads, dim), shares @ picked, rtol=1e-5, atol=1e-5)
        assert not found[3].any()
        if fixed:
            monkeypatch.setattr(chosen_kernels, "MOST_PARTS", 1)  # one query at a time
            assert torch.equal(found, chosen_attention(*given, num_processors=processors, fixed=True))


def texts(name: str, kernels: KernelSet, max_tokens: int) -> tuple[Any, list[Any]]:
    """(the engine, token ids of a request that runs while another is added, and of one with a cached prompt)."""
    model = load_folder(row_folder(name)[1])
    engine = make_engine(
        model,
        kernels=kernels,
        block_size=8,
        num_blocks=40,
        max_model_len=64,
        max_num_seqs=2,
    )
    requests = []
    for number, length in enumerate((9, 30, 30)):
        prompt = random_prompt(length, min(number, 1), 61)
        params = SamplingParams(temperature=0.7 * (number == 1), seed=number, max_tokens=max_tokens, ignore_eos=True)
        requests.append(engine.add_request(str(number), prompt, params))
        engine.step()
        if number == 1:
            drain(engine)
    drain(engine)
    assert all(request.error is None for request in requests)
    return engine, [output_ids(request) for request in requests]


def test_decode_steps_run_as_captured_ones() -> None:
    """Contexts grow past the number of chosen positions while they are decoded."""
    _, expected = texts("glm_moe_dsa", TorchKernels("cpu"), 3)
    engine, found = texts("glm_moe_dsa", TritonKernels("cpu", "f32"), 3)
    assert engine.slots.device is not None
    assert engine.slots.device.prompts is None
    assert engine.slots.device.graphs.keys(StepKey)
    assert found == expected


@pytest.mark.parametrize(("heads", "width", "inputs", "outputs"), [(3, 40, 32, 20), (2, 24, 16, 70)])
def test_products_of_heads_do_not_depend_on_other_rows(heads: int, width: int, inputs: int, outputs: int) -> None:
    kernels: KernelSet = TritonKernels("cpu", "f32", deterministic=True)
    rng = np.random.default_rng(1)
    matrices = normal(rng, heads, outputs, inputs)
    linear = kernels.prepare_head_linear(HeadLinear(tuple(Linear((matrix,), (None,)) for matrix in matrices)))
    x = torch.from_numpy(normal(rng, 40, heads * width))
    found = kernels.head_linear(x, linear, width - inputs)
    expected = torch.einsum("thi,hoi->tho", x.view(40, heads, width)[..., width - inputs :], torch.from_numpy(matrices))
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-5, atol=1e-4)
    parts = [kernels.head_linear(x[start:stop], linear, width - inputs) for start, stop in ((0, 1), (1, 6), (6, 40))]
    assert torch.equal(torch.cat(parts), found)
