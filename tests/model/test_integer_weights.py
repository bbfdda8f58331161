"""Folders in AWQ, GPTQ and compressed-tensors of 4 bits: the values of their codes, scales and zeros."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_prompt import prompt_logits

from bifolio import LanguageModel
from bifolio.cli.inspect import read_contents
from bifolio.cli.inspect_quant import PACKED as INTO_BLOCKS
from bifolio.cli.inspect_quant import quant_rows
from bifolio.errors import BifolioError, MissingDependencyError, UnsupportedModelError
from bifolio.model.huggingface import integer_weights
from bifolio.model.huggingface.hf_loader import folder_tensors, load_folder
from bifolio.model.registry import header
from bifolio.quant.formats import QuantFormat
from helpers import random_prompt, tiny_folder

pytestmark = pytest.mark.full  # torch
ROWS, COLUMNS, GROUP = 24, 192, 64
AWQ_ROWS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a word, from its lowest bits on
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
WEIGHTS = {"num_bits": 4, "symmetric": True, "group_size": GROUP, "type": "int"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": WEIGHTS}},
}
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes [rows, columns], scales and zeros [rows, groups]


def random_parts(rows: int, columns: int, group: int, symmetric: bool, seed: int = 0) -> Parts:
    rng, shape = np.random.default_rng(seed), (rows, columns // group)
    zeros = np.full(shape, 8) if symmetric else rng.integers(1, 16, shape)
    scales = rng.uniform(0.001, 0.02, shape).astype(np.float16)
    return rng.integers(0, 16, (rows, columns)), scales, zeros


def values_of(parts: Parts, group: int) -> np.ndarray:
    codes, scales, zeros = parts
    repeated = [np.repeat(each.astype(np.float32), group, axis=1) for each in (scales, zeros)]
    return (codes.astype(np.float32) - repeated[1]) * repeated[0]


def joined(codes: np.ndarray) -> np.ndarray:
    """i32[..., n / 8]: eight codes in a word, the first in the lowest bits."""
    words = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))
    return words.sum(axis=-1, dtype=np.uint32).view(np.int32)


def in_awq_order(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(len(codes), -1, 8)[:, :, AWQ_ROWS].reshape(len(codes), -1)


def stored(method: str, name: str, parts: Parts, group: int) -> dict[str, np.ndarray]:
    codes, scales, zeros = parts
    if method == "awq":
        return {
            f"{name}.qweight": joined(in_awq_order(codes.T)),
            f"{name}.qzeros": joined(in_awq_order(zeros.T)),
            f"{name}.scales": scales.T,
        }
    if method.startswith("gptq"):
        return {
            f"{name}.qweight": joined(codes).T,
            f"{name}.qzeros": joined(zeros.T - (method == "gptq")),
            f"{name}.scales": scales.T,
            f"{name}.g_idx": (np.arange(codes.shape[1]) // group).astype(np.int32),
        }
    shape = np.array(codes.shape, np.int64)
    return {f"{name}.weight_packed": joined(codes), f"{name}.weight_scale": scales, f"{name}.weight_shape": shape}


def config_of(method: str) -> dict[str, Any]:
    configs = {"awq": AWQ, "gptq": GPTQ, "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2"}, "packed": PACKED}
    return {"quantization_config": configs[method]}


def save(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    import safetensors.numpy

    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(contiguous, folder / "model.safetensors")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["awq", "gptq", "gptq v2", "packed"])
def test_values_of_codes_scales_and_zeros(method: str, symmetric: bool, tmp_path: Path) -> None:
    if method == "packed" and not symmetric:
        pytest.skip("refused")
    parts = random_parts(ROWS, COLUMNS, GROUP, symmetric)
    save(tmp_path, stored(method, "a", parts, GROUP))
    tensors = folder_tensors(tmp_path, config_of(method))
    tensor = tensors["a.weight"]
    assert "a.weight" in tensors
    assert tensor.format is (QuantFormat.Q4_0 if symmetric else QuantFormat.Q4_1)
    wanted = values_of(parts, GROUP)
    if symmetric:
        np.testing.assert_array_equal(tensor.dequantize(), wanted)
    else:  # the minimum is rounded to a half float
        np.testing.assert_allclose(tensor.dequantize(), wanted, atol=2.0**-11 * 0.02 * 16)


@pytest.mark.parametrize(("rows", "columns", "group"), [(8, 32, 32), (136, 96, 96), (1000, 256, 64), (256, 1024, 128)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["awq", "gptq", "packed"])
def test_native_code_and_numpy_pack_alike(
    method: str, symmetric: bool, rows: int, columns: int, group: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if method == "packed" and not symmetric:
        pytest.skip("refused")
    save(tmp_path, stored(method, "a", random_parts(rows, columns, group, symmetric), group))
    config = json.loads(json.dumps(config_of(method)).replace(f'"group_size": {GROUP}', f'"group_size": {group}'))
    tensor = folder_tensors(tmp_path, config)["a.weight"]
    found = tensor.data

    def missing(*arguments: Any) -> None:
        raise MissingDependencyError("no native code")

    monkeypatch.setattr(integer_weights, "pack_codes", missing)
    np.testing.assert_array_equal(tensor.data, found)


@pytest.mark.parametrize("method", ["awq", "gptq", "packed"])
def test_a_model_gives_the_logits_of_its_values(method: str, tmp_path: Path) -> None:
    import torch

    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    plain, packed = tiny_folder(tmp_path / "plain", **sizes), tiny_folder(tmp_path / "packed", **sizes)
    dense, quantised = {}, {}
    for number, (name, tensor) in enumerate(folder_tensors(plain).items()):
        dense[name] = quantised[name] = tensor.dequantize()
        if name.endswith("_proj.weight"):
            parts = random_parts(*tensor.shape, GROUP, True, number)
            dense[name] = values_of(parts, GROUP)
            del quantised[name]
            quantised |= stored(method, name.removesuffix(".weight"), parts, GROUP)
    save(plain, dense)
    save(packed, quantised)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, **config_of(method)}))
    prompt, loaded = random_prompt(9, 0, 61), load_folder(packed)
    assert {part.format for part in loaded.weights.layers[0].qkv.parts} == {QuantFormat.Q4_0}
    theirs = prompt_logits(load_folder(plain).weights, prompt)
    np.testing.assert_allclose(prompt_logits(loaded.weights, prompt), theirs, atol=1e-4)
    assert header(packed)[1] == header(plain)[1]
    trained = LanguageModel.from_pretrained(packed)
    own = trained.prefill(torch.tensor([prompt]))[0][0].detach().numpy()
    np.testing.assert_allclose(own, theirs, atol=1e-4)
    trained.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    lines = read_contents(packed).tensors
    assert next(row["becomes"] for row in quant_rows(lines) if row["format"] == "I32") == INTO_BLOCKS


def test_the_library_of_compressed_tensors_packs_alike(tmp_path: Path) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="the oracle")
    import torch

    parts = random_parts(ROWS, COLUMNS, GROUP, True)
    codes = torch.from_numpy((parts[0] - 8).astype(np.int8))
    np.testing.assert_array_equal(helpers.pack_to_int32(codes, 4).numpy(), joined(parts[0]))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({**AWQ, "bits": 8}, "AWQ weights with bits = 8"),
        ({**AWQ, "version": "gemv"}, "AWQ weights with version = gemv"),
        ({**AWQ, "zero_point": False}, "AWQ weights with zero_point = False"),
        ({**GPTQ, "bits": 3}, "GPTQ weights with bits = 3"),
        ({**PACKED, "config_groups": {}}, "several kinds of weights"),
        ({**PACKED, "config_groups": {"g": {"weights": {**WEIGHTS, "symmetric": False}}}}, "symmetric = False"),
    ],
)
def test_other_layouts_are_refused(found: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, {"a": np.ones((2, 2), np.float32)})
    with pytest.raises(UnsupportedModelError, match=message):
        folder_tensors(tmp_path, {"quantization_config": found})


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    parts = random_parts(ROWS, COLUMNS, GROUP, True)
    whole = stored("gptq", "a", parts, GROUP)
    order = np.random.default_rng(0).permutation(whole["a.g_idx"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a.g_idx": order}, "groups of scattered columns"),
        ({"a.scales": whole["a.scales"][:, :5]}, "scales of shape"),
        ({"a.scales": None}, "a.scales"),
        ({"a.scales": np.full_like(whole["a.scales"], np.inf)}, "not numbers"),
        ({"a.qweight": whole["a.qweight"].astype(np.int64)}, "type I64"),
        ({"a.qzeros": whole["a.qzeros"][:, :2]}, "not usable"),
        (
            {name: value[:, :20] for name, value in whole.items() if value.ndim == 2 and "zeros" not in name},
            "not usable",
        ),
    ]
    for changes, message in cases:
        save(tmp_path, {name: value for name, value in {**whole, **changes}.items() if value is not None})
        with pytest.raises(BifolioError, match=message):
            _ = folder_tensors(tmp_path, config_of("gptq"))["a.weight"].data
    save(tmp_path, stored("gptq", "a", random_parts(ROWS, 48, 16, True), 16))
    with pytest.raises(BifolioError, match="whole blocks of 32 columns"):
        folder_tensors(tmp_path, {"quantization_config": {**GPTQ, "group_size": 16}})["a.weight"]
