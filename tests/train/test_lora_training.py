"""`bifolio train --lora`: an adapter learns a text, on a folder and on a quantised file, and PEFT reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from family_rows import row_model, save_row

from bifolio import LLM, SamplingParams
from bifolio.cli.main import build_app
from bifolio.model.gguf.mixes import parse_mix
from bifolio.model.gguf.writer import write_gguf
from bifolio.model.loader import load_model
from cli_runner import CliRunner
from helpers import tiny_folder, tiny_model, tiny_tokenizer, transformers_logits

TEXT = "the little fox read the book of the sea\n" * 60


def train(model: Path, output: Path, data: Path, *more: str) -> dict[str, object]:
    sizes = ["--steps", "25", "--batch-size", "4", "--context", "24", "--rank", "4", "--learning-rate", "0.02"]
    places = ["--lora", str(model), "--data", str(data), "--output", str(output)]
    arguments = ["train", *places, *sizes, "--json", *more]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def score(model: Path, adapter: Path | None) -> float:
    """Mean logprob of the text."""
    llm = LLM(model, max_model_len=64, lora_modules={} if adapter is None else {"a": adapter})
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    found = llm.generate(TEXT[:40], params, lora_request=None if adapter is None else "a")[0].prompt_logprobs
    assert found is not None
    return float(np.mean([next(iter(each.values())).logprob for each in found if each is not None]))


@pytest.mark.full
@pytest.mark.parametrize("form", ["folder", "q8_0"])
def test_an_adapter_learns_a_text(form: str, tmp_path: Path) -> None:
    model = tiny_folder(tokenizer=True)
    if form != "folder":
        write_gguf(tmp_path / "base.gguf", load_model(model), parse_mix(form))
        model = tmp_path / "base.gguf"
    (tmp_path / "text.txt").write_text(TEXT)
    record = train(model, tmp_path / "adapter", tmp_path / "text.txt")
    losses = record["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0] - 0.5
    assert score(model, tmp_path / "adapter") > score(model, None) + 0.5


@pytest.mark.full
def test_factors_of_a_folder_are_no_part_of_its_adapter(tmp_path: Path) -> None:
    """The change that was trained is the change that is read, also where the base multiplies its rows (Falcon-H1)."""
    import torch

    from bifolio.model.adapters.adapter import read_adapter
    from bifolio.train.lora import LoraRun, LoraSettings

    save_row("falcon_h1", row_model("falcon_h1"), tmp_path)
    model = load_model(tmp_path)
    assert model.config.weight_factors
    trained = LoraRun(model, LoraSettings(str(tmp_path), data=("none.txt",), rank=3))
    with torch.no_grad():
        for up in trained.ups.values():
            up.normal_()
    trained.write(tmp_path / "adapter")
    found, expected = read_adapter(tmp_path / "adapter", model.config).weights.products, trained.adapter().products
    assert found.keys() == expected.keys()
    for site, parts in expected.items():
        for read, own in zip(found[site], parts, strict=True):
            change = (own.up @ own.down).detach().numpy()  # type: ignore[union-attr]
            np.testing.assert_allclose(np.asarray(read.up) @ np.asarray(read.down), change, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_trained_adapter_is_one_of_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import PeftModel

    original, folder = tiny_model("qwen3", vocab_size=tiny_tokenizer().get_vocab_size())
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    train(folder, tmp_path / "adapter", tmp_path / "text.txt")
    prompt = tiny_tokenizer().encode(TEXT[:30]).ids
    expected = transformers_logits(PeftModel.from_pretrained(original, tmp_path / "adapter"), prompt)
    llm = LLM(folder, max_model_len=64, lora_modules={"a": tmp_path / "adapter"})
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=0), lora_request="a")[
        0
    ].outputs[0]
    scores = expected[-1] - np.log(np.exp(expected[-1] - expected[-1].max()).sum()) - expected[-1].max()
    assert output.token_ids == [int(expected[-1].argmax())]
    assert output.logprobs is not None
    assert output.logprobs[0][output.token_ids[0]].logprob == pytest.approx(float(scores.max()), abs=1e-3)


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    model, text = tiny_folder(tokenizer=True), tmp_path / "text.txt"
    text.write_text(TEXT)
    for arguments, message in (
        (["--lora", str(model)], "--lora trains on text"),
        (["--lora", str(model), "--mtp", str(model)], "pass one of them"),
        (["--rank", "4", str(text)], "--rank is for --lora"),
        (["--lora", str(model), "--data", str(text), "--output", str(model)], "holds a model or an adapter"),
        (["--lora", str(model), "--data", str(text), "--vocab-size", "90"], "--vocab-size is not for --lora"),
    ):
        result = CliRunner().invoke(build_app(), ["train", *arguments])
        assert result.exit_code != 0
        assert message in result.output + str(result.exception)
