"""Folders of BitNet: packed ternary weights, and weights that are rounded at load, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import row_model, save_row
from whole_prompt import prompt_logits

from bifolio.cli.inspect import read_contents
from bifolio.cli.inspect_quant import quant_rows
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.hf_loader import folder_tensors, load_folder
from bifolio.quant.formats import QuantFormat
from helpers import (
    cpu_kernel_names,
    make_kernels,
    make_runner,
    open_entry,
    random_prompt,
    run_chunks,
    transformers_logits,
)

pytestmark = pytest.mark.full  # torch
OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = OFFLINE | {"quantization_mode": "online"}
DIVIDED = {"quant_method": "bitnet", "linear_class": "bitlinear"}
SCALE = 0.40625  # a half float


def configured(settings: dict[str, Any]) -> dict[str, Any]:
    return {"quantization_config": settings}


def save(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.safetensors")


def packed(values: Any, scale: float) -> dict[str, Any]:
    """A ternary matrix as transformers stores it."""
    import torch
    from transformers.integrations.bitnet import pack_weights

    return {"": pack_weights(values.clone()), "_scale": torch.tensor([scale])}


def random_ternary(rows: int, columns: int) -> Any:
    import torch

    return torch.randint(-1, 2, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()


@pytest.mark.parametrize("columns", [64, 512])
@pytest.mark.parametrize(("settings", "factor"), [(OFFLINE, SCALE), (DIVIDED, 1 / SCALE)])
def test_packed_values(columns: int, settings: dict[str, Any], factor: float, tmp_path: Path) -> None:
    values = random_ternary(24, columns)
    save(tmp_path, {f"a.weight{end}": part for end, part in packed(values, SCALE).items()})
    tensor = folder_tensors(tmp_path, configured(settings))["a.weight"]
    assert tensor.format is (QuantFormat.Q4_0 if columns == 64 else QuantFormat.TQ2_0)
    wanted = values.numpy() * np.float32(np.float16(factor))
    np.testing.assert_array_equal(tensor.dequantize(), wanted)
    np.testing.assert_array_equal(tensor.select_rows(slice(5, 20)).dequantize(), wanted[5:20])


@pytest.mark.parametrize("columns", [64, 512])
def test_weights_are_rounded_as_transformers_rounds_them(columns: int, tmp_path: Path) -> None:
    import torch
    from transformers.integrations.bitnet import WeightQuant

    trained = torch.randn(24, columns, generator=torch.Generator().manual_seed(1)) * 0.02
    names = ("layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "embed_tokens.weight")
    save(tmp_path, {f"model.{name}": trained for name in names})
    tensors = folder_tensors(tmp_path, configured(ONLINE | {"modules_to_not_convert": ["down_proj"]}))
    with torch.compiler.set_stance("force_eager"):
        theirs = WeightQuant.apply(trained).numpy()
    np.testing.assert_allclose(tensors[f"model.{names[0]}"].dequantize(), theirs, rtol=2.0**-11)
    for name in names[1:]:
        np.testing.assert_array_equal(tensors[f"model.{name}"].dequantize(), trained.numpy())


@pytest.mark.parametrize("name", cpu_kernel_names())
def test_a_packed_folder_gives_the_logits_of_its_values(name: str, tmp_path: Path) -> None:
    """Of a model with these weights and activations as they are."""
    import torch

    model = row_model("bitnet")
    save_row("bitnet", model, tmp_path)
    stored: dict[str, Any] = {}
    with torch.no_grad():
        for field, value in model.named_parameters():
            if field.endswith("_proj.weight"):
                ternary = random_ternary(*value.shape)
                value.copy_(ternary * SCALE)
                stored |= {field + end: part for end, part in packed(ternary, SCALE).items()}
            elif field != "lm_head.weight":  # tied
                stored[field] = value.clone()
    save(tmp_path, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | configured(OFFLINE)))
    prompt = random_prompt(20)
    theirs = transformers_logits(model, prompt)
    assert theirs.std() > 0.3
    loaded = load_folder(tmp_path)
    runner, blocks = make_runner(loaded, kernels=make_kernels(name), block_size=4, poison=True)
    entry = open_entry(runner, blocks)
    found = [run_chunks(runner, entry, prompt[:13], 5), run_chunks(runner, entry, prompt[13:], 1, decode=True)]
    difference = np.concatenate(found) - theirs
    tolerance = 1e-5 if name == "reference" else 0.05  # the native kernels round activations to 8 bits, block by block
    assert difference.std() < tolerance * theirs.std()
    write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
    np.testing.assert_allclose(prompt_logits(load_gguf(tmp_path / "model.gguf").weights, prompt), theirs, atol=1e-4)
    (row,) = (row for row in quant_rows(read_contents(tmp_path).tensors) if row["format"] == "I8")
    assert row["becomes"] == "4 bits, a scale for 32"


def test_damaged_and_unknown_weights_are_refused(tmp_path: Path) -> None:
    values = random_ternary(24, 64)
    parts = packed(values, SCALE)
    parts[""][3, 5] |= 3
    save(tmp_path, {f"a.weight{end}": part for end, part in parts.items()})
    with pytest.raises(ModelFileError, match="values other than -1, 0 and 1"):
        folder_tensors(tmp_path, configured(OFFLINE))["a.weight"].dequantize()
    save(tmp_path, {f"a.weight{end}": part for end, part in packed(values, 0.0).items()})
    with pytest.raises(ModelFileError, match="no half float"):
        folder_tensors(tmp_path, configured(DIVIDED))["a.weight"].dequantize()
    for changed, words in (({"linear_class": "other"}, "linear_class"), ({"quantization_mode": "both"}, "both"),
                           ({"use_rms_norm": True}, "use_rms_norm")):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match=words):
            folder_tensors(tmp_path, configured(OFFLINE | changed))
