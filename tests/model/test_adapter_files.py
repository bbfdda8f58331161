"""Adapters against PEFT: the logits of a base with an adapter, on every kind of file of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import row_model, save_row

from adapter_files import adapter_folder, adapter_tensors, gguf_adapter, peft_adapter
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.kernels.interface import AdapterUse, KernelSet
from bifolio.model import transformer
from bifolio.model.adapters.adapter import AdapterWeights, combined, read_adapter
from bifolio.model.adapters.sites import with_sites
from bifolio.model.gguf.mixes import parse_mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.model.weights import prepare
from bifolio.quant.formats import QuantFormat
from helpers import (
    cpu_kernel_names,
    fresh_folder,
    make_kernels,
    random_prompt,
    tiny_folder,
    tiny_model,
    transformers_logits,
)

PROMPT = random_prompt(11, vocab_size=61)
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "all linears of llama": ("llama", {"target_modules": "all-linear"}),
    "biases": ("llama", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "llama with scaled rope": ("llama3-rope", {"target_modules": ["q_proj", "k_proj"]}),
    "root of the rank": ("qwen3", {"target_modules": ATTENTION, "use_rslora": True, "r": 9}),
    "ranks and alphas by pattern": (
        "qwen3",
        {
            "target_modules": [*ATTENTION, "up_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
            "alpha_pattern": {"self_attn.v_proj": 3},
        },
    ),
    "regex": ("qwen2", {"target_modules": r".*\.(q_proj|up_proj)"}),
    "one layer": ("mistral", {"target_modules": ["gate_proj", "v_proj"], "layers_to_transform": [1]}),
    "gemma3": ("gemma3", {"target_modules": "all-linear"}),
    "joined matrices": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "transposed matrices": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "experts": ("qwen3moe", {"target_modules": ATTENTION, **EXPERTS}),
    "down of experts": ("qwen3moe", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "all linears and experts": ("qwen3moe", {"target_modules": "all-linear"}),
    "all linears and experts, with factors": (
        "qwen3moe",
        {"target_modules": "all-linear", "use_rslora": True, "r": 3, "lora_alpha": 5},
    ),
    "experts under the names of transformers": ("mixtral", {"target_modules": "all-linear"}),
    "latents": ("deepseek2", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    "hybrid": ("lfm2", {"target_modules": ["in_proj", "out_proj", "q_proj", "w1", "w2"]}),
}


def logits(model: LoadedModel, adapter: AdapterWeights | None, kernels: KernelSet | str = "reference") -> np.ndarray:
    """f32[t, vocab] of the prompt in one pass, without a cache."""
    kernels = make_kernels(kernels) if isinstance(kernels, str) else kernels
    batch = HostBatch.from_runs([], [Run(0, 0, PROMPT)], None).to(kernels)
    if adapter is not None:
        own = kernels.prepare_adapter(adapter.weights)
        batch = replace(batch, adapters=AdapterUse((own,), np.zeros(len(PROMPT), np.int32)))
    weights = with_sites(prepare(model.weights, kernels))
    return kernels.to_host(transformer.forward(weights, batch, kernels, None))


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_equal_those_of_peft(recipe: str, tmp_path: Path) -> None:
    """On the folder, and on a GGUF file of it, whose rows lie in another order."""
    pytest.importorskip("peft")
    architecture, config = RECIPES[recipe]
    original, folder = tiny_model(architecture)
    adapted, path = peft_adapter(original, **config)
    expected = transformers_logits(adapted, PROMPT)
    model = load_model(folder)
    adapter = read_adapter(path, model.config)
    error = np.abs(logits(model, None) - expected).max()
    for name in cpu_kernel_names():
        kernels = make_kernels(name)
        assert np.abs(logits(model, adapter, kernels) - expected).max() < 1e-4 < error / 100, name
    write_gguf(tmp_path / "base.gguf", model, QuantFormat.F32)
    file = load_model(tmp_path / "base.gguf")
    adapter = read_adapter(path, file.config)
    assert np.abs(logits(file, adapter) - expected).max() < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "targets"),
    [
        ("minimax_m2", "all-linear"),
        ("hunyuan_v3", "all-linear"),
        ("lfm3", "all-linear"),
        ("nemotron_h", ["in_proj", "up_proj"]),
    ],
)
def test_modules_have_the_names_of_transformers(row: str, targets: str | list[str]) -> None:
    """Where folders store them under other names."""
    pytest.importorskip("peft")
    original, folder = row_model(row), fresh_folder(row)
    save_row(row, original, folder)
    adapted, path = peft_adapter(original, target_modules=targets)
    model = load_model(folder)
    adapter = read_adapter(path, model.config)
    assert np.abs(logits(model, adapter) - transformers_logits(adapted, PROMPT)).max() < 1e-4


@pytest.mark.full
def test_factors_of_a_folder_apply_to_its_adapters(tmp_path: Path) -> None:
    """Falcon-H1: they are put into the weights at load, and those of PEFT have none."""
    pytest.importorskip("peft")
    original = row_model("falcon_h1")
    save_row("falcon_h1", original, tmp_path / "base")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "gate_proj", "up_proj", "down_proj"]
    adapted, path = peft_adapter(original, target_modules=names, task_type="CAUSAL_LM")
    model = load_model(tmp_path / "base")
    assert model.config.weight_factors
    expected = transformers_logits(adapted, PROMPT)
    assert np.abs(logits(model, read_adapter(path, model.config)) - expected).max() < 1e-4
    assert np.abs(logits(model, None) - expected).max() > 1e-2
    write_gguf(tmp_path / "base.gguf", model, QuantFormat.F32)
    with pytest.raises(UnsupportedModelError, match="load the base as a folder"):
        read_adapter(path, load_model(tmp_path / "base.gguf").config)


@pytest.mark.full
@pytest.mark.parametrize("mix", ["q8_0", "q4_k_m", "q4_0"])
def test_a_quantised_base_with_an_adapter_equals_peft_on_its_dequantised_weights(mix: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch

    original, folder = tiny_model("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    write_gguf(tmp_path / "base.gguf", load_model(folder), parse_mix(mix))
    file = load_model(tmp_path / "base.gguf")
    adapted, path = peft_adapter(original, target_modules="all-linear")
    names = dict(adapted.named_parameters())
    before = logits(file, None)
    from bifolio.model.huggingface.folder_writer import write_folder

    write_folder(tmp_path / "dense", file, QuantFormat.F32)
    dense = load_model(tmp_path / "dense")
    assert np.abs(logits(dense, None) - before).max() < 1e-4
    with torch.no_grad():
        from safetensors.torch import load_file

        for name, values in load_file(tmp_path / "dense" / "model.safetensors").items():
            base = name.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")
            target = names.get(f"base_model.model.{base}", names.get(f"base_model.model.{name}"))
            if target is not None:
                target.copy_(values)
    expected = transformers_logits(adapted, PROMPT)
    assert np.abs(logits(file, read_adapter(path, file.config)) - expected).max() < 1e-3


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's converter orders them: neighbours are rotated together."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def as_gguf(tensors: dict[str, np.ndarray], heads: dict[str, int]) -> dict[str, np.ndarray]:
    """PEFT's tensors under the names and in the order of GGUF adapters."""
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down"}  # fmt: skip
    found = {}
    for name, values in tensors.items():
        _, _, rest = name.partition("layers.")
        number, _, module = rest.partition(".")
        module, _, side = module.partition(".lora_")
        if side.startswith("B") and module in heads:
            values = permuted(values, heads[module])
        found[f"blk.{number}.{names[module]}.weight.lora_{side[0].lower()}"] = values
    return found


