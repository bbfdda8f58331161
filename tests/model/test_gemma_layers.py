"""Gemma 3n and 4: caches of layers that differ, inputs of layers past their table, text parts of larger models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import ROWS, row_folder, row_model, save_row
from gemma_rows import GEMMA_ROWS
from whole_prompt import prompt_logits

from bifolio.api.llm import LLM
from bifolio.beam_params import BeamSearchParams
from bifolio.cli.inspect import architecture_lines
from bifolio.config import ModelConfig, SpeculativeConfig, layers_of
from bifolio.errors import ConfigError, UnsupportedModelError
from bifolio.kernels.select import select_kernels
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.model.families.gemma4 import JoinedExperts
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.shards import check_size
from bifolio.quant import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.sampling_params import SamplingParams
from helpers import random_prompt, transformers_logits

SMALL = "gemma4 with inputs of layers"


def real(name: str) -> ModelConfig:
    return config_from_hf(GEMMA_ROWS[name][2])


# -- the cache --------------------------------------------------------------------------------------------------------
def test_only_layers_that_write_keys_and_values_take_memory() -> None:
    config = real(SMALL)  # 15 layers, 10 of which read the keys and values of layers 3 and 4
    layout = CacheLayout.of_model(config, 4, 16, "bf16")
    assert (layout.num_layers, layout.layer_heads) == (5, ((1, 256),) * 4 + ((1, 512),))
    assert layout.bytes_per_token == 2 * 2 * (4 * 256 + 512)


def test_layers_have_heads_of_their_own_in_the_cache() -> None:
    layout = CacheLayout.of_model(real("gemma4"), 3, 4, "f32", poison=True)
    assert layout.layer_heads == (((16, 256),) * 5 + ((4, 512),)) * 2
    storage = KVStorage(layout)
    assert [array.shape for array in storage.keys[4:6]] == [(3, 16, 4, 256), (3, 4, 4, 512)]
    assert storage.num_bytes == sum(array.nbytes for array in (*storage.keys, *storage.values))


def test_blocks_of_unequal_layers_are_moved_and_sent_whole() -> None:
    layers = layers_of(12, head_dim=((32,) * 5 + (64,)) * 2)
    small = replace(real("gemma4"), num_heads=4, num_kv_heads=2, head_dim=32, layers=layers, ropes=(),
                    learned_positions=True)  # fmt: skip
    layout = CacheLayout.of_model(small, 4, 2, "q8_0")
    source, target = KVStorage(layout), KVStorage(layout)
    rng = np.random.default_rng(0)
    for layer, (heads, size) in enumerate(layout.layer_heads):
        rows = rng.standard_normal((2, heads, size)).astype(np.float32)
        source.write(layer, np.array([2, 3]), rows, -rows)
    target.write_block(3, source.read_block(1))
    source.move_blocks([(1, 2)])
    for layer in range(layout.num_layers):
        for ours, moved in zip(source.gather(layer, [1], 2), source.gather(layer, [2], 2), strict=True):
            np.testing.assert_array_equal(moved, ours)
        for ours, sent in zip(source.gather(layer, [1], 2), target.gather(layer, [3], 2), strict=True):
            np.testing.assert_array_equal(sent, ours)


@pytest.mark.full
@pytest.mark.parametrize("name", GEMMA_ROWS)
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_narrow_caches_change_the_logits_little(name: str, kv_dtype: str) -> None:
    _, folder = row_folder(name)
    prompt = random_prompt(20)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    found = []
    for dtype in ("f32", kv_dtype):
        llm = LLM(folder, kernels=select_kernels("cpu", threads=1), kv_cache_dtype=dtype, chunk_size=5)
        (output,) = llm.generate([prompt], params)
        found.append(output.outputs[0].cumulative_logprob)
    assert abs(found[0] - found[1]) < 0.2


# -- the engine -------------------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("name", GEMMA_ROWS)
def test_prefix_hits_forks_beams_and_drafts_equal_the_plain_run(name: str) -> None:
    _, folder = row_folder(name)
    kernels = select_kernels("cpu", threads=1)
    shared = random_prompt(17)
    prompts = [[*shared, 5, 6], [*shared, 7], shared]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def tokens(params: Any = greedy, **options: Any) -> list[list[list[int]]]:
        llm = LLM(folder, kernels=kernels, block_size=4, chunk_size=6, poison_free_blocks=True, **options)
        outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
        return [[part.token_ids for part in output.outputs] for output in outputs]

    plain = tokens(enable_prefix_caching=False)
    assert tokens() == plain
    assert tokens(speculative=SpeculativeConfig(length=3)) == plain
    assert tokens(replace(greedy, n=2)) == [[line[0]] * 2 for line in plain]
    beams = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    caching, without = (
        LLM(folder, kernels=kernels, block_size=4, enable_prefix_caching=cached).beam_search(prompts, beams)
        for cached in (True, False)
    )
    assert [[beam.tokens for beam in each.sequences] for each in caching] == [
        [beam.tokens for beam in each.sequences] for each in without
    ]


# -- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_tokens_past_the_table_of_inputs_read_its_first_row(tmp_path: Path) -> None:
    """As transformers does, from a folder and from a GGUF file, whose table has a row for each token."""
    model = row_model("gemma3n", vocab_size_per_layer_input=60)
    save_row("gemma3n", model, tmp_path / "folder")
    prompt = [3, 59, 60, 96, 4, 71]
    theirs = transformers_logits(model, prompt)
    loaded = load_folder(tmp_path / "folder")
    np.testing.assert_allclose(prompt_logits(loaded.weights, prompt), theirs, atol=1e-4)
    write_gguf(tmp_path / "model.gguf", loaded, QuantFormat.F32)
    np.testing.assert_allclose(prompt_logits(load_gguf(tmp_path / "model.gguf").weights, prompt), theirs, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", GEMMA_ROWS)
def test_the_text_part_of_a_folder_with_images_is_loaded(name: str, tmp_path: Path) -> None:
    """Its configuration lies in `text_config`, and its tensors have another prefix."""
    from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors

    _, folder = row_folder(name)
    text = json.loads((folder / "config.json").read_text())
    whole = text["model_type"].removesuffix("_text")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": whole, "vision_config": {}, "text_config": text}))
    tensors = open_safetensors(folder / "model.safetensors").tensors
    write_safetensors(
        tmp_path / "model.safetensors",
        {name.replace("model.", "model.language_model.", 1): np.array(t.dequantize()) for name, t in tensors.items()},
    )
    prompt = random_prompt(9)
    expected = prompt_logits(load_folder(folder).weights, prompt)
    np.testing.assert_array_equal(prompt_logits(load_folder(tmp_path).weights, prompt), expected)


@pytest.mark.full
@pytest.mark.parametrize("name", GEMMA_ROWS)
@pytest.mark.parametrize("format", [QuantFormat.Q8_0, QuantFormat.Q4_0])
def test_quantised_files_are_close_to_the_dense_one(name: str, format: QuantFormat, tmp_path: Path) -> None:
    loaded = load_folder(row_folder(name)[1])
    write_gguf(tmp_path / "model.gguf", loaded, format)
    prompt = random_prompt(9)
    dense, found = (prompt_logits(m.weights, prompt) for m in (loaded, load_gguf(tmp_path / "model.gguf")))
    assert np.corrcoef(dense.reshape(-1), found.reshape(-1))[0, 1] > (0.99 if format is QuantFormat.Q8_0 else 0.7)


@pytest.mark.parametrize("formats", [("F16", "F16"), ("Q8_0", "Q4_0")])
def test_gate_and_up_of_experts_may_be_two_tensors(formats: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in range(2)]
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up")]
    stored = {
        name: QuantizedTensor.quantize(part.reshape(6, 64), QuantFormat[format])
        for name, part, format in zip(names, parts, formats, strict=True)
    }

    class Tensors:
        def has(self, name: str) -> bool:
            return name in stored

        def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
            return QuantizedTensor(stored[name].format, stored[name].data, shape)

    joined = JoinedExperts(Tensors()).view("blk.0.ffn_gate_up_exps.weight", (3, 4, 64))
    assert joined.format is QuantFormat[formats[0]]
    expected = np.concatenate([stored[name].dequantize().reshape(3, 2, 64) for name in names], axis=1)
    np.testing.assert_allclose(joined.dequantize().reshape(3, 4, 64), expected, atol=0.03)


def test_inspect_shows_the_layers_that_differ() -> None:
    lines = architecture_lines(real(SMALL))
    assert "15 layers of 1536, MLP 6144 or 12288 (gelu_tanh)" in lines
    heads = "8 heads of 256, 1 for keys and values or 8 heads of 512, 1 for keys and values"
    assert f"{heads}; 10 layers read the keys and values of others, sliding window 512" in lines
    assert "an input of 256 for each token and layer" in lines
    assert "4 parallel residual streams" in architecture_lines(real("gemma3n"))


# -- refused ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", GEMMA_ROWS)
def test_tensor_parallelism_is_refused(name: str) -> None:
    check_size(real(name), 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1"):
        check_size(real(name), 2)


def test_tensor_parallelism_of_layers_with_other_kv_heads_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1"):
        check_size(with_layers(replace(real("gemma4"), head_dim=512), head_dim=(None,) * 12), 2)


@pytest.mark.parametrize("name", GEMMA_ROWS)
def test_training_is_refused(name: str) -> None:
    pytest.importorskip("torch")
    from bifolio.api.language_model import LanguageModel

    with pytest.raises(ConfigError, match=r"use bifolio\.LLM"):
        LanguageModel(real(name))


@pytest.mark.full
def test_draft_heads_cannot_read_parallel_streams() -> None:
    weights = load_folder(row_folder("gemma3n")[1]).weights
    with pytest.raises(UnsupportedModelError, match="draft with n-grams"):
        weights.tapped((1, 2, 3))
    assert load_folder(row_folder("gemma4")[1]).weights.tapped((1, 2, 3)).taps == (1, 2, 3)


def test_what_the_network_cannot_run_is_refused() -> None:
    raw = ROWS["gemma4 with experts"].real
    with pytest.raises(UnsupportedModelError, match="attend to later ones"):
        config_from_hf({**raw, "use_bidirectional_attention": "all"})
    with pytest.raises(UnsupportedModelError, match="6 of 6 layers find no layer"):
        config_from_hf({**raw, "num_kv_shared_layers": 6})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kv_source": (1, *(None,) * 11)}, "layer 0 cannot read the keys and values of layer 1"),
        ({"kv_source": (*(None,) * 11, 0)}, "layer 11 cannot read the keys and values of layer 0"),
        ({"kv_heads": (3,) * 12}, "32 query heads cannot share"),
        ({"mlp_size": (0,) * 12}, "intermediate_size must be between 1 and"),
        ({"attention": (False,) * 12}, "without any attention or recurrent layer"),
        ({"recurrent": (True,) * 12}, "no recurrent layer, or the reverse"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        with_layers(real("gemma4"), **changes)


def with_layers(config: ModelConfig, **values: tuple[Any, ...]) -> ModelConfig:
    """The network with other values of fields of its layers."""
    changed = [{name: own[layer] for name, own in values.items()} for layer in range(config.num_layers)]
    return replace(
        config, layers=tuple(replace(layer, **new) for layer, new in zip(config.layers, changed, strict=True))
    )
