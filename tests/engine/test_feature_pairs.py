"""Every two features together: the output is the plain run's.

Some features choose the output (n, beams, penalties, ...), others must not touch it (speculation, prefix hits, chunks,
preemption). For each pair, a request with the choosing ones runs alone on a roomy plain engine, then with both features
on and in company; tokens, texts and ends must be equal, and the features must really have happened.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, BeamSearchParams, SamplingParams, SpeculativeConfig
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.adapters.layout import traced_layers
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loader import load_model
from bifolio.prompts import PromptTokens
from bifolio.sequence import Request
from draft_heads import eagle_folder
from helpers import fresh_folder, tiny_folder, tiny_model, tiny_tokenizer
from vision.vision_models import gemma3_model, picture

PROMPT = "the little fox read the little fox read the"
WINDOW = 6


def shout(output: list[int], logits: Any) -> Any:
    """A logits processor that depends on what was written."""
    logits[len(output) % 7 :: 7] += 1.5
    return logits


CHOOSING: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "beams": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3},
    "stop strings": {},  # filled in by `choosing`: a text that really comes
    "logits processor": {"logits_processors": (shout,)},
    "logit bias": {"logit_bias": {40: 2.0, 41: -5.0, 50: 1.0}},
    "sliding window": {},
    "mixture-of-experts": {},
    "MLA": {},
    "attention sinks": {},
    "hybrid": {},
    "image": {},
    "adapter": {},
}
NETWORKS = {
    "sliding window": "", "mixture-of-experts": "qwen3moe", "MLA": "deepseek2", "attention sinks": "gptoss",
    "hybrid": "lfm2", "image": "gemma3",
}  # fmt: skip
SPECULATION = {"ngram", "draft", "eagle"}
NEUTRAL = ("ngram", "draft", "eagle", "prefix hit", "chunked prefill", "preemption")
FEATURES = (*CHOOSING, *NEUTRAL)
BEAMS_WITHOUT = {"n"}  # what has another name in a beam search: n is num_return_sequences


@cache
def folder(features: frozenset[str]) -> Path:
    """A tiny network that has the features which belong to networks."""
    network = next(iter(features & NETWORKS.keys()), None)
    if network is None or not NETWORKS[network]:
        config = {"model_type": "mistral", "sliding_window": WINDOW} if network else {}
        return tiny_folder(tokenizer=True, seed=3, **config)
    if network == "image":
        return gemma3_model().folder
    tokenizer = tiny_tokenizer()
    _, path = tiny_model(NETWORKS[network], vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@cache
def head(features: frozenset[str]) -> Path:
    """A head with random weights for such a network."""
    config = load_model(folder(features)).config
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "draft_vocab_size": 90}
    return eagle_folder(taps=(0, 1, config.num_layers), **sizes)


def make_llm(features: frozenset[str]) -> LLM:
    speculative = None
    if "ngram" in features:
        speculative = SpeculativeConfig("ngram", adaptive=False)
    if "draft" in features:
        path = str(folder(features & (frozenset(NETWORKS) - {"hybrid"})))  # drafts of a plain model
        speculative = SpeculativeConfig("draft", draft_model=path, adaptive=False)
    if "eagle" in features:
        speculative = SpeculativeConfig("eagle", draft_model=str(head(features & frozenset(NETWORKS))), adaptive=False)
    crowded = "preemption" in features
    return LLM(
        folder(features & frozenset(NETWORKS)), kernels=ReferenceKernels(), poison_free_blocks=True, block_size=4,
        num_blocks=32 if crowded else 400, max_model_len=72, max_num_seqs=16, speculative=speculative,
        chunk_size=3 if "chunked prefill" in features else 64, token_budget=64,
        enable_prefix_caching=True,
    )  # fmt: skip


def choosing(features: frozenset[str]) -> dict[str, Any]:
    few = tuple(range(40, 56))  # so few different tokens that the text repeats itself, and n-grams are found
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "allowed_token_ids": few}
    for feature in sorted(features & CHOOSING.keys()):
        options.update(CHOOSING[feature])
    if "stop strings" in features:
        options["stop"] = (stop_text(features - {"stop strings"} - set(NEUTRAL)),)
    return options


@cache
def stop_text(features: frozenset[str]) -> str:
    """Three characters near the end of what this request writes, found by writing it."""
    request = run_alone(features)
    text = request.sequences[0].text
    assert len(text) > 8, text
    return text[-5:-2]


@cache
def adapter(features: frozenset[str]) -> Path:
    """Changes of matrices that the network has."""
    config, rng = load_model(folder(features)).config, np.random.default_rng(5)
    wanted, tensors = {"q_proj", "o_proj", "q_a_proj", "down_proj", "gate_proj", "in_proj", "w1"}, {}
    for layer in traced_layers(config, "hf"):
        for linear in (
            layer.qkv,
            layer.output,
            layer.up,
            layer.down,
            *(() if layer.latent is None else (layer.latent.query_down,)),
            *(() if layer.recurrent is None else (layer.recurrent.input,)),
        ):
            for part in linear.parts:
                module = part.name.removesuffix(".weight")
                if module.rpartition(".")[2] in wanted:
                    shapes = {"A": (2, part.whole[1]), "B": (part.whole[0], 2)}
                    for side, shape in shapes.items():
                        values = rng.standard_normal(shape).astype(np.float32) * np.float32(0.2)
                        tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": sorted(wanted)}
    path = fresh_folder("pair-adapter")
    (path / "adapter_config.json").write_text(json.dumps(values))
    write_safetensors(path / "adapter_model.safetensors", tensors)
    return path


def adapter_of(llm: LLM, features: frozenset[str]) -> Any:
    if "adapter" not in features:
        return None
    return llm.engine.adapters.load("a", adapter(features & frozenset(NETWORKS)))


def prompt_of(llm: LLM, features: frozenset[str]) -> PromptTokens:
    """The text, in front of which one of the features puts an image."""
    if "image" not in features:
        return llm.prompt_tokens(PROMPT)
    data = {"multi_modal_data": {"image": picture(40, 50, 1)}}
    return llm.prompt_tokens({"prompt": f"<start_of_image>{PROMPT}", **data})


def add(llm: LLM, features: frozenset[str]) -> Request:
    options, own, prompt = choosing(features), adapter_of(llm, features), prompt_of(llm, features)
    if "beams" in features:
        returned = options.pop("n", None)
        width = BeamSearchParams(4, num_return_sequences=returned, length_penalty=-1.0, **options)
        return llm.engine.add_beam_search("request", prompt.token_ids, width, adapter=own, images=prompt.images)
    params = SamplingParams(temperature=0.8, seed=11, **options)
    return llm.engine.add_request("request", prompt.token_ids, params, adapter=own, images=prompt.images)


def drain(llm: LLM) -> None:
    for _ in range(3000):
        if not llm.engine.has_work:
            break
        llm.engine.step()
        llm.engine.blocks.check_invariants()
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_used_blocks == 0


@cache
def run_alone(features: frozenset[str]) -> Request:
    llm = make_llm(features)
    request = add(llm, features)
    drain(llm)
    return request


def essence(request: Request) -> list[Any]:
    return [
        (s.output_token_ids, s.text, s.finish_reason, s.stop_reason, [t.token_id for t in s.logprobs])
        for s in request.sequences
        if s.output_token_ids
    ]


@pytest.mark.full
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "second"), itertools.combinations(FEATURES, 2))
def test_pair(first: str, second: str) -> None:
    pair = frozenset({first, second})
    if pair <= SPECULATION:
        pytest.skip("one engine guesses in one way; each of them is tested with every other feature")
    if pair <= NETWORKS.keys():
        pytest.skip("features of different networks; each is tested with every other feature")
    expected = run_alone(pair - set(NEUTRAL))
    llm = make_llm(pair)
    engine = llm.engine
    company = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = llm.model.require_tokenizer().encode(PROMPT)
    if "prefix hit" in pair:
        before = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        whole = prompt_of(llm, pair)
        engine.add_request("before", whole.token_ids, before, adapter=adapter_of(llm, pair), images=whole.images)
        drain(llm)
    for number in range(4):
        engine.add_request(f"older {number}", [*tokens[number:], 5 + number], company)
    request = add(llm, pair)
    drain(llm)
    assert request.error is None
    assert essence(request) == essence(expected)
    if "prefix hit" in pair:
        assert request.metrics.num_cached_tokens >= (
            max(image.end for image in request.images) // 4 * 4 if request.images else 1
        )
    assert ("image" in pair) == bool(request.images)
    if "preemption" in pair:
        assert request.metrics.num_preemptions > 0
    if pair & SPECULATION and "beams" not in pair:
        assert sum(sequence.num_drafted for sequence in request.sequences) > 0
    if "stop strings" in pair:
        assert any(s.stop_reason is not None for s in request.sequences)
