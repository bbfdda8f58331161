"""Two bytes for an activation: quantised weights give what exact activations would give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Linear
from bifolio.kernels.reference import ReferenceKernels
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

native = pytest.importorskip("bifolio.kernels._native", reason="the native kernels were not built")

from bifolio.kernels.native import NativeKernels  # noqa: E402


@pytest.mark.parametrize("format", [QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_second_byte_takes_the_error_away(format: QuantFormat, threads: int) -> None:
    rng = np.random.default_rng(0)
    weight = QuantizedTensor.quantize(rng.standard_normal((70, 96)).astype(np.float32), format)
    dense = QuantizedTensor.from_array(rng.standard_normal((5, 96)).astype(np.float32))  # of another format, beside it
    biases = (rng.standard_normal(70).astype(np.float32), None)
    linear = Linear((weight, dense), biases)
    for rows in (1, 2, 3, 4, 5, 33, 70):
        x = rng.standard_normal((rows, 96)).astype(np.float32) * 10
        exact = ReferenceKernels().linear(x, linear)
        errors = {}
        for activations in ("int8", "int16"):
            kernels = NativeKernels(threads, activations)
            packed = kernels.prepare_linear(linear)
            y = kernels.linear(x, packed)
            errors[activations] = np.abs(y - exact).max()
            for row in range(0, rows, 7):  # alone and in company, bit for bit
                assert np.array_equal(kernels.linear(x[row : row + 1], packed)[0], y[row])
        assert errors["int16"] < 0.02
        assert errors["int16"] * 20 < errors["int8"]


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8, int16"):
        NativeKernels(1, "int4")


def test_a_real_model_answers_with_paris(models_dir: Path) -> None:
    llm = LLM(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=1, max_model_len=256, activations="int16")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert "Paris" in answer
