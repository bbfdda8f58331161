"""Heads for multi-token prediction that come with a model: their forward pass, and texts that are the plain run's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.config import CacheConfig
from bifolio.engine.speculative.head_runner import HeadRun, HeadRunner
from bifolio.errors import ConfigError
from bifolio.kernels.interface import AttentionPhase
from bifolio.model.draft_head import prepare_head
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loader import load_model, open_model
from bifolio.model.next_token_head import load_next_token_head
from bifolio.quant.formats import QuantFormat
from helpers import cpu_kernel_names, make_kernels, make_runner, random_prompt, tiny_folder, tiny_model

pytestmark = pytest.mark.full  # transformers
ARCHITECTURES = ("glm4moe", "deepseek3", "glmdsa")
FIELDS: dict[str, dict[str, Any]] = {"glmdsa": {"indexer_types": ("full",) * 3, "index_topk": 64}}  # heads choose none
VOCAB, LAYERS = 97, 2


@cache
def checkpoint(architecture: str, vocab_size: int = VOCAB) -> tuple[Path, Any, dict[str, np.ndarray]]:
    """(Folder of a model with a head, a model of transformers with one layer more, tensors of the head).

    The last layer of transformers' model is the layer of the head.
    """
    sizes = {"num_hidden_layers": LAYERS + 1, "num_key_value_heads": 4, "vocab_size": vocab_size}
    model, whole = tiny_model(architecture, **sizes, **FIELDS.get(architecture, {}))
    stored = open_safetensors(whole / "model.safetensors").tensors
    tensors = {name: np.array(tensor.dequantize()) for name, tensor in stored.items()}
    d, rng = model.config.hidden_size, np.random.default_rng(3)
    own = {
        "enorm": 1 + 0.1 * rng.standard_normal(d),
        "hnorm": 1 + 0.1 * rng.standard_normal(d),
        "eh_proj": 0.2 * rng.standard_normal((d, 2 * d)),
        "shared_head.norm": 1 + 0.1 * rng.standard_normal(d),
        "shared_head.head": 0.2 * rng.standard_normal((vocab_size, d)),
    }
    head = {name: value.astype(np.float32) for name, value in own.items()}
    named = {f"model.layers.{LAYERS}.{name}.weight": value for name, value in head.items()}
    named[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "layer_types", "indexer_types"):
        config.pop(name, None)
    folder = whole.with_name(whole.name + "-head")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {**tensors, **named})
    return folder, model, head


def torch_head(architecture: str, tokens: list[int], given: np.ndarray, own: np.ndarray | None) -> tuple[Any, Any]:
    """(logits, hidden states) of the head on a whole sequence, with the layer of transformers."""
    import torch
    import torch.nn.functional as F

    _, model, head = checkpoint(architecture)
    w = {name: torch.from_numpy(value) for name, value in head.items()}
    d, eps = model.config.hidden_size, model.config.rms_norm_eps
    states = torch.from_numpy(given if own is None else np.concatenate([given, own]))
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        inputs = [F.rms_norm(embedded, (d,), w["enorm"], eps), F.rms_norm(states, (d,), w["hnorm"], eps)]
        x = (torch.cat(inputs, dim=-1) @ w["eh_proj"].T)[None]
        count = x.shape[1]
        positions = torch.arange(count)[None]
        rotation = model.model.rotary_emb(x, positions)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = model.model.layers[LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        hidden = (out[0] if isinstance(out, tuple) else out)[0]
        return (F.rms_norm(hidden, (d,), w["shared_head.norm"], eps) @ w["shared_head.head"].T).numpy(), hidden.numpy()


def target_states(architecture: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(Last states, the same normed) of the first layers of transformers' model."""
    import torch
    import torch.nn.functional as F

    _, model, _ = checkpoint(architecture)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[LAYERS][0]
        norm = model.model.norm
        return states.numpy(), F.rms_norm(states, norm.weight.shape, norm.weight, model.config.rms_norm_eps).numpy()