@pytest.mark.parametrize("base", ["folder", "file"])
def test_an_adapter_of_llama_cpp_equals_the_same_in_pefts_layout(base: str, tmp_path: Path) -> None:
    folder = tiny_folder()
    tensors = adapter_tensors(folder)
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    path = gguf_adapter(tmp_path / "adapter.gguf", as_gguf(tensors, heads), alpha=8.0)
    expected = logits(load_model(folder), read_adapter(adapter_folder(folder), load_model(folder).config))
    model = load_model(folder)
    if base == "file":
        write_gguf(tmp_path / "base.gguf", model, QuantFormat.F32)
        model = load_model(tmp_path / "base.gguf")
    found = logits(model, read_adapter(path, model.config))
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(found - logits(model, None)).max() > 0.1


def test_a_sum_of_adapters_adds_their_changes() -> None:
    folder = tiny_folder()
    model = load_model(folder)
    first, second = (read_adapter(adapter_folder(folder, seed=seed, rank=3 + seed), model.config) for seed in (0, 1))
    both = combined([(first, 0.5), (second, -2.0)])
    merged = load_model(folder)
    tensors = {}
    for adapter, scale, rank in ((adapter_tensors(folder, 3, 0), 0.5, 3), (adapter_tensors(folder, 4, 1), -2.0, 4)):
        for name, values in adapter.items():
            if "lora_A" in name:
                up = adapter[name.replace("lora_A", "lora_B")]
                base = name.removeprefix("base_model.model.").replace(".lora_A", "")
                tensors[base] = tensors.get(base, 0) + scale * 2 * (up @ values)
                assert values.shape[0] == rank
    from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors

    weights = open_safetensors(folder / "model.safetensors").tensors
    summed = {name: np.array(weights[name].dequantize()) + tensors.get(name, 0) for name in weights}
    target = tiny_folder()
    write_safetensors(target / "model.safetensors", summed)
    merged = load_model(target)
    assert np.abs(logits(model, both) - logits(merged, None)).max() < 1e-4
    assert len({first.digest, second.digest, both.digest, combined([(first, 0.5)]).digest}) == 4
    assert combined([(first, 1.0)]) is first


