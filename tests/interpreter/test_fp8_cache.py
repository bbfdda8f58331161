"""An FP8 cache on the Triton kernels, in the interpreter: keys and values as torch rounds them, in every phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.storage import FP8_LARGEST, CacheLayout
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.cache import rope_and_write
from bifolio.sampling_params import SamplingParams
from helpers import make_engine, random_prompt, tiny_loaded

SIZES: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "token_budget": 24, "chunk_size": 9}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
LENGTHS = (4, 13, 3, 21)


@pytest.fixture(autouse=True)
def rounding_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch rounds: the interpreter loses the carry into the exponent, and reads NaN of FP8 as 480."""
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        names = {"fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn}
        if (source.name, target.name) not in (("fp32", "fp8e4nv"), ("fp8e4nv", "fp32")):
            return plain(values, source, target, mode)
        found = torch.from_numpy(np.ascontiguousarray(values)).view(names[source.name]).to(names[target.name])
        return found.view(torch.uint8 if target.name == "fp8e4nv" else torch.int32).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def run(engine: InferenceEngine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    requests = [engine.add_request(str(number), prompt, PARAMS) for number, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    assert all(request.error is None for request in requests)
    return [(s.output_token_ids, [e.logprob for e in s.logprobs]) for r in requests for s in r.sequences]


def prompts() -> list[list[int]]:
    return [random_prompt(length, seed=number, vocab_size=61) for number, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"num_attention_heads": 2, "num_key_value_heads": 2}])
def test_engines_give_what_torch_gives_with_the_same_rounding(options: dict[str, Any]) -> None:
    model = tiny_loaded(**options)
    expected = run(make_engine(model, kernels=TorchKernels(), cache_dtype="fp8", **SIZES), prompts())
    exact = run(make_engine(model, kernels=TorchKernels(), **SIZES), prompts())
    found = run(make_engine(model, kernels=TritonKernels("cpu", "f32"), cache_dtype="fp8", **SIZES), prompts())
    for (ours, scores), (theirs, wanted) in zip(found, expected, strict=True):
        assert ours == theirs
        assert scores == pytest.approx(wanted, abs=2e-3)
    differences = [abs(a[1][0] - b[1][0]) for a, b in zip(expected, exact, strict=True)]
    assert 1e-4 < max(differences) < 0.5  # the cache is rounded, and only a little


def test_a_prefix_from_the_cache_changes_no_bit() -> None:
    engine = make_engine(kernels=TritonKernels("cpu", "f32", deterministic=True), cache_dtype="fp8",
                         deterministic=True, **SIZES)  # fmt: skip
    cold = run(engine, prompts())
    assert run(engine, prompts()[::-1]) == cold[::-1]
    engine.blocks.drop_cached()
    assert run(engine, prompts()[1:2]) == cold[1:2]


def test_large_numbers_become_the_largest_one_and_nan_stays() -> None:
    storage = TritonKernels("cpu", "f32").new_storage(CacheLayout(1, 3, 4, 1, 16, "fp8"))
    qkv = torch.full((1, 48), 1e6)
    qkv[0, 20], qkv[0, 24], qkv[0, 21] = float("nan"), -1e6, 0.3
    shape = AttentionShape(0, 1, 1, 16, 1.0)
    rope_and_write(qkv, shape, None, torch.tensor([5]), storage)
    found = storage.keys[0][1, 0, 1].float()
    assert torch.isnan(found[4])
    assert (float(found[8]), float(found[0])) == (-FP8_LARGEST, FP8_LARGEST)
    assert float(found[5]) == float(torch.tensor(0.3).to(torch.float8_e4m3fn))
    assert (storage.values[0][1, 0, 1].float() == FP8_LARGEST).all()


def test_blocks_are_copied_as_bytes() -> None:
    for kernels in (TritonKernels("cpu", "f32"), TorchKernels()):
        storage = kernels.new_storage(CacheLayout(2, 5, 4, 2, 16, "fp8"))
        rng = np.random.default_rng(0)
        data = rng.integers(0, 120, storage.layout.bytes_per_block, dtype=np.uint8)
        storage.write_block(1, data)
        storage.move_blocks([(1, 2)])
        assert (storage.read_block(2) == data).all()
        assert (storage.read_block(3) == 0).all()
        packed = torch.zeros(2, storage.layout.bytes_per_block, dtype=torch.uint8)
        storage.pack_blocks([2, 3], packed)
        assert (packed[0].numpy() == data).all()
        storage.unpack_blocks([3, 4], packed)
        assert (storage.read_block(3) == data).all()
        storage.poison_blocks([3])
        assert torch.isnan(storage.keys[1][3].float()).all()
