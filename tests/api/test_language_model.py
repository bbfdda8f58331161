"""`LanguageModel`: both phases against transformers and against the version that teaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bifolio.api.decode_loop import TokenChooser
from bifolio.api.language_model import LanguageModel, fresh_batch
from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, EmptyPromptError, ModelFileError, PromptTooLongError, TokenIdError
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model import transformer
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from moe_models import MOE_ARCHITECTURES
from tiny_models import ARCHITECTURES, tiny_transformers_model

SMALL = ModelConfig("llama", 50, 32, 2, 4, 2, 8, 48, 24, ropes=(RopeConfig(rotary_dim=8),))


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name not in MOE_ARCHITECTURES])
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, LanguageModel, Path]:
    theirs = tiny_transformers_model(request.param)
    folder = tmp_path_factory.mktemp(request.param.replace("-", "_"))
    theirs.save_pretrained(folder)
    return theirs, LanguageModel.from_pretrained(folder), folder


# -- the snippets of the model's specification ---------------------------------------------------------------


def test_prefill_snippet() -> None:
    m = LanguageModel()
    x = torch.randint(0, 65, (2, 8))
    y = torch.randint(0, 65, (2, 8))
    logits, loss = m.prefill(x, y)
    assert logits.shape == (2, 8, 65)
    assert loss is not None
    assert abs(loss.item() - 4.17) < 0.2  # ln 65: an untrained model knows nothing


def test_decode_snippet() -> None:
    m = LanguageModel()
    m.eval()
    ctx = torch.zeros((1, 1), dtype=torch.long)
    gen = m.decode(ctx, max_new_tokens=5)
    assert gen.shape == (1, 6)
    assert int(gen[0, 0]) == 0


def test_backward_compatibility_snippet() -> None:
    m = LanguageModel()
    x = torch.randint(0, 65, (2, 8))
    y = torch.randint(0, 65, (2, 8))
    logits, loss = m(x, y)
    expected_logits, expected_loss = m.prefill(x, y)
    assert torch.equal(logits, expected_logits)
    assert torch.equal(loss, expected_loss)
    ctx = torch.zeros((1, 1), dtype=torch.long)
    assert torch.equal(m.generate(ctx, 3, seed=1), m.decode(ctx, 3, seed=1))


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["deepseek2", "gptoss"])
def test_latents_sinks_and_biased_experts_are_refused(architecture: str, tmp_path: Path) -> None:
    tiny_transformers_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"use bifolio\.LLM"):
        LanguageModel.from_pretrained(tmp_path)


# -- against transformers ------------------------------------------------------------------------------------


@pytest.mark.full
def test_prefill_equals_transformers(pair: tuple[Any, LanguageModel, Path]) -> None:
    theirs, ours, _ = pair
    idx = torch.randint(0, 97, (3, 21), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(idx).logits
        logits, loss = ours.prefill(idx, idx)
    assert torch.allclose(logits, expected, atol=1e-4, rtol=0)
    reference = torch.nn.functional.cross_entropy(expected.reshape(-1, 97), idx.reshape(-1))
    assert loss is not None
    assert abs(float(loss - reference)) < 1e-4


@pytest.mark.full
def test_64_greedy_tokens_equal_transformers(pair: tuple[Any, LanguageModel, Path]) -> None:
    theirs, ours, _ = pair
    idx = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(6))
    tokens = ours.decode(idx, 64, temperature=0.0)
    assert tokens.shape == (2, 9 + 64)
    assert torch.equal(tokens[:, :9], idx)
    with torch.no_grad():
        likeliest = theirs(tokens[:, :-1]).logits.argmax(-1)  # after each beginning
    assert torch.equal(tokens[:, 9:], likeliest[:, 8:])


@pytest.mark.full
def test_state_dict_has_the_names_and_shapes_of_transformers(pair: tuple[Any, LanguageModel, Path]) -> None:
    theirs, ours, _ = pair
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in theirs.state_dict().items()}


@pytest.mark.full
def test_gradients_equal_transformers(pair: tuple[Any, LanguageModel, Path]) -> None:
    theirs, ours, _ = pair
    idx = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(7))
    ours.zero_grad()
    theirs.zero_grad()
    _, loss = ours.prefill(idx[:, :-1], idx[:, 1:])
    assert loss is not None
    loss.backward()
    logits = theirs(idx[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 97), idx[:, 1:].reshape(-1)).backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-5, rtol=1e-3), name


@pytest.mark.full
def test_saved_folder_is_read_by_transformers(pair: tuple[Any, LanguageModel, Path], tmp_path: Path) -> None:
    import transformers

    _, ours, _ = pair
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    idx = torch.randint(0, 97, (1, 15))
    with torch.no_grad():
        assert torch.allclose(ours.prefill(idx)[0], again(idx).logits, atol=1e-4, rtol=0)


@pytest.mark.full
def test_config_export_reads_back_to_the_same_network(pair: tuple[Any, LanguageModel, Path]) -> None:
    _, ours, _ = pair
    config = config_from_hf(config_to_hf(ours.config))
    assert config.num_parameters == ours.config.num_parameters == sum(p.numel() for p in ours.parameters())
    again = LanguageModel(config)
    again.load_state_dict(ours.state_dict())
    idx = torch.randint(0, 97, (1, 15))
    with torch.no_grad():
        assert torch.allclose(ours.prefill(idx)[0], again.prefill(idx)[0], atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3moe", "mixtral", "olmoe", "glm4moe"])
def test_experts_equal_transformers(architecture: str, tmp_path: Path) -> None:
    """Logits, gradients of the embedding, decoded tokens, and a folder that both read."""
    import transformers

    theirs = tiny_transformers_model(architecture)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = LanguageModel.from_pretrained(tmp_path / "theirs")
    idx = torch.randint(3, 97, (2, 15), generator=torch.Generator().manual_seed(5))
    _, loss = ours.prefill(idx[:, :-1], idx[:, 1:])
    assert loss is not None
    loss.backward()
    logits = theirs(idx[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 97), idx[:, 1:].reshape(-1)).backward()
    gradient = ours.get_parameter("model.embed_tokens.weight").grad
    assert gradient is not None
    assert torch.allclose(gradient, theirs.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-3)
    assert all(p.grad is not None for name, p in ours.named_parameters() if "correction_bias" not in name)
    assert torch.equal(ours.decode(idx, 12, temperature=0.0), ours.decode_by_recomputing(idx, 12, temperature=0.0))
    ours.save_pretrained(tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        for model in (theirs, again):
            assert torch.allclose(ours.prefill(idx)[0], model(idx).logits, atol=1e-4, rtol=0)


# -- decode against the teaching version ---------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "temperature": 0.7, "top_k": 5},
                                     {"seed": 5, "top_p": 0.6}])  # fmt: skip
@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17])
def test_decode_equals_recomputing(options: dict[str, Any], prompt_length: int) -> None:
    """Also past the context of 24 tokens, where the window slides."""
    model = LanguageModel(SMALL, seed=1)
    idx = torch.randint(0, 50, (3, prompt_length), generator=torch.Generator().manual_seed(2))
    expected = model.decode_by_recomputing(idx, 14, **options)
    assert expected.shape == (3, prompt_length + 14)
    assert torch.equal(model.decode(idx, 14, **options), expected)


def test_decode_of_prompts_longer_than_the_context() -> None:
    model = LanguageModel(SMALL, seed=1)
    idx = torch.randint(0, 50, (2, 40))
    assert torch.equal(model.decode(idx, 3, temperature=0.0), model.decode_by_recomputing(idx, 3, temperature=0.0))


def test_rows_of_a_batch_do_not_influence_each_other() -> None:
    model = LanguageModel(SMALL, seed=1)
    idx = torch.randint(0, 50, (4, 7))
    together = model.decode(idx, 10, temperature=0.0)
    alone = torch.cat([model.decode(row[None], 10, temperature=0.0) for row in idx])
    assert torch.equal(together, alone)


def test_stop_tokens_end_rows() -> None:
    model = LanguageModel(SMALL, seed=1)
    idx = torch.randint(0, 50, (1, 4))
    free = model.decode(idx, 12, temperature=0.0)
    stop = int(free[0, 8])
    first = int((free[0, 4:] == stop).nonzero()[0]) + 5
    assert torch.equal(model.decode(idx, 12, temperature=0.0, stop_token_ids=[stop]), free[:, :first])


def test_seeds_make_draws_repeatable() -> None:
    model = LanguageModel(SMALL, seed=1)
    idx = torch.zeros((2, 1), dtype=torch.long)
    assert torch.equal(model.decode(idx, 15, seed=1), model.decode(idx, 15, seed=1))
    assert not torch.equal(model.decode(idx, 15, seed=1), model.decode(idx, 15, seed=2))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    choose = TokenChooser(1.0, None, 0.7, 0, torch.device("cpu"))
    counts = torch.bincount(choose(logits), minlength=4) / 4000
    assert counts[2:].sum() == 0
    assert abs(float(counts[0]) - 0.625) < 0.03


# -- the module ----------------------------------------------------------------------------------------------


def test_torch_kernels_equal_reference_kernels() -> None:
    model = LanguageModel(SMALL, seed=2)
    idx = torch.randint(0, 50, (2, 11))
    with torch.no_grad():
        expected = transformer.forward(model.weights(), fresh_batch(idx, model._kernels()), ReferenceKernels(), None)
        assert torch.allclose(model.prefill(idx)[0].flatten(0, 1), expected, atol=1e-5)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = LanguageModel(SMALL, seed=9).state_dict()
    torch.manual_seed(2)
    second = LanguageModel(SMALL, seed=9).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ignored_targets_do_not_count() -> None:
    model = LanguageModel(SMALL, seed=2)
    idx = torch.randint(0, 50, (1, 9))
    targets = idx.clone()
    targets[0, 4:] = -100
    _, loss = model.prefill(idx, targets)
    _, expected = model.prefill(idx[:, :4], idx[:, :4])
    assert loss is not None
    assert expected is not None
    assert torch.allclose(loss, expected, atol=1e-6)


def test_tied_embeddings_are_one_parameter(tmp_path: Path) -> None:
    model = LanguageModel()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters
    model.save_pretrained(tmp_path)
    again = LanguageModel()
    again.load_safetensors(tmp_path / "model.safetensors")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_save_and_decode(dtype: torch.dtype, tmp_path: Path) -> None:
    model = LanguageModel(SMALL, seed=3).to(dtype)
    idx = torch.randint(0, 50, (1, 5))
    assert model.decode(idx, 4, temperature=0.0).shape == (1, 9)
    model.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path).to(dtype)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


# -- bad input -----------------------------------------------------------------------------------------------


def test_bad_input_is_named(tmp_path: Path) -> None:
    model = LanguageModel(SMALL)
    with pytest.raises(TokenIdError, match="50"):
        model.prefill(torch.tensor([[50]]))
    with pytest.raises(TokenIdError, match="-1"):
        model.decode(torch.tensor([[-1]]), 1)
    with pytest.raises(EmptyPromptError):
        model.prefill(torch.zeros((1, 0), dtype=torch.long))
    with pytest.raises(PromptTooLongError, match="24"):
        model.prefill(torch.zeros((1, 25), dtype=torch.long))
    with pytest.raises(ConfigError, match="shape"):
        model.prefill(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ConfigError, match="targets"):
        model.prefill(torch.zeros((1, 4), dtype=torch.long), torch.zeros((1, 3), dtype=torch.long))
    with pytest.raises(ConfigError, match="temperature"):
        model.decode(torch.zeros((1, 1), dtype=torch.long), 1, temperature=-1.0)
    LanguageModel().save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match="missing"):
        model.load_safetensors(tmp_path / "model.safetensors")


# -- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_the_number_of_new_tokens_is_a_count(count: Any) -> None:
    model = LanguageModel(seed=0)
    idx = torch.zeros((1, 3), dtype=torch.long)
    for decode in (model.decode, model.decode_by_recomputing, model.generate):
        with pytest.raises(ConfigError, match="max_new_tokens"):
            decode(idx, count)
    assert torch.equal(model.decode(idx, 0), idx)


def test_tokens_are_whole_numbers() -> None:
    model = LanguageModel(seed=0)
    for wrong in (torch.zeros((1, 3)), torch.zeros((1, 3), dtype=torch.bool)):
        with pytest.raises(TokenIdError, match="whole numbers"):
            model.decode(wrong, 2)
        with pytest.raises(TokenIdError, match="whole numbers"):
            model.prefill(wrong)


def test_targets_are_token_ids() -> None:
    model = LanguageModel(seed=0)
    idx = torch.zeros((1, 3), dtype=torch.long)
    for target in (65, -1, -99):
        with pytest.raises(TokenIdError, match=f"the target {target} is outside the vocabulary of 65"):
            model.prefill(idx, torch.tensor([[1, target, 2]]))
    with pytest.raises(TokenIdError, match="targets are token ids"):
        model.prefill(idx, torch.zeros((1, 3)))
    _, loss = model.prefill(idx, torch.tensor([[1, -100, 64]]))
    assert loss is not None
    assert torch.isfinite(loss)
