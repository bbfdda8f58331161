"""Beams and speculation on real models and real prompts; by hand (`-m slow`), with the data at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig, load_model
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.quant.formats import QuantFormat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def questions(data_dir: Path, count: int) -> list[str]:
    """The first turns of prompts spread over all categories."""
    lines = (data_dir / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:: len(lines) // count][:count]]


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_greedy_speculation_on_200_real_prompts(data_dir: Path, method: Any) -> None:
    plain = LLM("stories", max_num_seqs=16)
    config = SpeculativeConfig(method, adaptive=False)
    guessing = LLM(plain.model, max_num_seqs=16, speculative=config)
    tokenizer = plain.model.require_tokenizer()
    prompts = [tokenizer.encode(text)[:300] for text in questions(data_dir, 200)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in guessing.generate(prompts, params)] == expected
    assert guessing.engine.speculator is not None
    assert guessing.engine.speculator.stats.num_accepted_tokens > 500


def test_beams_of_a_real_model_equal_transformers(models_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    source = load_model(models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf")
    write_folder(tmp_path / "model", source, QuantFormat.F32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    llm = LLM(tmp_path / "model", max_num_seqs=8, max_model_len=512)
    for number, text in enumerate(questions(data_dir, 3)):
        tokens = llm.chat_tokens([{"role": "user", "content": text}])[:200]
        width, penalty = (2, 4, 8)[number], (0.0, 1.0, 2.0)[number]
        ids = torch.tensor([tokens])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, max_new_tokens=16,
            do_sample=False, length_penalty=penalty, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
        )  # fmt: skip
        params = BeamSearchParams(width, max_tokens=16, length_penalty=penalty)
        outputs = llm.beam_search([tokens], params)[0].outputs
        expected = out.sequences[:, len(tokens) :].tolist()
        for mine, reference in zip(outputs, expected, strict=True):
            assert reference[: len(mine.token_ids)] == mine.token_ids
        assert [o.score for o in outputs] == pytest.approx(out.sequences_scores.tolist(), rel=1e-4)