@pytest.mark.parametrize("kernels", cpu_kernel_names())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_head_is_the_published_one(architecture: str, kernels: str) -> None:
    folder, _, _ = checkpoint(architecture)
    own, target, tokens = make_kernels(kernels), load_model(folder), random_prompt(14, 5, VOCAB)
    assert target.config.num_layers == LAYERS
    loaded = load_next_token_head(open_model(folder), target)
    weights = prepare_head(loaded.weights, own, make_runner(target, kernels=own)[0].weights)
    runner = HeadRunner(weights, CacheConfig(20, 4), own)
    states, normed = target_states(architecture, tokens)
    table, known = np.arange(3, 15, dtype=np.int32), len(tokens) - 1
    for start, end in ((0, 6), (6, known)):
        run = HeadRun(table, 0, start, tokens[start + 1 : end + 1])
        logits, hidden = runner.run([run], own.from_host(states[start:end]), AttentionPhase.PREFILL, own_states=False)
    drawn, chain = list(tokens), []
    for step in range(3):
        wanted, theirs = torch_head(architecture, drawn[1:], normed[:known], np.array(chain) if chain else None)
        np.testing.assert_allclose(own.to_host(logits)[-1], wanted[-1], atol=2e-4)
        np.testing.assert_allclose(own.to_host(hidden)[-1], theirs[-1], atol=2e-4)
        chain.append(theirs[-1])
        drawn.append(int(wanted[-1].argmax()))
        run = HeadRun(table, 0, known + step, drawn[-1:])
        logits, hidden = runner.run([run], hidden, AttentionPhase.DECODE, own_states=True)


def outputs(path: Path, kernels: str, speculative: SpeculativeConfig | None) -> tuple[LLM, list[Any]]:
    llm = LLM(path, kernels=make_kernels(kernels), num_blocks=60, block_size=4, max_model_len=64, max_num_seqs=6,  # type: ignore[arg-type]
              chunk_size=7, token_budget=40, speculative=speculative)  # fmt: skip
    prompts = [random_prompt(1 + 3 * i, i, VOCAB) for i in range(6)]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16, n=1 + i % 2, ignore_eos=True) for i in range(6)
    ]
    return llm, [[o.token_ids for o in output.outputs] for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("kernels", [name for name in cpu_kernel_names() if name != "torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_output_is_the_plain_run_s(architecture: str, kernels: str) -> None:
    folder = checkpoint(architecture)[0]
    llm, found = outputs(folder, kernels, SpeculativeConfig("mtp", length=3, adaptive=False))
    assert found == outputs(folder, kernels, None)[1]
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_draft_tokens > 50


def test_heads_of_gguf_files(tmp_path: Path) -> None:
    """The tensors of the head under the names of GGUF, written by the package `gguf`, give those of the folder."""
    path = gguf_with_head(tmp_path)
    folder = checkpoint("glm4moe")[0]
    ours, theirs = (load_next_token_head(open_model(each), load_model(each)).weights for each in (path, folder))
    assert ours.config.num_layers == 1
    for mine, other in zip(ours.matrices(), theirs.matrices()[1:], strict=True):  # the folder has an embedding, too
        np.testing.assert_array_equal(mine.dequantize(), other.dequantize())  # type: ignore[union-attr]
    speculative = SpeculativeConfig("mtp", length=3, adaptive=False)
    assert outputs(path, "reference", speculative)[1] == outputs(path, "reference", None)[1]


def gguf_with_head(tmp_path: Path) -> Path:
    """The file of a model with one layer more, which becomes the layer of a head."""
    import gguf

    from bifolio.model.gguf.writer import write_gguf

    folder, _, head = checkpoint("glm4moe")
    whole, path = tmp_path / "whole.gguf", tmp_path / "head.gguf"
    write_gguf(whole, load_model(folder.with_name(folder.name.removesuffix("-head"))), QuantFormat.F32)
    file, writer = gguf.GGUFReader(str(whole)), gguf.GGUFWriter(str(path), "glm4moe")
    for field in file.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_list else None)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, values in head.items():
        writer.add_tensor(f"blk.{LAYERS}.nextn.{name.replace('.', '_')}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="llama have no head"):
        LLM(tiny_folder(), device="cpu", speculative=SpeculativeConfig("mtp"), num_blocks=40, max_model_len=32)
    with pytest.raises(ConfigError, match="use files that include it"):
        LLM(
            tiny_model("glm4moe")[1],
            device="cpu",
            speculative=SpeculativeConfig("mtp"),
            num_blocks=40,
            max_model_len=32,
        )
