"""Random requests: a strategy for every field of `SamplingParams` and `BeamSearchParams`, in any combination.

Values are chosen so that options meet: few token ids, so that texts repeat and n-grams, penalties and drafts apply;
masks that leave no token; stops and limits that come early.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from bifolio import BeamSearchParams, Grammar, SamplingParams, StructuredOutputsParams
from bifolio.errors import RequestError
from bifolio.sampling.thinking import AfterThinking
from bifolio.sampling_params import RequestOutputKind
from bifolio.text.tools import tool_format
from bifolio.text.tools.events import ToolSpec
from bifolio.text.tools.format import LarkWriter
from helpers import tiny_tokenizer

FEW = range(40, 52)  # token ids of prompts and masks: letters
ends = (0, 2)  # of the models
one_id, ids = st.sampled_from(FEW), st.lists(st.sampled_from(FEW), min_size=1, max_size=4, unique=True)
few_ids = st.lists(st.sampled_from([*FEW, *ends]), min_size=1, max_size=12, unique=True)
texts = st.sampled_from(["H", "K", "MN", "J", "the", " a", "\n"])
flag = st.booleans()


def shout(output: list[int], logits: Any) -> Any:
    logits[len(output) % 7 :: 7] += 1.5
    return logits


def echo(prompt: list[int], output: list[int], logits: Any) -> Any:
    logits[prompt[len(output) % len(prompt)]] += 3.0
    return logits


def fails_later(output: list[int], logits: Any) -> Any:
    if len(output) > 3:
        raise ValueError("a processor that fails")
    return logits


def excludes_all_later(output: list[int], logits: Any) -> Any:
    return np.full_like(logits, -np.inf) if len(output) > 4 else logits


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}},
    "regex": {"regex": "[H-K]{3,9}"},
    "digits": {"regex": "[0-9]{2}"},
    "choice": {"choice": ["HIJ", "HIJK", "the fox"]},
    "lark": {"grammar": 'start: "H" ("I" | "JK")*'},
    "object": {"json_object": True},
}
outputs = st.sampled_from(sorted(CONSTRAINTS)).map(lambda name: StructuredOutputsParams(**CONSTRAINTS[name]))


@cache
def grammars() -> list[Any]:
    """Also that of enforced calls of tools, and that of an answer after some tokens of reasoning."""
    calls, form = LarkWriter({}), tool_format(None)
    form.write(calls, [ToolSpec("look", {"type": "object"}, True)], must_call=True, many=False)
    thinking = AfterThinking(tiny_tokenizer().get_vocab_size(), (), (41,), (41, 42), 3)
    texts = [Grammar("regex", "(H|IJ)+K"), Grammar("choice", '["K", "KLM"]'), Grammar("tools", calls.source())]
    return [*texts, thinking]


processors = st.lists(st.sampled_from([shout, echo, fails_later, excludes_all_later]), max_size=2)


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


SHARED: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": some(0, 1, 5, 9, 14, 14, 14, None),
    "min_tokens": some(0, 1, 4, 9),
    "stop": st.lists(texts, min_size=1, max_size=2),
    "stop_token_ids": ids,
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "logprobs": some(None, 0, 1, 3, 7),
    "repetition_penalty": some(0.6, 1.3, 4.0),
    "presence_penalty": some(-1.0, 0.5, 3.0),
    "frequency_penalty": some(-0.5, 0.5, 2.0),
    "no_repeat_ngram_size": some(1, 2, 3),
    "logit_bias": st.dictionaries(one_id, some(-100.0, -1e30, 4.0, 30.0), min_size=1, max_size=3),
    "bad_words": st.lists(texts, min_size=1, max_size=2),
    "bad_words_token_ids": st.lists(ids, min_size=1, max_size=3),
    "allowed_token_ids": few_ids,
    "logits_processors": processors,
    "grammar": st.deferred(lambda: st.sampled_from(grammars())),
    "skip_special_tokens": flag,
}
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "n": some(1, 2, 3),
    "best_of": some(None, 1, 2, 4),
    "temperature": some(0.0, 1e-5, 0.7, 1.0, 2.0),
    "top_p": some(1e-9, 0.4, 0.9),
    "top_k": some(-1, 1, 4, 1000),
    "min_p": some(0.05, 0.5, 1.0),
    "typical_p": some(0.2, 0.9),
    "dry_multiplier": some(0.8, 10.0),
    "dry_base": some(1.0, 1.75, 4.0),
    "dry_allowed_length": some(1, 2, 4),
    "dry_sequence_breakers": some((), ("\n",), ("K", 41), (43,)),
    "dry_range": some(0, 4, 1000),
    "xtc_probability": some(0.5, 1.0),
    "xtc_threshold": some(0.0, 0.02, 0.3),
    "seed": st.integers(-(1 << 63), (1 << 64) - 1),
    "prompt_logprobs": some(None, 0, 2),
    "detokenize": flag,
    "spaces_between_special_tokens": flag,
    "structured_outputs": outputs,
    "guided_decoding": outputs,
    "output_kind": st.sampled_from(RequestOutputKind),
}
BEAMS: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "beam_width": some(1, 2, 3, 4),
    "temperature": some(0.0),
    "length_penalty": some(-1.0, 0.0, 1.0, 2.0),
    "early_stopping": some(True, False, "never"),
    "num_return_sequences": some(None, 1, 2),
    "num_groups": some(1, 2),
    "diversity_penalty": some(0.0, 0.5, 5.0),
}
CONSTRAINING = ("grammar", "structured_outputs", "guided_decoding")  # one of them at most


def missing_strategies() -> set[str]:
    """Fields of the two classes that have no strategy, and strategies without a field."""
    missing: set[str] = set()
    for kind, strategies in ((SamplingParams, SAMPLING), (BeamSearchParams, BEAMS)):
        missing |= {field.name for field in dataclasses.fields(kind) if field.init} ^ strategies.keys()
    return missing


@cache
def _defaults(kind: type[SamplingParams] | type[BeamSearchParams]) -> SamplingParams | BeamSearchParams:
    return kind()


class Ask(NamedTuple):
    """One request of a life."""

    prompt: tuple[int, ...]
    params: SamplingParams | BeamSearchParams
    after: int  # steps since the request before it
    aborted_after: int | None  # steps

    def __repr__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self.params) if f.init]
        values = {
            name: getattr(self.params, name)
            for name in changed
            if getattr(self.params, name) != getattr(_defaults(type(self.params)), name)
        }
        return f"Ask({self.prompt}, {type(self.params).__name__}(**{values}), {self.after}, {self.aborted_after})"


prompts = st.tuples(
    st.lists(one_id, min_size=1, max_size=4), st.integers(1, 4), st.lists(st.integers(3, 300), max_size=3)
).map(lambda parts: (*(parts[0] * parts[1]), *parts[2]))


@st.composite
def params(draw: st.DrawFn) -> SamplingParams | BeamSearchParams | None:
    """Parameters of a request; None where the combination is refused."""
    is_beam = draw(st.integers(0, 5)) == 0
    strategies = BEAMS if is_beam else SAMPLING
    names = draw(st.lists(st.sampled_from(sorted(strategies)), max_size=8, unique=True))
    names += ["max_tokens"] if is_beam else ["max_tokens", "seed"]
    if draw(flag):
        names.append("allowed_token_ids")
    constraining = [name for name in names if name in CONSTRAINING]
    values = {name: draw(strategies[name]) for name in dict.fromkeys(names) if name not in constraining[1:]}
    try:
        return BeamSearchParams(**values) if is_beam else SamplingParams(**values)
    except RequestError:
        return None


@st.composite
def asks(draw: st.DrawFn, count: int) -> list[Ask]:
    """Requests in the order of their arrival; many share the beginning of their prompts."""
    beginnings = draw(st.lists(prompts, min_size=1, max_size=2))
    found = []
    for _ in range(count):
        wanted = draw(params())
        if wanted is not None:
            prompt = (*draw(st.sampled_from(beginnings)), *draw(st.lists(one_id, max_size=3)))
            aborted = draw(st.integers(0, 60))
            found.append(Ask(prompt, wanted, draw(st.sampled_from((0, 0, 0, 1, 4))), aborted if aborted < 8 else None))
    return found


ENGINES = st.fixed_dictionaries(
    {
        "block_size": some(2, 4, 8),
        "room": some(1.0, 1.3, 2.0, 5.0),  # of the cache, in requests of the longest length
        "max_num_seqs": some(4, 6, 8),
        "chunk_size": some(1, 3, 7, 64),
        "token_budget": some(9, 16, 64),
        "enable_prefix_caching": flag,
        "length": some(1, 2, 4),
        "adaptive": st.sampled_from((False, False, False, True)),
        "checkpoint_tokens": some(None, 8, 16),
    }
)
