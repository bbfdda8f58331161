"""`LanguageModel` of hybrid families: both phases and gradients equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_rows import row_folder

from bifolio import LLM
from bifolio.api.language_model import LanguageModel
from bifolio.errors import ConfigError
from bifolio.pooling_params import PoolingParams
from bifolio.train import TrainSettings, train
from helpers import cpu_kernel_names, make_kernels

FAMILIES = (  # those without experts
    "lfm2", "lfm3", "qwen35", "granitehybrid", "bamba", "falcon_h1", "nemotron_h", "recurrent_gemma",
)  # fmt: skip
WITH_EXPERTS = ("lfm2moe", "qwen3next", "qwen35moe")
pytestmark = pytest.mark.full  # transformers


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any) -> tuple[Any, LanguageModel]:
    theirs, folder = row_folder(request.param)
    return theirs, LanguageModel.from_pretrained(folder)


def tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_prefill_equals_transformers(pair: tuple[Any, LanguageModel]) -> None:
    theirs, ours = pair
    idx = tokens(3, 21, 5)
    with torch.no_grad():
        logits, loss = ours.prefill(idx, idx)
        expected = theirs(idx).logits
    assert torch.allclose(logits, expected, atol=1e-4, rtol=0)
    assert loss is not None
    assert abs(float(loss - torch.nn.functional.cross_entropy(expected.flatten(0, 1), idx.flatten()))) < 1e-4


def test_greedy_tokens_equal_transformers(pair: tuple[Any, LanguageModel]) -> None:
    theirs, ours = pair
    idx = tokens(2, 9, 6)
    expected = theirs.generate(
        idx, attention_mask=torch.ones_like(idx), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert torch.equal(ours.decode(idx, 24, temperature=0.0), expected)
    assert torch.equal(ours.generate(idx, 24, temperature=0.0), expected)


def test_decode_equals_recomputing_when_the_window_slides(pair: tuple[Any, LanguageModel]) -> None:
    _, ours = pair
    idx = tokens(2, 126, 7)  # the context has 128 tokens
    assert torch.equal(ours.decode(idx, 5, seed=3), ours.decode_by_recomputing(idx, 5, seed=3))


def test_gradients_equal_transformers(pair: tuple[Any, LanguageModel]) -> None:
    theirs, ours = pair
    idx = tokens(2, 12, 8)
    ours.zero_grad()
    theirs.zero_grad()
    _, loss = ours(idx[:, :-1], idx[:, 1:])
    loss.backward()
    logits = theirs(idx[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten()).backward()
    gradients = {bare(name): parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == {bare(name) for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, gradients[bare(name)], atol=2e-5, rtol=1e-3), name


def bare(name: str) -> str:
    short = name.removeprefix("model.").removeprefix("backbone.")
    return short.replace(".g_proj.", ".gate_proj.")  # LFM3: folders have another name than the class


def test_a_saved_folder_is_read_by_transformers(pair: tuple[Any, LanguageModel], tmp_path: Path) -> None:
    import transformers

    theirs, ours = pair
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    idx = tokens(1, 15, 9)
    with torch.no_grad():
        assert torch.allclose(again(idx).logits, theirs(idx).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_learn(family: str) -> None:
    """A few steps on one batch lower the loss by far."""
    model = LanguageModel(LanguageModel.from_pretrained(row_folder(family)[1]).config, seed=1)
    idx = tokens(2, 9, 4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        _, loss = model.prefill(idx[:, :-1], idx[:, 1:])
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - 4.57) < 0.3  # ln 97
    assert losses[-1] < losses[0] - 1


def test_training_a_hybrid(tmp_path: Path) -> None:
    """`bifolio train --architecture lfm2`: the folder is read by transformers and predicts the text."""
    import transformers

    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    settings = TrainSettings(
        data=(str(tmp_path / "text.txt"),), output=str(tmp_path / "out"), tokenizer="char", preset="char",
        architecture="lfm2", hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=64,
        context=16, steps=30, batch_size=8, warmup=2, learning_rate=1e-2, device="cpu", sample_every=0,
    )  # fmt: skip
    result = train(settings)
    assert result.history.held_out[-1][1] < 1.0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    idx = torch.tensor([result.tokenizer.encode("the cat sat")])
    with torch.no_grad():
        assert torch.allclose(theirs(idx).logits, result.model.prefill(idx)[0], atol=1e-4, rtol=0)


def test_factors_of_weights_are_saved_with_the_description_they_came_from(tmp_path: Path) -> None:
    model = LanguageModel(LanguageModel.from_pretrained(row_folder("falcon_h1")[1]).config, seed=1)
    with pytest.raises(ConfigError, match="from_pretrained"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_mean_states(family: str) -> None:
    """The mean of transformers' normed states, of length 1; in chunks, with states carried between them."""
    theirs, folder = row_folder(family)
    idx = tokens(1, 21, 3)
    engine = LLM(folder, kernels=make_kernels(cpu_kernel_names()[0]), num_blocks=20, block_size=4, chunk_size=8,
                 max_model_len=64, max_num_seqs=2).engine  # fmt: skip
    request = engine.add_request("text", idx[0].tolist(), PoolingParams())
    while engine.has_work:
        engine.step()
    with torch.no_grad():
        mean = theirs.model(idx).last_hidden_state[0].mean(dim=0)
    assert torch.allclose(torch.from_numpy(request.pooling.value), mean / mean.norm(), atol=1e-4, rtol=0)
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"use bifolio\.LLM"):
        LanguageModel.from_pretrained(row_folder(family)[1])
