"""Heads for multi-token prediction of hybrid models: their forward pass, and texts that are the plain run's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_rows import row_model, save_row

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
from helpers import cpu_kernel_names, fresh_folder, make_kernels, make_runner, random_prompt
from hybrid_models import spaced_checkpoints

pytestmark = pytest.mark.full  # transformers
FAMILIES = ("qwen3next", "qwen35", "qwen35moe")
VOCAB, LAYERS = 97, 4
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
FIXED = SpeculativeConfig("mtp", length=3, adaptive=False)


@cache
def checkpoint(family: str, wrapped: bool = False) -> tuple[Path, Any, dict[str, np.ndarray]]:
    """(Folder of a model with a head, a model of transformers with one layer more, tensors of the head).

    The last layer of transformers' model is the layer of the head, under the names of published files. With `wrapped`
    the folder is that of a model for text and images.
    """
    model = row_model(family, num_hidden_layers=LAYERS + 1, layer_types=KINDS)
    whole, folder = fresh_folder(family + "-whole"), fresh_folder(family + "-head")
    save_row(family, model, whole)
    d, rng = model.config.hidden_size, np.random.default_rng(3)
    head = {
        "fc": 0.2 * rng.standard_normal((d, 2 * d)),
        "norm": 0.3 * rng.standard_normal(d),
        "pre_fc_norm_embedding": 0.3 * rng.standard_normal(d),
        "pre_fc_norm_hidden": 0.3 * rng.standard_normal(d),
    }
    named = {f"mtp.{name}.weight": value.astype(np.float32) for name, value in head.items()}
    for name, tensor in open_safetensors(whole / "model.safetensors").tensors.items():
        name = name.replace(f"model.layers.{LAYERS}.", "mtp.layers.0.")
        name = name.replace("model.", "model.language_model.", 1) if wrapped else name
        named[name] = np.array(tensor.dequantize())
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "layer_types": KINDS[:LAYERS], "mtp_num_hidden_layers": 1}
    if wrapped:
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config, "vision_config": {}}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", named)
    return folder, model, {name: value.astype(np.float32) for name, value in head.items()}


def normed(x: Any, weight: Any, eps: float) -> Any:
    """The norm of these families: weights are stored without their offset of 1."""
    import torch.nn.functional as F

    return F.rms_norm(x, weight.shape, 1 + weight, eps)


def torch_head(family: str, tokens: list[int], given: np.ndarray, own: list[np.ndarray]) -> tuple[Any, Any]:
    """(logits, normed hidden states) of the head on a whole sequence, with the layer of transformers.

    `given` are the normed states of the target, `own` those of the head, which continue them.
    """
    import torch

    _, model, head = checkpoint(family)
    w = {name: torch.from_numpy(value) for name, value in head.items()}
    eps = model.config.rms_norm_eps
    states = torch.from_numpy(np.concatenate([given, *(state[None] for state in own)]))
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        inputs = [normed(embedded, w["pre_fc_norm_embedding"], eps), normed(states, w["pre_fc_norm_hidden"], eps)]
        x = (torch.cat(inputs, dim=-1) @ w["fc"].T)[None]
        count = x.shape[1]
        positions = torch.arange(count)[None]
        rotation = model.model.rotary_emb(x, positions)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = model.model.layers[LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        hidden = normed((out[0] if isinstance(out, tuple) else out).reshape(count, -1), w["norm"], eps)
        return model.lm_head(hidden).numpy(), hidden.numpy()


def target_states(family: str, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(Last states, the same normed) of the first layers of transformers' model."""
    import torch

    _, model, _ = checkpoint(family)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[LAYERS][0]
        return states.numpy(), normed(states, model.model.norm.weight, model.config.rms_norm_eps).numpy()


