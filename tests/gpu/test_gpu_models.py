"""Models on a GPU against transformers: logits of every kind of pass, greedy tokens, beams; and quantised weights."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_beam_search
from test_architectures import (
    test_decode_token_by_token_gives_transformers_logits as test_decode_gives_transformers_logits,
)
from test_architectures import (
    test_prefill_in_chunks_of_every_size_gives_transformers_logits as test_chunks_give_transformers_logits,
)
from test_architectures import test_the_same_64_greedy_tokens_as_transformers as test_greedy_tokens_are_transformers

from bifolio import LLM, SamplingParams
from bifolio.measure.random_models import random_model
from built_engines import built_runner
from helpers import open_entry, random_prompt, run_chunks, tiny_model, transformers_logits

__all__ = [
    "test_chunks_give_transformers_logits",
    "test_decode_gives_transformers_logits",
    "test_greedy_tokens_are_transformers",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Path]:
    """Fewer architectures than on the CPU: every shape compiles kernels of its own."""
    return tiny_model(request.param)


def test_bf16_logits_are_near_transformers(gpu_kernels: Callable[..., Any]) -> None:
    from bifolio.model.huggingface.hf_loader import load_folder

    model, folder = tiny_model("llama")
    prompt = random_prompt(40)
    theirs = transformers_logits(model, prompt)
    runner, blocks = built_runner(load_folder(folder), kernels=gpu_kernels("bf16"), cache_dtype="bf16")
    for chunk_size in (40, 7):
        ours = run_chunks(runner, open_entry(runner, blocks), prompt, chunk_size)
        assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 2e-2


@pytest.mark.parametrize(("architecture", "eos"), [("llama", None), ("gemma3", [5, 60])])
def test_beams_equal_transformers(architecture: str, eos: list[int] | None, new_kernels: Callable[[], Any]) -> None:
    test_beam_search.test_beams_equal_transformers(architecture, eos, new_kernels)


REAL_SHAPES = [(shape, dtype, False) for shape in ("llama-1b", "qwen3-0.6b", "llama-8b") for dtype in ("f32", "bf16")]


@pytest.mark.one_process
@pytest.mark.parametrize(
    ("shape", "dtype", "deterministic"), [("tiny", "f32", False), *REAL_SHAPES, ("llama-1b", "bf16", True)]
)
def test_real_shapes_give_transformers_logits_and_tokens(
    shape: str, dtype: str, deterministic: bool, device: str, gpu_kernels: Callable[..., Any], release_gpu: None
) -> None:
    """A whole prompt, the same prompt in chunks, and 64 greedy tokens; the weights are random."""
    from model_checks import check_model

    if device == "cpu" and shape != "tiny":
        pytest.skip("needs a GPU")
    kernels = gpu_kernels(dtype, deterministic=deterministic)
    found = check_model(kernels, shape, *((40, 6) if device == "cpu" else ()))
    assert found.passed, found


# -- quantised weights ----------------------------------------------------------------------------------------------
def test_a_quantised_model_gives_the_logits_of_its_dequantised_weights(gpu_kernels: Callable[..., Any]) -> None:
    from bifolio.kernels.torch_reference import TorchKernels

    model, tokens = random_model("tiny", "q8_0"), random_prompt(70, seed=4, vocab_size=500)
    runner, blocks = built_runner(model, kernels=TorchKernels("cpu"))
    expected = run_chunks(runner, open_entry(runner, blocks), tokens, 70)
    runner, blocks = built_runner(model, kernels=gpu_kernels("f32"))
    for chunk_size in (69, 23):  # many rows, then one; few rows
        ours = run_chunks(runner, open_entry(runner, blocks), tokens, chunk_size)
        np.testing.assert_allclose(ours, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("own_kernels")
def test_a_gguf_file_runs_in_its_own_bytes(device: str, tmp_path: Path) -> None:
    """The whole way of a user: `LLM("model.gguf", device="cuda")`, without the gguf package."""
    from bifolio.kernels.triton.row_layouts import QuantisedWeight

    path = write_gguf(tmp_path / "tiny.gguf")
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "token_budget": 64}
    options["gpu_memory_utilization"] = 0.1  # other processes test on the same GPU
    if device == "cpu":
        from bifolio.kernels.triton import TritonKernels

        options |= {"kernels": TritonKernels("cpu", "f16"), "num_blocks": 40}
    llm = LLM(path, device=device, **options)
    layer = llm.engine.runner.weights.layers[0]
    assert isinstance(layer.up.prepared[0], QuantisedWeight)
    (output,) = llm.generate([[5, 6, 7, 8]], GREEDY)
    (expected,) = LLM(path, device="cpu", kernels="reference", max_model_len=64).generate([[5, 6, 7, 8]], GREEDY)
    assert output.outputs[0].token_ids[:4] == expected.outputs[0].token_ids[:4]


def write_gguf(path: Path) -> Path:
    """A Llama of random Q8_0 and Q4_0 weights, byte by byte as the format's description says."""
    width, ffn, vocab, layers = 64, 128, 96, 2
    numbers = {"block_count": layers, "embedding_length": width, "feed_forward_length": ffn, "context_length": 128,
               "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": vocab}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    shapes["output.weight"] = (vocab, width)
    for layer in range(layers):
        names = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_k": (width // 2, width),
                 "attn_v": (width // 2, width), "attn_output": (width, width), "ffn_gate": (ffn, width),
                 "ffn_up": (ffn, width), "ffn_down": (width, ffn)}  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in names.items()}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    metadata = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for name, number in numbers.items():
        metadata += text(f"llama.{name}") + struct.pack("<II", 4, number)
    metadata += text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
    infos, data = b"", b""
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        kind, payload = _tensor_bytes(rng, name, shape)
        infos += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        infos += struct.pack("<IQ", kind, len(data))
        data += payload + bytes(-len(payload) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), 2 + len(numbers)) + metadata + infos
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def _tensor_bytes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[int, bytes]:
    """(GGML's number of the type, the tensor's bytes): f32 norms, a Q8_0 embedding, everything else Q4_0."""
    from bifolio.quant.formats import QuantFormat
    from bifolio.quant.tensor import QuantizedTensor

    if len(shape) == 1:
        return 0, np.ones(shape, np.float32).tobytes()
    format = QuantFormat.Q8_0 if name == "token_embd.weight" else QuantFormat.Q4_0
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(0.3)
    return format.ggml_type, QuantizedTensor.quantize(values, format).data.tobytes()
