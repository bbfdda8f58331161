"""A real model from a GGUF file, against transformers running the same dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_prompt import prompt_logits

from bifolio.model.gguf.loader import load_gguf
from bifolio.model.huggingface.folder_writer import write_folder
from bifolio.model.loaded import LoadedModel
from bifolio.quant import QuantFormat
from bifolio.text.chat_template import render_chat


@pytest.fixture(scope="module")
def smollm(models_dir: Path) -> LoadedModel:
    path = models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return load_gguf(path)


@pytest.fixture(scope="module")
def dequantised(smollm: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers with every weight as float32, from a folder written here."""
    import transformers

    folder = tmp_path_factory.mktemp("smollm") / "folder"
    write_folder(folder, smollm, QuantFormat.F32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def bench_prompts(data_dir: Path, count: int) -> list[str]:
    """The first turns of short prompts, spread over the categories."""
    lines = (data_dir / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines]
    short = [turn for turn in turns if len(turn) < 600]
    return short[:: max(len(short) // count, 1)][:count]


def check_greedy(smollm: LoadedModel, oracle: Any, prompts: list[str], num_tokens: int) -> None:
    """One pass over prompt and continuation shows what each greedy step would have chosen, in far less time."""
    import torch

    tokenizer = smollm.require_tokenizer()
    for text in prompts:
        prompt = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        with torch.no_grad():
            whole = oracle.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        assert len(whole) == len(prompt) + num_tokens
        chosen = prompt_logits(smollm.weights, whole[:-1])[len(prompt) - 1 :].argmax(axis=-1)
        assert chosen.tolist() == whole[len(prompt) :]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_64_greedy_tokens_on_20_prompts(smollm: LoadedModel, dequantised: Any, data_dir: Path) -> None:
    check_greedy(smollm, dequantised, bench_prompts(data_dir, 20), 64)


def test_the_capital_of_france(smollm: LoadedModel) -> None:
    """With exact activations: the margin is 0.08 of a logit, and activations of 8 bits turn it around."""
    tokenizer = smollm.require_tokenizer()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(
        render_chat(smollm.chat_template, messages, special_tokens=smollm.special_tokens), add_special_tokens=False
    )
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>", add_special_tokens=False)
    chosen = prompt_logits(smollm.weights, prompt + answer[:-1])[len(prompt) - 1 :].argmax(axis=-1)
    assert chosen.tolist() == answer  # each greedy step, seen in one pass
