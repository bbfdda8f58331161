"""Networks whose indexers choose positions: DeepSeek-V3.2 and GLM-5. Their rows are in `later_rows`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import GgufCase, open_case
from family_rows import row_folder
from later_rows import LATER_ROWS

from bifolio.api.llm import LLM
from bifolio.config import KVDtype, ModelConfig
from bifolio.errors import BifolioError, ConfigError, ModelFileError
from bifolio.kernels.host_choice import largest
from bifolio.kernels.operation_hook import hooked
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.gguf.metadata import model_metadata
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from helpers import (
    cpu_kernel_names,
    likeliest_tokens,
    make_kernels,
    make_runner,
    open_entry,
    random_prompt,
    run_chunks,
)

NAMES = ("deepseek_v32", "glm_moe_dsa")
TOP_K, LENGTH = 6, 23
DETERMINISTIC = [name for name in cpu_kernel_names() if make_kernels(name).deterministic]


@cache
def loaded_row(name: str) -> LoadedModel:
    return load_folder(row_folder(name)[1])


def real(name: str, **changes: Any) -> ModelConfig:
    return config_from_hf({**LATER_ROWS[name][2], **changes})


# -- configurations ---------------------------------------------------------------------------------------------------
def test_keys_of_indexers_are_cached_behind_all_latents() -> None:
    config = real("deepseek_v32")
    assert CacheLayout.of_model(config, 2, 16, "bf16").layer_heads == ((1, 576),) * 61 + ((1, 128),) * 61
    config = real("glm_moe_dsa")
    assert config.indexed_layers == (0, 1, *range(2, 78, 4))
    layout = CacheLayout.of_model(config, 2, 16, "bf16")
    assert layout.bytes_per_token == 2 * (78 * 576 + len(config.indexed_layers) * 128)
    assert layout.shared_values


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({"index_topk_freq": None, "index_skip_topk_offset": None}, (0, 1, 2, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2)),
        ({"index_topk_pattern": "FFSS"}, (0, 1)),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, (0, 3)),
    ],
)
def test_layers_with_an_indexer_are_named_in_several_ways(changes: dict[str, Any], indexed: tuple[int, ...]) -> None:
    config = real("glm_moe_dsa", num_hidden_layers=4, **changes)
    assert config.indexed_layers == indexed
    written = config_to_hf(config)["indexer_types"]
    assert [layer for layer, kind in enumerate(written) if kind == "full"] == list(indexed)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v32", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v32", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v32", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        ("deepseek_v32", {"layer_types": ["indexed_attention"] * 60 + ["full_attention"]}, "layer_types"),
        ("deepseek_v32", {"index_topk": 0}, "indexer"),
        ("deepseek_v32", {"index_head_dim": 32}, "indexer"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types"),
        ("glm_moe_dsa", {"indexer_types": ["none"] * 78}, "indexer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 78}, "no layer before it has an indexer"),
        ("glm_moe_dsa", {"index_topk_pattern": "FX"}, "index_topk_pattern"),
    ],
)
def test_other_networks_are_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        real(name, **changes)


def test_a_layer_cannot_read_a_choice_without_indexers() -> None:
    config = real("deepseek_v32")
    assert config.mla is not None
    plain = replace(config.mla, index_heads=0, index_size=0, index_top_k=0)
    with pytest.raises(ConfigError, match="layer 1 reads chosen positions"):
        replace(config, mla=plain, layers=(config.layers[0], *(replace(config.layers[1], chooses=False),) * 60))


def test_the_largest_scores_are_the_first_of_equal_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.integers(0, 6, 40).astype(np.float32)
        count = int(rng.integers(1, 41))
        expected = np.sort(np.argsort(-scores, kind="stable")[:count])
        np.testing.assert_array_equal(largest(scores, count), expected)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_keys_at_positions_are_those_of_the_whole_context(dtype: KVDtype) -> None:
    rng = np.random.default_rng(0)
    layout = CacheLayout(2, 9, 4, 1, 64, dtype, poison=True, shared_values=True, heads=((1, 64), (1, 32)))
    storage, blocks = KVStorage(layout), np.array([5, 2, 8], np.int32)
    for layer, (_, size) in enumerate(layout.layer_heads):
        index = np.concatenate([block * 4 + np.arange(4) for block in blocks])[:11]
        rows = rng.standard_normal((11, 1, size)).astype(np.float32)
        storage.write(layer, index, rows, rows)
        positions = np.array([[10, 0, 3], [4, 4, 7]])
        found = storage.keys_at(layer, blocks, positions)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, storage.gather(layer, blocks.tolist(), 11)[0][positions])


# -- networks ---------------------------------------------------------------------------------------------------------
def without_indexers(model: LoadedModel) -> LoadedModel:
    """The same network with attention to all positions."""
    config, weights = model.config, model.weights
    assert config.mla is not None
    mla = replace(config.mla, index_heads=0, index_size=0, index_top_k=0)
    layers = tuple(
        replace(
            layer,
            shape=replace(layer.shape, top_k=0),
            latent=None if layer.latent is None else replace(layer.latent, index=None),
        )
        for layer in weights.layers
    )
    own = replace(config, mla=mla, layers=())
    return replace(model, config=own, weights=replace(weights, config=own, layers=layers))


@pytest.mark.full
@pytest.mark.parametrize("kernels", cpu_kernel_names())
@pytest.mark.parametrize("name", NAMES)
def test_few_positions_are_attended_to_as_without_an_indexer(name: str, kernels: str) -> None:
    """To the last bit on a deterministic set; one position more is not."""
    model, prompt, found = loaded_row(name), random_prompt(TOP_K + 2), []
    for each in (model, without_indexers(model)):
        runner, blocks = make_runner(each, kernels=make_kernels(kernels), block_size=4, poison=True)
        found.append(run_chunks(runner, open_entry(runner, blocks), prompt, 3))
    few, all_of_them = (logits[:TOP_K] for logits in found)
    if kernels in DETERMINISTIC:
        assert np.array_equal(few, all_of_them)
    np.testing.assert_allclose(few, all_of_them, atol=1e-5)
    assert np.abs(found[0][TOP_K:] - found[1][TOP_K:]).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kernels", DETERMINISTIC)
def test_the_size_of_chunks_changes_no_bit(kernels: str, dtype: KVDtype) -> None:
    model, prompt = loaded_row("glm_moe_dsa"), random_prompt(LENGTH)
    whole: np.ndarray | None = None
    for block_size, chunk in ((4, LENGTH), (4, 1), (1, 5), (16, 9)):
        runner, blocks = make_runner(
            model, kernels=make_kernels(kernels), block_size=block_size, poison=True, cache_dtype=dtype
        )
        found = run_chunks(runner, open_entry(runner, blocks), prompt, chunk, decode=chunk == 1)
        whole = found if whole is None else whole
        assert np.array_equal(found, whole), (block_size, chunk)


@pytest.mark.full
@pytest.mark.skipif("native" not in cpu_kernel_names(), reason="the native library is not built")
@pytest.mark.parametrize("name", NAMES)
def test_a_native_step_is_one_call(name: str) -> None:
    """With the results of its operations one by one, to the last bit."""
    model, prompt, found = loaded_row(name), random_prompt(LENGTH), []
    for one_by_one in (False, True):
        kernels = make_kernels("native")
        if one_by_one:
            kernels = hooked(kernels, lambda name, work, *arguments: work(*arguments), one_by_one=True)
        runner, blocks = make_runner(model, kernels=kernels, poison=True)
        found.append(run_chunks(runner, open_entry(runner, blocks), prompt, 5))
        assert [program is None for program in runner.programs.values()] == [one_by_one]
    assert np.array_equal(*found)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_and_a_second_request_read_the_cache(name: str) -> None:
    """Prefixes that are longer than the choice, in batches of several lengths."""
    model, folder = row_folder(name)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
    llm = LLM(folder, block_size=4, chunk_size=5, max_num_seqs=3, num_blocks=64, poison_free_blocks=True)
    prompts = [random_prompt(length, seed=length) for length in (LENGTH, 5, 14)]
    for turn in range(3):
        outputs = llm.generate(prompts, params)
        for number, output in enumerate(outputs):
            tokens = output.outputs[0].token_ids
            assert tokens == likeliest_tokens(model, prompts[number], tokens)
            assert turn == 0 or (output.num_cached_tokens or 0) >= 8
            prompts[number] = [*prompts[number], *tokens, *random_prompt(3, seed=turn)]


# -- GGUF files -------------------------------------------------------------------------------------------------------
KINDS = "glm-dsa.attention.indexer.types"


def stored(config: ModelConfig, folder: Path, changes: dict[str, Any]) -> ModelConfig:
    """The configuration by the header of a GGUF file; a change to None leaves an entry out."""
    moe, mla = config.moe, config.mla
    assert moe is not None
    assert mla is not None
    entries = {"general.architecture": "glm-dsa", **model_metadata(config, 7, "name"), **changes}
    shapes = {
        "token_embd.weight": (config.vocab_size, 1), "output.weight": (1, 1), "blk.0.attn_q_a.weight": (1, 1),
        "blk.3.ffn_down_exps.weight": (moe.num_experts, 1, moe.expert_size),
        "blk.3.ffn_up_shexp.weight": (moe.shared_size, 1), "blk.3.exp_probs_b.bias": (1,),
    }  # fmt: skip
    filled = {**shapes, **{f"filler.{i}": (1,) for i in range(9)}}
    case = GgufCase({key: value for key, value in entries.items() if value is not None}, filled)
    return config_from_gguf(open_case(case, folder))


@pytest.mark.parametrize(
    ("changes", "indexed"),
    [
        ({}, (0, 1, 2, 6)),
        ({KINDS: np.array([True, False, False, True, True, True, False])}, (0, 3, 4, 5)),
        ({KINDS: np.array([True] * 7 + [False])}, (0, 1, 2, 3, 4, 5, 6)),  # a head for multi-token prediction, too
        ({KINDS: None}, (0, 1, 2, 3, 4, 5, 6)),
        ({KINDS: None, "glm-dsa.context_length": 1 << 20}, (0, 1, 2, 6)),
    ],
)
def test_gguf_files_name_the_layers_with_an_indexer(
    changes: dict[str, Any], indexed: tuple[int, ...], tmp_path: Path
) -> None:
    config = real("glm_moe_dsa", num_hidden_layers=7)
    found = stored(config, tmp_path, changes)
    assert found.indexed_layers == indexed
    assert changes or found == replace(config, bos_token_id=found.bos_token_id, eos_token_ids=found.eos_token_ids)


def test_a_list_of_too_few_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"attention\.indexer\.types"):
        stored(real("glm_moe_dsa", num_hidden_layers=7), tmp_path, {KINDS: np.array([True] * 3)})
