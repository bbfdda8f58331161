"""The models inside the package: what they are, what they can do, and that others read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.config import SpeculativeConfig
from bifolio.measure.perplexity import text_perplexity
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loader import load_model
from bifolio.model.registry import DEFAULT_MODEL, embedded_dir
from bifolio.quant.formats import QuantFormat

NAMES = ("stories", "stories-draft", "shakespeare")
# Written by stories15M with seeds of its own after `stories` was trained, in the form of the training text.
FRESH_STORIES = (Path(__file__).parent / "fresh_stories.txt").read_text(encoding="utf-8")
BEGINNINGS = ("Once upon a time, there was a", "One day, a little dog", "The old bear was sad because")
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@cache
def llm(name: str = DEFAULT_MODEL) -> LLM:
    return LLM(name, max_num_seqs=4, threads=1)  # models this small gain nothing from more


def card(name: str) -> str:
    return (embedded_dir() / f"{name}.md").read_text(encoding="utf-8")


def card_number(name: str, pattern: str) -> float:
    found = re.search(pattern, card(name))
    assert found is not None, pattern
    return float(found[1])


# -- what they are -----------------------------------------------------------------------------------------------------


def test_they_are_small() -> None:
    sizes = {name: (embedded_dir() / f"{name}.gguf").stat().st_size for name in NAMES}
    assert sum(sizes.values()) <= 40e6
    assert sizes["shakespeare"] <= 2e6
    stories, draft = load_model("stories"), load_model("stories-draft")
    assert 8e6 <= stories.config.num_parameters <= 15e6
    assert stories.config.max_position >= 512
    assert stories.weights.layers[0].down.parts[0].format is QuantFormat.Q8_0
    assert draft.config.num_parameters <= 1.5e6
    assert load_model("shakespeare").config.vocab_size == 65


@pytest.mark.parametrize("name", NAMES)
def test_the_card_states_what_the_file_is(name: str) -> None:
    text, model = card(name), load_model(name)
    assert f"{model.config.num_parameters:,}" in text
    assert f"{(embedded_dir() / f'{name}.gguf').stat().st_size / 1e6:.1f} MB" in text
    assert f"| {model.config.max_position} " in text
    assert f"temperature {model.generation_config['temperature']}" in text
    for word in ("Apache-2.0", "seed 0", "bifolio train", "## Data", "loss", "H200"):
        assert word in text, word


def test_the_draft_reads_the_same_tokens() -> None:
    stories, draft = (load_model(name).require_tokenizer() for name in ("stories", "stories-draft"))
    assert stories.encode(FRESH_STORIES) == draft.encode(FRESH_STORIES)
    assert stories.decode(stories.encode(FRESH_STORIES, add_special_tokens=False)) != ""


def test_the_characters_of_shakespeare_survive_the_file() -> None:
    tokenizer = load_model("shakespeare").require_tokenizer()
    text = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east & '3' $;-"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# -- what they can do --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_story_ends_and_is_the_same_for_the_same_seed() -> None:
    params = llm().default_params(seed=7, max_tokens=480)
    assert (params.temperature, params.top_p) == (0.7, 0.95)
    first, again, other = llm().generate(
        ["Once upon a time"] * 3, [params, params, llm().default_params(seed=8, max_tokens=480)]
    )
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids
    assert first.outputs[0].finish_reason == "stop"
    text = first.outputs[0].text
    assert "<|endoftext|>" not in text
    assert len(text) > 200
    assert re.fullmatch(r"[ -~\n]+", text)
    assert re.search(r'[.!?]["\']?\s*$', text)


@pytest.mark.full
def test_stories_beats_the_ngrams_on_new_text() -> None:
    loss = np.log(text_perplexity(llm(), FRESH_STORIES).value)
    best_ngram = card_number("stories", r"4-gram \| ([\d.]+)")
    assert 0.5 < loss < best_ngram - 0.5
    assert loss == pytest.approx(card_number("stories", r"\*\*stories\*\* \| \*\*([\d.]+)"), abs=0.15)
    draft_loss = np.log(text_perplexity(llm("stories-draft"), FRESH_STORIES).value)
    assert loss < draft_loss < best_ngram
    assert draft_loss == pytest.approx(card_number("stories-draft", r"loss \| ([\d.]+)"), abs=0.15)


@pytest.mark.full
def test_the_draft_agrees_with_stories() -> None:
    """Its most likely token at every position of texts that `stories` wrote greedily."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    written = llm().generate(list(BEGINNINGS), params)
    rows = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in written]
    scored = llm("stories-draft").generate(rows, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1))
    agreed = [
        entry.rank == 1
        for output, scores in zip(written, scored, strict=True)
        for entry in (scores.prompt_logprobs or [])[len(output.prompt_token_ids) :]
        if entry is not None
    ]
    assert len(agreed) > 150
    assert np.mean(agreed) >= 0.55


@pytest.mark.full
@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_speculation_changes_nothing_but_is_accepted(method: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    plain = llm().generate(list(BEGINNINGS), params)
    guessing = LLM(speculative=SpeculativeConfig(method, adaptive=False), max_num_seqs=4, threads=1)
    outputs = guessing.generate(list(BEGINNINGS), params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert guessing.engine.speculator is not None
    if method == "draft":
        assert guessing.engine.speculator.stats.acceptance_rate >= 0.55


# -- what others make of them ------------------------------------------------------------------------------------------


@pytest.fixture
def torch_on_one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other with models this small
    yield
    torch.set_num_threads(before)


@pytest.mark.full
@pytest.mark.usefixtures("torch_on_one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """GGUF to folder: what is in Q8_0 becomes F32, the network stays the same."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from bifolio.api.language_model import LanguageModel

    model = load_model(name)
    write_folder(tmp_path / name, model, QuantFormat.F32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
    text = "First Citizen: we are many." if name == "shakespeare" else BEGINNINGS[0]
    ids = model.require_tokenizer().encode(text)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / name)(text)["input_ids"] == ids
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        ours = LanguageModel.from_pretrained(tmp_path / name).eval().prefill(torch.tensor([ids]))[0][0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    continued = theirs.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    greedy = LLM(tmp_path / name, max_num_seqs=1, threads=1).generate(
        [ids], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )
    assert continued[0, len(ids) :].tolist() == list(greedy[0].outputs[0].token_ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", [QuantFormat.F32, QuantFormat.F16])
def test_llama_cpp_continues_in_the_same_way(name: str, format: QuantFormat, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is an extra of its own (peers)")
    path = tmp_path / f"{name}.gguf"
    write_gguf(path, load_model(name), format)
    theirs = llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, verbose=False)
    ours = LLM(path, max_num_seqs=1, max_model_len=128, threads=1)
    # Prompts without near ties among these tokens: the other side computes GELU and keeps K and V in half precision.
    for text in (BEGINNINGS[0], "The king and his men"):
        ids = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert ids == ours.model.require_tokenizer().encode(text)
        generator = theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
        expected = [token for token, _ in zip(generator, range(32), strict=False)]
        assert list(ours.generate([ids], GREEDY)[0].outputs[0].token_ids) == expected
