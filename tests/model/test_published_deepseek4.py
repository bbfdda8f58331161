"""Folders of DeepSeek-V4 as they are published: FP8, and experts in FP4 or FP8, against transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_rows import row_folder
from safetensors.torch import load_file, save_file
from test_deepseek4 import rename
from test_family_rows import worst_chunks

from bifolio.api.llm import LLM
from bifolio.errors import ModelFileError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.huggingface.hf_loader import folder_tensors, load_folder
from bifolio.quant import QuantFormat
from bifolio.sampling_params import SamplingParams
from helpers import random_prompt, transformers_logits

NAME, LENGTH, BLOCK = "deepseek_v4", 23, (8, 8)
IN_FP8 = (".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
DESCRIPTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As transformers does it when it loads such a folder; skips where it is too old for that."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(module, "Fp8Dequantize"):
        pytest.skip("this version of transformers does not read folders in FP8")
    found: torch.Tensor = module.Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    return found


def powers(largest: torch.Tensor, most: float) -> torch.Tensor:
    """The least powers of two by which values up to `largest` fit, where codes end at `most`."""
    return torch.exp2(torch.ceil(torch.log2(largest / most)))


def in_fp8(weight: torch.Tensor, rounds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of blocks; scales are powers of two if `rounds`."""
    (rows, columns), (height, width) = weight.shape, BLOCK
    blocks = weight.reshape(rows // height, height, columns // width, width)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = powers(largest, 448.0) if rounds else largest / 448.0
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scales.to(torch.float8_e8m0fnu) if rounds else scales


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(two codes in a byte, scales of 32 values)."""
    blocks = weight.reshape(len(weight), -1, 32)
    scales = powers(blocks.abs().amax(dim=-1), 6.0)
    scaled = blocks / scales[..., None]
    codes = (scaled.abs()[..., None] - CODES).abs().argmin(dim=-1) + 8 * (scaled < 0)
    codes = codes.reshape(len(weight), -1, 2)
    packed = (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8).view(torch.int8)
    return packed, scales.to(torch.float8_e8m0fnu)


def quantised(name: str, weight: torch.Tensor, experts: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    if ".experts." in name and experts == "fp4":
        return in_fp4(weight)
    is_compressed = ".compressor." in name and ".indexer.wq_b." not in name
    if ".experts." in name or (any(part in name for part in IN_FP8) and not is_compressed):
        return in_fp8(weight, rounds=experts == "fp4")
    return None


@cache
def folders(experts: str, folder: Path) -> tuple[Path, Any]:
    """The published folder, and the model of transformers with the values that its weights stand for."""
    source = row_folder(NAME)[1]
    names = json.loads((source / "config.json").read_text())
    published, dense, stored, plain = folder / "published", folder / "dense", {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        found, own = quantised(name, weight, experts), rename(name)
        plain[name], stored[own] = weight, weight
        if found is not None:
            stored[own], stored[own.removesuffix(".weight") + ".scale"] = found
            plain[name] = dequantised(*found, torch.bfloat16).float()
    for path, tensors, own in (
        (published, stored, {"expert_dtype": experts, "quantization_config": DESCRIPTION}),
        (dense, plain, {}),
    ):
        path.mkdir()
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
        (path / "config.json").write_text(json.dumps(names | own))
    from transformers import AutoModelForCausalLM

    return published, AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


@pytest.mark.full
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_logits_are_those_of_transformers(experts: str, tmp_path: Path) -> None:
    folder, model = folders(experts, tmp_path)
    theirs = transformers_logits(model, random_prompt(LENGTH + 1))
    loaded = load_folder(folder)
    moe = loaded.weights.layers[1].moe
    assert moe is not None
    formats = {part.format for linear in (*moe.experts.up, *moe.experts.down) for part in linear.parts}
    assert formats == {QuantFormat.MXFP4 if experts == "fp4" else QuantFormat.BF16}
    assert worst_chunks(loaded, theirs, (LENGTH, 7), 4, ReferenceKernels()) < 1e-3


@pytest.mark.full
def test_a_folder_runs_on_the_usual_kernels(tmp_path: Path) -> None:
    """Codes and scales are kept in memory; activations are rounded beside them."""
    folder, model = folders("fp4", tmp_path)
    prompt = random_prompt(LENGTH)
    theirs = torch.log_softmax(torch.from_numpy(transformers_logits(model, prompt)[-1]), dim=-1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=5)
    with LLM(folder, block_size=4, chunk_size=5, num_blocks=64, activations="int16") as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        (again,) = llm.generate([prompt], params, use_tqdm=False)
    places = output.outputs[0].logprobs[0]
    assert max(abs(entry.logprob - float(theirs[token])) for token, entry in places.items()) < 1e-2
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def matrix_of(folder: Path, **tensors: torch.Tensor) -> Any:
    save_file(tensors, folder / "model.safetensors")
    return folder_tensors(folder, {"quantization_config": DESCRIPTION})["a.weight"]


@pytest.mark.full
def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    codes, scales = in_fp4(torch.randn(4, 64))
    found = matrix_of(tmp_path, **{"a.weight": codes, "a.scale": scales})
    expected = dequantised(codes, scales, torch.float32)
    assert torch.equal(torch.from_numpy(found.dequantize()), expected)
    part = torch.from_numpy(found.select_rows(slice(1, 3)).dequantize())
    assert torch.equal(part, expected[1:3])
    with pytest.raises(ModelFileError, match="FP4 codes has shape"):
        matrix_of(tmp_path, **{"a.weight": codes, "a.scale": scales[:, :1].contiguous()})
    with pytest.raises(ModelFileError, match="have type F32, not F8_E8M0"):
        matrix_of(tmp_path, **{"a.weight": codes, "a.scale": scales.float()})
    broken = torch.full((4, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(ModelFileError, match="not numbers"):
        matrix_of(tmp_path, **{"a.weight": codes, "a.scale": broken}).dequantize()
    own, blocks = in_fp8(torch.randn(8, 8), rounds=True)
    with pytest.raises(ModelFileError, match="not numbers"):
        matrix_of(tmp_path, **{"a.weight": own, "a.scale": broken[:1, :1].contiguous()}).dequantize()
    whole = matrix_of(tmp_path, **{"a.weight": own, "a.scale": blocks})
    assert torch.equal(torch.from_numpy(whole.dequantize()), own.float() * blocks.float())
