"""Two bytes for an activation: quantised weights give what exact activations would give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Linear
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.select import SMALL_MODEL, activations_for
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from helpers import tiny_folder

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


@pytest.mark.parametrize(
    ("isa", "wanted", "num_parameters", "expected"),
    [
        ("avx512", "auto", 135_000_000, "int16"),
        ("neon", "auto", SMALL_MODEL - 1, "int16"),
        ("avx2", "auto", SMALL_MODEL, "int8"),
        ("amx", "auto", 135_000_000, "int8"),  # its tiles multiply bfloat16
        ("avx512", "int8", 135_000_000, "int8"),
        ("avx512", "int16", SMALL_MODEL, "int16"),
    ],
)
def test_the_size_of_a_model_decides(
    isa: str, wanted: str, num_parameters: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bifolio.kernels.native.isa", lambda: isa)
    assert activations_for(wanted, num_parameters) == expected


def test_an_encoder_rounds_to_8_bits_unless_it_is_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bifolio.kernels.native.isa", lambda: "avx512")
    assert activations_for("auto", 22_000_000, both_ways=True) == "int8"
    assert activations_for("int16", 22_000_000, both_ways=True) == "int16"


def test_an_unknown_rounding_is_refused_by_the_name_of_its_option() -> None:
    with pytest.raises(ConfigError, match=r"--activations\) is 'int4': pass auto, int8 or int16"):
        LLM(activations="int4")


def test_a_small_model_keeps_answers_of_exact_activations_without_options(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, load_model(tiny_folder(num_hidden_layers=6, hidden_size=64)), QuantFormat.Q8_0)
    prompts = [[number, 2 * number + 1, 7] for number in range(3, 15)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

    def texts(**options: Any) -> list[list[int]]:
        with LLM(path, **options) as llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    by_rounding = {name: texts(activations=name) for name in ("int8", "int16")}
    assert by_rounding["int8"] != by_rounding["int16"]
    assert texts() == by_rounding["int8" if native.isa() == "amx" else "int16"]


def test_a_real_model_answers_with_paris(models_dir: Path) -> None:
    """Without options: the margin is 0.08 of a logit, which 8 bits turn around."""
    llm = LLM(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf", max_num_seqs=1, max_model_len=256)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert "Paris" in answer
