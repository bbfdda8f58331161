"""Training of EAGLE-3 heads: the loss falls, drafts are accepted more often, and the folder is the published one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, SamplingParams, SpeculativeConfig
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.errors import ConfigError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.huggingface.safetensors_file import open_safetensors
from bifolio.model.transformer import forward
from bifolio.model.weights import prepare
from helpers import TINY, fresh_folder, tiny_folder
from hybrid_models import tiny_hybrid

torch = pytest.importorskip("torch")
from bifolio.train.eagle import EagleSettings, draft_vocabulary, train_eagle  # noqa: E402
from bifolio.train.eagle_head import EagleHead, head_config, taps_of  # noqa: E402
from bifolio.train.head_data import States, collect_states  # noqa: E402
from bifolio.train.head_run import HeadResult  # noqa: E402
from bifolio.train.progress import SilentProgress  # noqa: E402
from draft_heads import SHORT_RUN, accepted, eagle_folder, sure_target, torch_eagle  # noqa: E402

pytestmark = pytest.mark.full


@cache
def trained() -> HeadResult:
    settings = EagleSettings(str(sure_target()), str(fresh_folder("head")), **SHORT_RUN)
    return train_eagle(settings, SilentProgress())


def acceptance(folder: Path) -> float:
    return accepted(sure_target(), SpeculativeConfig("eagle", draft_model=str(folder), adaptive=False, length=2))


def test_the_loss_falls_and_more_drafts_are_accepted() -> None:
    result = trained()
    assert np.mean(result.losses[-5:]) < 0.7 * np.mean(result.losses[:5])
    assert acceptance(result.folder) == acceptance(result.folder) > 0.5  # the head reads layer 1 twice
    assert acceptance(eagle_folder(taps=(1, 1, 2))) < 0.15


def test_the_folder_has_the_published_tensors() -> None:
    from safetensors.numpy import load_file

    folder = trained().folder
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["num_hidden_layers"] == 1
    tensors = load_file(folder / "model.safetensors")
    count = config["draft_vocab_size"]
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == np.bool_
    assert tensors["t2d"].sum() == count == len(tensors["d2t"])
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), np.arange(count) + tensors["d2t"])
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["fc.weight"].shape == (32, 96)


def test_chains_in_training_are_drafts() -> None:
    """Entry k of the chain behind j equals a pass over the states up to j and k own hidden states."""
    config = head_config(LLM(sure_target(), device="cpu", num_blocks=40, max_model_len=32).model.config)
    head = EagleHead(config, np.arange(20))
    rng = np.random.default_rng(1)
    states, embeddings = (rng.standard_normal((1, 7, width)).astype(np.float32) for width in (96, 32))
    with torch.no_grad():
        found = head(torch.from_numpy(states), torch.from_numpy(embeddings), 3)
    weights = {f"{name}.weight": value.detach().numpy() for name, value in zip(head.names, head.values, strict=True)}
    fields = {**TINY, "num_key_value_heads": config.num_kv_heads}
    for j in range(4):
        chain: list[np.ndarray] = []
        for k in range(3):
            own = np.array(chain) if chain else None
            logits, hidden = torch_eagle(fields, weights, embeddings[0, : j + k + 1], states[0, : j + 1], own)
            np.testing.assert_allclose(found[k][0, j].numpy(), logits[-1], atol=1e-5)
            chain.append(hidden[-1])


def test_large_states_are_in_the_written_weights() -> None:
    """Training divides states by their size; the written head reads them as they are and gives the same logits."""
    config = head_config(LLM(sure_target(), device="cpu", num_blocks=40, max_model_len=32).model.config)
    sizes = np.array([40, 3000, 9000], np.float32)
    head = EagleHead(config, np.arange(20), sizes)
    rng = np.random.default_rng(1)
    states, embeddings = (rng.standard_normal((1, 7, width)).astype(np.float32) for width in (96, 32))
    states = states * np.repeat(sizes, 32)
    with torch.no_grad():
        found = head(torch.from_numpy(states), torch.from_numpy(embeddings), 2)
    weights = {name: value.astype(np.float32) for name, value in head.tensors().items()}
    fields = {**TINY, "num_key_value_heads": config.num_kv_heads}
    first, hidden = torch_eagle(fields, weights, embeddings[0, :3], states[0, :3])
    second, _ = torch_eagle(fields, weights, embeddings[0, :4], states[0, :3], hidden[-1:])
    for k, logits in enumerate((first, second)):  # the weights are rounded to 16 bits
        np.testing.assert_allclose(found[k][0, 2].numpy(), logits[-1], atol=0.02 * np.abs(logits[-1]).max())


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba"])
def test_states_of_a_hybrid_target(kind: str) -> None:
    """The last ones give the logits of a whole pass of the reference."""
    model, tokens = tiny_hybrid(kind), np.random.default_rng(0).integers(3, 50, (2, 24)).astype(np.int32)
    states, d = collect_states(model, tokens, (), 1), model.config.hidden_size
    kernels = ReferenceKernels()
    weights = prepare(model.weights, kernels)
    for number, ids in enumerate(tokens):
        batch = HostBatch.from_runs([], [Run(0, 0, ids.tolist())], None).to(kernels)
        last = states.rows(np.array([number])).numpy()[0, :, -d:]
        found = kernels.logits(kernels.norm(last, weights.final_norm), weights.head, 0.0)
        expected = forward(weights, batch, kernels, None)
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())  # states have 16 bits


def test_states_beyond_the_range_of_16_bits() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 8)).astype(np.float32)
    values[..., :2, :] *= 1e6
    largest = np.abs(values).max(axis=-1, keepdims=True)
    states = States((values / largest).astype(np.float16), largest)
    np.testing.assert_allclose(states.rows(np.array([1])).numpy()[0], values[1].reshape(3, 32), rtol=2e-3, atol=1e-3)
    assert (states.sizes()[:2] > 1e5).all()
    assert (states.sizes()[2:] < 10).all()


def test_vocabulary_and_layers() -> None:
    texts = np.array([[5, 5, 5, 9, 9, 2]])
    assert draft_vocabulary(texts, 12, 2).tolist() == [5, 9]
    assert len(draft_vocabulary(texts, 100, None)) == 64
    assert taps_of(30) == (2, 15, 27)
    assert taps_of(2) == (1, 1, 2)


def test_a_folder_with_a_model_is_kept() -> None:
    with pytest.raises(ConfigError, match="--force"):
        train_eagle(EagleSettings(str(sure_target()), str(trained().folder)), SilentProgress())
    with pytest.raises(ConfigError, match="at least 1"):
        EagleSettings("stories", steps=0)


def test_text_files(tmp_path: Path) -> None:
    folder = tiny_folder(tokenizer=True)
    (tmp_path / "text.txt").write_text("Once upon a time a little fox lived in a quiet wood. " * 20)
    settings = EagleSettings(
        str(folder), str(tmp_path / "head"), (str(tmp_path / "text.txt"),), steps=2, batch_size=2, context=16
    )
    result = train_eagle(settings, SilentProgress())
    assert len(result.losses) == 2
    assert "fc.weight" in open_safetensors(result.folder / "model.safetensors").tensors


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_prompts_have_the_plain_text(data_dir: Path, tmp_path: Path) -> None:
    """A head for the embedded model, trained briefly, on prompts of SpecBench, greedy and sampled."""
    lines = (data_dir / "prompts" / "spec_bench.jsonl").read_text("utf-8").splitlines()
    result = train_eagle(EagleSettings("stories", str(tmp_path / "head"), steps=12, sequences=48), SilentProgress())
    config = SpeculativeConfig("eagle", draft_model=str(result.folder), length=3, adaptive=False)
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=32, ignore_eos=True) for i in range(200)]
    found = []
    for speculative in (None, config):
        llm = LLM("stories", device="cpu", max_model_len=160, speculative=speculative)
        tokenizer = llm.model.require_tokenizer()
        prompts = [tokenizer.encode(json.loads(line)["turns"][0])[:100] for line in lines[:: len(lines) // 200][:200]]
        found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert len(found[0]) == 200
    assert found[0] == found[1]
    assert llm.engine.speculator is not None
    assert llm.engine.speculator.stats.num_accepted_tokens > 100
