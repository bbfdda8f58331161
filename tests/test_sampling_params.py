"""SamplingParams: what is accepted, how it is normalised, and that everything else is refused with advice."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bifolio.errors import RequestError, TokenIdError
from bifolio.sampling_params import SamplingParams, merge_defaults

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.5, True, "1", None, 10**6]),
        ("best_of", [0, 1.0, "2", False]),
        ("temperature", [-0.1, NAN, INF, -INF, "1", None, True, 1j]),
        ("top_p", [0, 0.0, -0.5, 1.01, NAN, INF, None]),
        ("top_k", [-2, 1.0, True, NAN, None, "5"]),
        ("min_p", [-0.1, 1.1, NAN, None]),
        ("typical_p", [0, 1.5, NAN]),
        ("repetition_penalty", [0, -1, NAN, INF, None]),
        ("presence_penalty", [NAN, INF, -INF, "0"]),
        ("frequency_penalty", [NAN, INF, None]),
        ("no_repeat_ngram_size", [-1, 1.0, NAN]),
        ("dry_multiplier", [-1, NAN]),
        ("dry_base", [0.5, NAN, INF]),
        ("dry_allowed_length", [0, -1, 1.5]),
        ("dry_range", [-1, 0.5]),
        ("dry_sequence_breakers", [[""], [-1], [1.5], [None], {1: 2}]),
        ("xtc_probability", [-0.1, 1.1, NAN]),
        ("xtc_threshold", [-0.1, 1.1, NAN]),
        ("logit_bias", [5, [1], {-1: 1.0}, {1: NAN}, {1: INF}, {1: "x"}, {1.5: 1.0}, {"a": 1.0}, {True: 1.0}]),
        ("bad_words", [[1], [""], 5.0, {"a": 1}]),
        ("bad_words_token_ids", [[1], [[]], [[-1]], [[1.5]], ["ab"], [[True]]]),
        ("allowed_token_ids", [[], [-1], [1.5], ["1"], 2.5]),
        ("min_tokens", [-1, 1.5, 17]),
        ("max_tokens", [-1, -5, 1.5, "3", NAN]),
        ("stop", [[""], [1], 5.0, [None], b"x"]),
        ("stop_token_ids", [[-1], ["1"], [1.0], "ab"]),
        ("include_stop_str_in_output", [1, None, "yes"]),
        ("ignore_eos", [0, None]),
        ("skip_special_tokens", [None, 1]),
        ("seed", [1.5, "1", True, 1 << 64, -(1 << 63) - 1, NAN]),
        ("logprobs", [-1, 1.5, True, 10**6]),
        ("prompt_logprobs", [-1, "1", 10**6]),
        ("logits_processors", [[1], ["f"], 5.5]),
    ],
)
def test_what_cannot_work_is_refused_by_name(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})


def test_relations() -> None:
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100


def test_normal_forms() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(-1),
        stop="end",
        stop_token_ids=[np.int32(4), 4, 5],
        logit_bias={"7": 1, 8: -2},
        bad_words_token_ids=[[1, 2], (1, 2)],
        allowed_token_ids={3, 1},
        bad_words=["a", "a"],
        dry_sequence_breakers=[5, "\n"],
        seed=np.uint64(2**63),
    )
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 5)
    assert params.logit_bias == {7: 1.0, 8: -2.0}
    assert params.bad_words_token_ids == ((1, 2),)
    assert set(params.allowed_token_ids or ()) == {1, 3}
    assert params.bad_words == ("a",)
    assert params.dry_sequence_breakers == (5, "\n")
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logits_processors=None) == SamplingParams()


def test_parameters_cannot_be_changed_but_copied_and_sent() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"], seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 3.0
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert dataclasses.replace(params, top_k=5).top_k == 5


def test_derived() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, best_of=5).needs_logprobs
    assert not SamplingParams(n=2).needs_logprobs
    assert SamplingParams(logprobs=0).needs_logprobs


def test_validate_for_names_the_field() -> None:
    SamplingParams(logit_bias={9: 1}, stop_token_ids=[9], allowed_token_ids=[0]).validate_for(10)
    for options in (
        {"logit_bias": {10: 1}},
        {"stop_token_ids": [10]},
        {"allowed_token_ids": [10]},
        {"bad_words_token_ids": [[1, 10]]},
        {"dry_sequence_breakers": [10]},
    ):
        with pytest.raises(TokenIdError, match=next(iter(options))):
            SamplingParams(**options).validate_for(10)


def test_generation_config_gives_defaults_and_explicit_values_win() -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "max_new_tokens": 77,
        "do_sample": True,
        "eos_token_id": 2,
        "bad_words_ids": [[5]],
        "_from_model_config": True,
    }
    params = SamplingParams.with_defaults(config, top_p=1.0, seed=3)
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.6, 1.0, 77, 3)
    assert params.bad_words_token_ids == ((5,),)
    assert merge_defaults({}, temperature=1.0) == {"temperature": 1.0}
    assert SamplingParams.with_defaults({"do_sample": False, "temperature": 0.6}).is_greedy
    assert SamplingParams.with_defaults({"do_sample": False}, temperature=0.8).temperature == 0.8


def test_strings_become_token_ids() -> None:
    def encode(text: str) -> list[int]:
        return [ord(char) for char in text]

    params = SamplingParams(
        bad_words=["ab"], bad_words_token_ids=[[1]], dry_multiplier=1.0, dry_sequence_breakers=["\n", 3]
    )
    resolved = params.resolve_strings(encode)
    assert resolved.bad_words == ()
    assert resolved.bad_words_token_ids == ((1,), (97, 98), (32, 97, 98))
    assert resolved.dry_sequence_breakers == (10, 3)
    plain = SamplingParams()
    assert plain.resolve_strings(encode) is plain


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.lists(
        st.one_of(st.integers(), st.floats(), st.text(max_size=2), st.none(), st.lists(st.integers())), max_size=3
    ),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.floats(), st.none()), max_size=2),
)


@pytest.mark.full
@given(field=st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), value=JUNK)
@settings(max_examples=300, deadline=None)
def test_any_value_is_accepted_or_a_request_error(field: str, value: Any) -> None:
    message = "accepted"
    try:
        SamplingParams(**{field: value})
    except RequestError as error:
        message = str(error)
    assert message
