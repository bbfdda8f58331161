"""DeepSeek-V4: compressed entries, mixed streams, experts by the id of a token. Its row is in `latest_rows`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import GgufCase, open_case
from family_rows import row_folder
from latest_rows import LATEST_ROWS

from bifolio.api.llm import LLM
from bifolio.config import KVDtype, ModelConfig
from bifolio.errors import BifolioError, ConfigError, ModelFileError
from bifolio.kernels.storage import CacheLayout
from bifolio.model.families.deepseek4 import published, spellings
from bifolio.model.gguf.loader import config_from_gguf
from bifolio.model.gguf.metadata import model_metadata
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.model.shards import check_size
from bifolio.quant import QuantFormat
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

NAME, LENGTH = "deepseek_v4", 23
DETERMINISTIC = [name for name in cpu_kernel_names() if make_kernels(name).deterministic]


@cache
def loaded_row() -> LoadedModel:
    return load_folder(row_folder(NAME)[1])


def real(**changes: Any) -> ModelConfig:
    return config_from_hf({**LATEST_ROWS[NAME][2], **changes})


# -- configurations ---------------------------------------------------------------------------------------------------
def test_the_cache_holds_rows_and_entries_behind_the_keys() -> None:
    config = real()
    assert [layer.entry_tokens for layer in config.layers[:5]] == [0, 0, 4, 128, 4]
    assert [layer.chooses_entries for layer in config.layers[:5]] == [False, False, True, False, True]
    assert [layer.rope for layer in config.layers[:3]] == [0, 0, 1]
    assert sum(layer.hashed for layer in config.layers) == 3
    layout = CacheLayout.of_model(config, 2, 16, "bf16")
    assert layout.shared_values
    assert layout.layer_heads[:43] == ((1, 512),) * 43
    assert layout.layer_heads[43:49] == tuple((1, size) for size in (2048, 512, 512, 128, 1024, 512))
    assert layout.num_layers == 43 + 21 * 4 + 20 * 2


def test_layers_are_named_in_several_ways() -> None:
    config = real(num_hidden_layers=4)
    named = config_to_hf(config)
    assert named["layer_types"] == ["sliding_attention"] * 2 + [
        "compressed_sparse_attention", "heavily_compressed_attention"
    ]  # fmt: skip
    assert named["mlp_layer_types"] == ["hash_moe"] * 3 + ["moe"]
    assert config_from_hf(named) == config
    usual = real(num_hidden_layers=4, compress_ratios=None, num_hash_layers=None)
    assert [layer.entry_tokens for layer in usual.layers] == [128, 128, 128, 4]
    rates = real(num_hidden_layers=4, compress_ratios=None, layer_types=named["layer_types"], compress_rate_csa=8)
    assert [layer.entry_tokens for layer in rates.layers] == [0, 0, 8, 128]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"scoring_func": "tanh"}, "scoring_func"),
        ({"compress_ratios": [5] * 43}, "compress_ratios"),
        ({"compress_ratios": [4]}, "compress_ratios"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        ({"index_topk": 0}, "indexer|index_topk"),
        ({"index_head_dim": 32}, "indexer"),
        ({"hc_mult": 1}, "hc_mult"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters|iterations"),
        ({"o_groups": 7}, "groups"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"sliding_window": None}, "window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_other_networks_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        real(**changes)


def test_ranks_of_tensor_parallelism_are_refused() -> None:
    with pytest.raises(ConfigError, match="compressed entries"):
        check_size(real(), 2)


def test_folders_are_read_under_all_spellings() -> None:
    name = "model.layers.3.self_attn.compressor.indexer.kv_norm.weight"
    assert published(name) == "layers.3.attn.indexer.compressor.norm.weight"
    assert published("model.hc_head.hc_fn") == "hc_head_fn"
    assert published("model.layers.0.mlp.gate.e_score_correction_bias") == "layers.0.ffn.gate.bias"
    assert "model.layers.1.attn.norm.weight" in spellings("model.layers.1.self_attn.kv_norm.weight")


# -- networks ---------------------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("kernels", DETERMINISTIC)
def test_the_size_of_chunks_changes_no_bit(kernels: str, dtype: KVDtype) -> None:
    model, prompt = loaded_row(), random_prompt(LENGTH)
    whole: np.ndarray | None = None
    for block_size, chunk in ((4, LENGTH), (4, 1), (1, 5), (16, 9)):
        runner, blocks = make_runner(
            model, kernels=make_kernels(kernels), block_size=block_size, poison=True, cache_dtype=dtype
        )
        found = run_chunks(runner, open_entry(runner, blocks), prompt, chunk, decode=chunk == 1)
        whole = found if whole is None else whole
        assert np.array_equal(found, whole), (block_size, chunk)


@pytest.mark.full
def test_requests_share_prefixes_forks_and_drafts() -> None:
    """Prefix hits, second turns, several completions and drafts, in batches of several lengths."""
    model, folder = row_folder(NAME)
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
    sampled = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=7, ignore_eos=True, detokenize=False)
    (several,) = llm.generate([prompts[0]], sampled)
    assert len({tuple(each.token_ids) for each in several.outputs}) > 1
    (again,) = llm.generate([prompts[0]], sampled)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in several.outputs]
    first = several.outputs[0].token_ids
    (continued,) = llm.generate([[*prompts[0], *first]], params)
    tokens = continued.outputs[0].token_ids
    assert tokens == likeliest_tokens(model, [*prompts[0], *first], tokens)
    llm.close()


@pytest.mark.full
def test_published_names_and_tables_of_other_numbers(tmp_path: Path) -> None:
    """A folder with the names of the published checkpoints is the same model; a table must hold experts."""
    folder = row_folder(NAME)[1]
    tensors = {
        name: np.array(value.dequantize())
        for name, value in open_safetensors(folder / "model.safetensors").tensors.items()
    }
    renamed = {rename(name): value for name, value in tensors.items()}
    assert {"embed.weight", "head.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight"} <= renamed.keys()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write_safetensors(tmp_path / "model.safetensors", renamed)
    one, other = (dict(enumerate(load_model(each).weights.matrices())) for each in (folder, tmp_path))
    assert all(np.array_equal(one[n].dequantize(), other[n].dequantize()) for n in one)
    renamed["layers.0.ffn.gate.tid2eid"][3, 1] = 6
    write_safetensors(tmp_path / "model.safetensors", renamed)
    with pytest.raises(ModelFileError, match="tid2eid"):
        load_model(tmp_path)


def rename(name: str) -> str:
    name = name.replace("model.embed_tokens.", "embed.").replace("model.hc_head.hc_", "hc_head_")
    return name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")


# -- GGUF files -------------------------------------------------------------------------------------------------------
def stored(config: ModelConfig, folder: Path, changes: dict[str, Any]) -> ModelConfig:
    entries = {"general.architecture": "deepseek4", **model_metadata(config, 7, "name"), **changes}
    moe = config.moe
    assert moe is not None
    shapes = {
        "token_embd.weight": (config.vocab_size, 1), "output.weight": (1, 1),
        "blk.0.ffn_down_exps.weight": (moe.num_experts, 1, moe.expert_size),
        "blk.0.ffn_up_shexp.weight": (moe.shared_size, 1),
    }  # fmt: skip
    filled = {**shapes, **{f"filler.{i}": (1,) for i in range(9)}}
    return config_from_gguf(open_case(GgufCase(entries, filled), folder))


def test_gguf_files_describe_the_network(tmp_path: Path) -> None:
    config = real(num_hidden_layers=6)
    found = stored(config, tmp_path, {})
    assert found == replace(config, bos_token_id=found.bos_token_id, eos_token_ids=found.eos_token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepseek4.swiglu_clamp_exp": np.full(6, 7.0, np.float32)}, "swiglu_clamp_exp"),
        ({"deepseek4.attention.compress_ratios": np.zeros(3, np.int32)}, "compress_ratios"),
        ({"deepseek4.expert_gating_func": 9}, "unknown kind 9"),
    ],
)
def test_other_files_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BifolioError, match=message):
        stored(real(num_hidden_layers=6), tmp_path, changes)


@pytest.mark.full
def test_a_file_holds_its_tables_as_integers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", loaded_row(), QuantFormat.F16)
    file = load_model(tmp_path / "m.gguf")
    assert file.weights.layers[0].moe is not None
    np.testing.assert_array_equal(file.weights.layers[0].moe.table, loaded_row().weights.layers[0].moe.table)  # type: ignore[union-attr]
    from bifolio.model.gguf.reader import open_gguf

    assert open_gguf(tmp_path / "m.gguf").entries["blk.0.ffn_gate_tid2eid.weight"].format is QuantFormat.I32