@pytest.mark.parametrize("kernels", cpu_kernel_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_the_published_one(family: str, kernels: str) -> None:
    folder, _, _ = checkpoint(family)
    own, target, tokens = make_kernels(kernels), load_model(folder), random_prompt(14, 5, VOCAB)
    assert target.config.num_layers == LAYERS
    loaded = load_next_token_head(open_model(folder), target)
    weights = prepare_head(loaded.weights, own, make_runner(target, kernels=own)[0].weights)
    runner = HeadRunner(weights, CacheConfig(20, 4), own)
    states, given = target_states(family, tokens)
    table, known = np.arange(3, 15, dtype=np.int32), len(tokens) - 1
    for start, end in ((0, 6), (6, known)):
        run = HeadRun(table, 0, start, tokens[start + 1 : end + 1])
        logits, hidden = runner.run([run], own.from_host(states[start:end]), AttentionPhase.PREFILL, own_states=False)
    drawn, chain = list(tokens), list[np.ndarray]()
    for step in range(3):
        wanted, theirs = torch_head(family, drawn[1:], given[:known], chain)
        np.testing.assert_allclose(own.to_host(logits)[-1], wanted[-1], atol=2e-4)
        chain.append(theirs[-1])
        drawn.append(int(wanted[-1].argmax()))
        run = HeadRun(table, 0, known + step, drawn[-1:])
        logits, hidden = runner.run([run], hidden, AttentionPhase.DECODE, own_states=True)


# -- engines ----------------------------------------------------------------------------------------------------------
def new_llm(path: Path, kernels: str, speculative: SpeculativeConfig | None, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 6, "chunk_size": 7,
                             "token_budget": 40}  # fmt: skip
    with spaced_checkpoints(8):
        return LLM(path, kernels=make_kernels(kernels), speculative=speculative, **{**sizes, **options})  # type: ignore[arg-type]


def answers(llm: LLM) -> list[Any]:
    """Two rounds of prompts, the second of which continue those of the first: greedy, sampled, several completions."""
    found = []
    prompts = [random_prompt(1 + 3 * i, i, VOCAB) for i in range(6)]
    few = (5, 9, 23)  # so few tokens that some drafts are right
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16, n=1 + i % 2, ignore_eos=True,
                       allowed_token_ids=few if i > 2 else None)
        for i in range(6)
    ]  # fmt: skip
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        found.append([[o.token_ids for o in output.outputs] for output in outputs])
        prompts = [[*prompt, *output.outputs[0].token_ids, 7] for prompt, output in zip(prompts, outputs, strict=True)]
    return found


@cache
def plain_answers(folder: Path, kernels: str) -> list[Any]:
    return answers(new_llm(folder, kernels, None, num_blocks=400, enable_prefix_caching=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", [name for name in cpu_kernel_names() if name != "torch"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_blocks", [30, 200])  # with preemptions, and without
def test_the_output_is_the_plain_run_s(family: str, kernels: str, num_blocks: int) -> None:
    folder = checkpoint(family)[0]
    llm = new_llm(folder, kernels, FIXED, num_blocks=num_blocks, poison_free_blocks=True)
    found = answers(llm)
    assert found == plain_answers(folder, kernels)
    assert llm.engine.speculator is not None
    stats = llm.engine.speculator.stats
    assert stats.num_draft_tokens > 100
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens - 20  # states were restored behind rejected drafts
    metrics = llm.engine.stats()
    assert (metrics.num_preemptions > 0) == (num_blocks == 30)
    assert metrics.num_cached_tokens > 0 or num_blocks == 30


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_gguf_files(family: str, tmp_path: Path) -> None:
    """The tensors of the head under the names of GGUF, written by the package `gguf`, give those of the folder."""
    path, folder = gguf_with_head(family, tmp_path), checkpoint(family)[0]
    ours, theirs = (load_next_token_head(open_model(each), load_model(each)).weights for each in (path, folder))
    for mine, other in zip(ours.matrices(), theirs.matrices(), strict=True):
        np.testing.assert_array_equal(mine.dequantize(), other.dequantize())  # type: ignore[union-attr]
    for norm in ("token_norm", "hidden_norm", "final_norm"):
        np.testing.assert_allclose(getattr(ours, norm).weight, getattr(theirs, norm).weight, atol=1e-6)
    kernels = cpu_kernel_names()[0]
    assert answers(new_llm(path, kernels, FIXED)) == answers(new_llm(path, kernels, None))


def gguf_with_head(family: str, tmp_path: Path) -> Path:
    """The file of a model with one layer more, which becomes the layer of a head."""
    import gguf

    from bifolio.model.gguf.writer import write_gguf

    _, model, head = checkpoint(family)
    whole, path = tmp_path / "whole.gguf", tmp_path / "head.gguf"
    save_row(family, model, tmp_path / "whole")
    write_gguf(whole, load_model(tmp_path / "whole"), QuantFormat.F32)
    file, writer = gguf.GGUFReader(str(whole)), gguf.GGUFWriter(str(path), family)
    for field in file.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_list else None)
    writer.add_uint32(f"{family}.nextn_predict_layers", 1)
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
             "norm": "shared_head_norm"}  # fmt: skip
    for name, values in head.items():  # norms of GGUF files include the offset of 1
        writer.add_tensor(f"blk.{LAYERS}.nextn.{names[name]}.weight", values + (values.ndim == 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_head_of_a_model_for_images_is_found() -> None:
    plain, wrapped = checkpoint("qwen35")[0], checkpoint("qwen35", wrapped=True)[0]
    ours, theirs = (load_next_token_head(open_model(each), load_model(each)).weights for each in (wrapped, plain))
    for mine, other in zip(ours.matrices(), theirs.matrices(), strict=True):
        np.testing.assert_array_equal(mine.dequantize(), other.dequantize())  # type: ignore[union-attr]


def test_files_without_a_head_are_refused(tmp_path: Path) -> None:
    save_row("qwen35", row_model("qwen35"), tmp_path / "plain")
    with pytest.raises(ConfigError, match="use files that include it"):
        new_llm(tmp_path / "plain", "reference", FIXED)
