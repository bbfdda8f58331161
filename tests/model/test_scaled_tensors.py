"""Folders in FP8 against torch's type, and folders that are quantised in ways that are not read."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from whole_prompt import prompt_logits

from bifolio import LLM
from bifolio.cli.inspect import read_contents
from bifolio.errors import BifolioError, ModelFileError, UnsupportedModelError
from bifolio.kernels.cpu import decode_fp8
from bifolio.model.huggingface import scaled_tensors
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.scaled_tensors import decode_without_kernels
from bifolio.model.registry import header
from bifolio.quant.formats import QuantFormat
from helpers import random_prompt, tiny_folder

pytestmark = pytest.mark.full  # torch
BLOCK = (16, 24)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}


def fp8_folder(folder: Path, kind: str, **changes: Any) -> tuple[Path, Path]:
    """(A folder with matrices in FP8, the same values in bfloat16)"""
    import safetensors.torch
    import torch

    source, generator = tiny_folder(folder / "plain"), torch.Generator().manual_seed(0)
    stored, plain = {}, {}
    for name, tensor in safetensors.torch.load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        rows, columns = tensor.shape
        shape = {"block": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), "row": (rows, 1), "one": ()}[kind]
        scale = (0.5 + torch.rand(shape, generator=generator)) / 300
        whole = scale
        if kind == "block":
            whole = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:rows, :columns]
        stored[name] = (tensor / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + ("_scale_inv" if kind == "block" else "_scale")] = scale
        plain[name] = (stored[name].float() * whole).bfloat16()
    packed = tiny_folder(folder / "fp8")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": FP8, **changes}))
    safetensors.torch.save_file(stored, packed / "model.safetensors")
    safetensors.torch.save_file(plain, source / "model.safetensors")
    return packed, source


@pytest.mark.parametrize("kind", ["block", "row", "one"])
def test_logits_are_those_of_the_decoded_values(kind: str, tmp_path: Path) -> None:
    packed, plain = fp8_folder(tmp_path, kind)
    prompt, loaded = random_prompt(9, 0, 61), load_folder(packed)
    assert {part.format for part in loaded.weights.layers[0].qkv.parts} == {QuantFormat.BF16}
    np.testing.assert_array_equal(
        prompt_logits(loaded.weights, prompt), prompt_logits(load_folder(plain).weights, prompt)
    )
    assert header(packed)[2] in ("F8_E4M3", "F32")


def test_weights_are_converted_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = fp8_folder(tmp_path, "block")
    converted: list[weakref.ref[np.ndarray]] = []
    most = 0

    def watched(*arguments: Any) -> np.ndarray | None:
        nonlocal most
        found = decode_fp8(*arguments)
        assert found is not None
        converted.append(weakref.ref(found))
        most = max(most, sum(reference() is not None for reference in converted))
        return found

    monkeypatch.setattr(scaled_tensors, "decode_fp8", watched)
    read_contents(packed)
    loaded = load_folder(packed)
    loaded.digest()
    assert not converted
    LLM(packed, num_blocks=20)
    assert len(converted) == 7 * loaded.config.num_layers  # each matrix once
    assert most <= 3  # those of queries, keys and values


def test_every_value_of_the_type(tmp_path: Path) -> None:
    import safetensors.torch
    import torch

    from bifolio.model.huggingface.hf_loader import folder_tensors

    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(2)[None].repeat(3, 1)
    weight = {"a.weight": codes.view(torch.float8_e4m3fn), "a.weight_scale": torch.full((1,), 0.37)}
    safetensors.torch.save_file(weight, tmp_path / "model.safetensors")
    found = folder_tensors(tmp_path)["a.weight"].dequantize()
    wanted = (weight["a.weight"].float() * weight["a.weight_scale"]).bfloat16().float().numpy()
    np.testing.assert_array_equal(found, wanted)


def test_small_values_survive_where_denormals_are_flushed() -> None:
    """A program may have set its processor so: the values below 2**-6 of the type are no denormals as floats."""
    import torch

    codes = np.arange(8, dtype=np.uint8)[None].repeat(3, 0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = decode_fp8(codes, np.ones((3, 1), np.float32), (1, 8))
    finally:
        torch.set_flush_denormal(False)
    assert found is not None
    np.testing.assert_array_equal(found, decode_without_kernels(codes, np.ones((3, 1), np.float32), (1, 8)))
    assert found.view(np.uint16)[:, 1:].all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (64, 200), (33, 128)])
@pytest.mark.parametrize("block", [(1, 1), (3, 50), (128, 128), (64, 1000)])
def test_native_code_and_numpy_decode_alike(shape: tuple[int, int], block: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 127) == 127] = 3
    scales = rng.uniform(1e-4, 2, tuple(-(-size // part) for size, part in zip(shape, block, strict=True)))
    found = decode_fp8(codes, scales.astype(np.float32), block)
    assert found is not None
    np.testing.assert_array_equal(found, decode_without_kernels(codes, scales.astype(np.float32), block))
    codes[-1, -1] = 255
    assert decode_fp8(codes, scales.astype(np.float32), block) is None
    assert decode_without_kernels(codes, scales.astype(np.float32), block) is None


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by bitsandbytes, which is not supported: use the folder"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors int-quantized"),
        ({"bits": 4}, "quantised by an unknown method"),
    ],
)
def test_other_ways_are_refused_by_name(found: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for place in ({"quantization_config": found}, {"text_config": {"quantization_config": found}}):
        (folder / "config.json").write_text(json.dumps({**config, **place}))
        for read in (load_folder, header):
            with pytest.raises(UnsupportedModelError, match=message):
                read(folder)


@pytest.mark.parametrize("block", [[16], [0, 16], "16", [16.0, 16]])
def test_impossible_blocks_are_refused(block: Any, tmp_path: Path) -> None:
    changed = {"quantization_config": {**FP8, "weight_block_size": block}}
    with pytest.raises(ModelFileError, match="weight_block_size"):
        load_folder(fp8_folder(tmp_path, "block", **changed)[0])


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    import safetensors.torch
    import torch

    packed, _ = fp8_folder(tmp_path, "block")
    whole = safetensors.torch.load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    broken = whole[name].view(torch.uint8).clone()
    broken[0, 0] = 255
    cases = {
        "contains values that are not numbers": {name: broken.view(torch.float8_e4m3fn)},
        "has FP8 scales of shape": {name + "_scale_inv": torch.ones(3, 5)},
        "is stored in FP8, and its scale": {name + "_scale_inv": None},
    }
    for message, changes in cases.items():
        tensors = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        safetensors.torch.save_file(tensors, packed / "model.safetensors")
        with pytest.raises(BifolioError, match=message):
            LLM(packed)