# -- damaged and foreign files -----------------------------------------------------------------------------------------
def _without(tensors: dict[str, np.ndarray], end: str) -> dict[str, np.ndarray]:
    return {name: values for name, values in tensors.items() if not name.endswith(end)}


def _changed(tensors: dict[str, np.ndarray], end: str, change: Any) -> dict[str, np.ndarray]:
    return {name: change(values) if name.endswith(end) else values for name, values in tensors.items()}


Q_UP, Q_DOWN = "layers.0.self_attn.q_proj.lora_B.weight", "layers.0.self_attn.q_proj.lora_A.weight"
WRONG_TENSORS = {
    "a missing half": (lambda t: _without(t, Q_UP), "lacks lora_B"),
    "other ranks": (lambda t: _changed(t, Q_UP, lambda v: v[:, :2].copy()), "do not belong together"),
    "another width": (lambda t: _changed(t, Q_DOWN, lambda v: v[:, :-1].copy()), "use the adapter's own base"),
    "more rows": (lambda t: _changed(t, Q_UP, lambda v: np.concatenate([v, v])), "use the adapter's own base"),
    "NaN": (lambda t: _changed(t, Q_UP, lambda v: v * np.nan), "not finite"),
    "infinity": (lambda t: _changed(t, Q_DOWN, lambda v: v + np.inf), "not finite"),
    "rank 0": (lambda t: _changed(_changed(t, Q_UP, lambda v: v[:, :0]), Q_DOWN, lambda v: v[:0]), "rank 0"),
    "another layer": (
        lambda t: {name.replace("layers.1", "layers.7"): values for name, values in t.items()},
        "cannot be changed in this llama model",
    ),
    "the head": (
        lambda t: {f"base_model.model.lm_head.lora_{s}.weight": np.ones((4, 4), np.float32) for s in "AB"},
        "target_modules does not name",
    ),
    "one matrix under two names": (
        lambda t: t | {n.replace("model.model.", "model.model.language_model."): v for n, v in t.items()},
        "under two names",
    ),
    "two spellings": (
        lambda t: t | {n.replace(".weight", "").replace("lora_A", "lora_A.default") + ".weight": v for n, v in t.items()
                       if "lora_A" in n},
        "under two names",
    ),
    "a strange tensor": (lambda t: t | {"magnitude": np.ones((2, 2), np.float32)}, "no part of a low-rank change"),
    "no tensors": (lambda t: {}, "holds no tensor"),
}  # fmt: skip
WRONG_CONFIGS = {
    "a huge rank": ({"r": 10**9}, "where the configuration says 1000000000"),
    "a rank beyond all bounds": ({"r": 10**30}, "r is 1"),
    "a negative rank": ({"r": -4}, "r is -4"),
    "a text as alpha": ({"lora_alpha": "many"}, "lora_alpha is 'many'"),
    "DoRA": ({"use_dora": True}, "use_dora means DoRA"),
    "whole modules": ({"modules_to_save": ["norm"]}, "modules_to_save names 'norm': only the head"),
    "a head that is not there": ({"modules_to_save": ["lm_head"]}, r"'lm_head', but lm_head\.weight is missing"),
    "biases of the base": ({"bias": "all"}, "bias='all'"),
    "another method": ({"peft_type": "IA3"}, "type IA3"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    "fewer modules": ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    "a slow pattern": ({"rank_pattern": {"(a+)+b": 4}}, "too complex"),
    "a broken pattern": ({"alpha_pattern": {"(": 4}}, "no regular expression"),
    "a bias that is not there": ({"lora_bias": True}, "lora_bias does not say"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_refused_by_name(name: str) -> None:
    change, message = WRONG_TENSORS[name]
    base = tiny_folder()
    path = adapter_folder(base, tensors=change(adapter_tensors(base)))
    with pytest.raises(ModelFileError, match=message):
        read_adapter(path, load_model(base).config)


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_configurations_are_refused_by_name(name: str) -> None:
    config, message = WRONG_CONFIGS[name]
    base = tiny_folder()
    path = adapter_folder(base, **config)
    with pytest.raises(ModelFileError, match=message):
        read_adapter(path, load_model(base).config)


def test_a_rank_above_the_limit_and_a_folder_without_weights_are_refused(tmp_path: Path) -> None:
    base = tiny_folder()
    config = load_model(base).config
    with pytest.raises(ModelFileError, match="rank 4, above max_lora_rank=3"):
        read_adapter(adapter_folder(base), config, max_rank=3)
    path = adapter_folder(base)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"adapter_model.bin can hold any program"):
        read_adapter(path, config)
    with pytest.raises(ModelFileError, match="is no adapter"):
        read_adapter(tmp_path, config)
    (path / "adapter_config.json").write_text("[")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        read_adapter(path, config)


def test_gguf_files_that_are_no_adapter_of_the_base_are_refused(tmp_path: Path) -> None:
    base = tiny_folder()
    config = load_model(base).config
    tensors = as_gguf(adapter_tensors(base), {"self_attn.q_proj": 4, "self_attn.k_proj": 2})
    first = next(iter(tensors))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensors": tensors, "type": "model"}, "type 'model'"),
        ({"tensors": tensors, "architecture": "qwen3"}, "changes a 'qwen3' model"),
        ({"tensors": {first: tensors[first]}}, "lacks .lora_b"),
        ({"tensors": {**tensors, "output_norm.weight": np.ones(4, np.float32)}}, "'output_norm.weight'"),
        ({"tensors": {n.replace("blk.0", "blk.9"): v for n, v in tensors.items()}}, "cannot be changed"),
    ]
    for number, (options, message) in enumerate(wrong):
        path = gguf_adapter(tmp_path / f"{number}.gguf", **options)
        with pytest.raises(ModelFileError, match=message):
            read_adapter(path, config)


def test_a_configuration_with_unknown_fields_is_read(tmp_path: Path) -> None:
    """PEFT adds fields with each release; those that change nothing are no reason to refuse."""
    base = tiny_folder()
    path = adapter_folder(base, some_new_field=None, lora_dropout=0.5)
    assert read_adapter(path, load_model(base).config).rank == 4
    fields = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(fields | {"use_qalora": True}))
    with pytest.raises(UnsupportedModelError, match="QALoRA"):
        read_adapter(path, load_model(base).config)
