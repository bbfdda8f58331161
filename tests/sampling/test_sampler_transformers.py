"""Every option that transformers has, against its own processors: same support, same probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling_helpers import make_sampler, random_logits

from bifolio.sampling_params import SamplingParams

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.full

EOS = 2
VOCAB = 503
PROMPT_LENGTH = 30


def oracle(kind: str, *args: Any, **kwargs: Any) -> Any:
    import transformers  # two seconds, so not at the top

    return getattr(transformers, kind)(*args, **kwargs)


def processors(options: dict[str, Any]) -> Any:
    """transformers' processors for these parameters, in the order in which `generate` applies them."""
    made = oracle("LogitsProcessorList")
    if bias := options.get("logit_bias"):
        made.append(oracle("SequenceBiasLogitsProcessor", {(token,): amount for token, amount in bias.items()}))
    if penalty := options.get("repetition_penalty"):
        made.append(oracle("RepetitionPenaltyLogitsProcessor", penalty))
    if size := options.get("no_repeat_ngram_size"):
        made.append(oracle("NoRepeatNGramLogitsProcessor", size))
    if words := options.get("bad_words_token_ids"):
        made.append(oracle("NoBadWordsLogitsProcessor", [list(word) for word in words], EOS))
    if least := options.get("min_tokens"):
        ends = [EOS, *options.get("stop_token_ids", [])]
        made.append(oracle("MinNewTokensLengthLogitsProcessor", PROMPT_LENGTH, least, ends))
    if allowed := options.get("allowed_token_ids"):
        made.append(oracle("PrefixConstrainedLogitsProcessor", lambda _batch, _ids: list(allowed), 1))
    if (temperature := options.get("temperature", 1.0)) != 1.0:
        made.append(oracle("TemperatureLogitsWarper", temperature))
    if top_k := options.get("top_k"):
        made.append(oracle("TopKLogitsWarper", top_k))
    if top_p := options.get("top_p"):
        made.append(oracle("TopPLogitsWarper", top_p))
    if min_p := options.get("min_p"):
        made.append(oracle("MinPLogitsWarper", min_p))
    if typical_p := options.get("typical_p"):
        made.append(oracle("TypicalLogitsWarper", typical_p))
    return made


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": VOCAB},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_token_ids": [[5], [EOS], [3, 4], [1, 2, 3]]},
    {"logit_bias": {7: 4.0, 8: -6.0, 9: 0.5}},
    {"min_tokens": 40},
    {"min_tokens": 40, "stop_token_ids": [11, 12]},
    {"min_tokens": 5},
    {"allowed_token_ids": [3, 100, 200]},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 30, "typical_p": 0.6},
    {"top_p": 0.9, "typical_p": 0.5, "min_p": 0.01, "temperature": 0.9},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "logit_bias": {3: 2.0}, "temperature": 0.8, "top_k": 20},
    {
        "logit_bias": {1: 3.0, 4: 2.0},
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "bad_words_token_ids": [[1], [3, 4]],
        "min_tokens": 30,
        "temperature": 1.5,
        "top_k": 100,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.8,
    },
]


def history(seed: int) -> tuple[list[int], list[int]]:
    """Prompt and output over few tokens, so that repetitions and forbidden words occur."""
    tokens = np.random.default_rng(seed).integers(1, 8, PROMPT_LENGTH + 20).tolist()
    return tokens[:PROMPT_LENGTH], tokens[PROMPT_LENGTH:]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}" for k in options))
@pytest.mark.parametrize("use_torch", [False, True], ids=["numpy", "torch"])
def test_option_matches_transformers(options: dict[str, Any], use_torch: bool) -> None:
    rows = 12
    logits = random_logits(rows, VOCAB, seed=len(options))
    texts = [history(seed) for seed in range(rows)]
    params = SamplingParams(**{"max_tokens": None, **options})
    sampler = make_sampler(
        [params] * rows, VOCAB, [text[0] for text in texts], [text[1] for text in texts], frozenset({EOS})
    )
    expected_scores = processors(options)(
        torch.tensor([prompt + output for prompt, output in texts]), torch.from_numpy(logits.copy())
    )
    expected = expected_scores.softmax(-1).numpy()
    given = torch.from_numpy(logits) if use_torch else logits
    found = np.asarray(sampler.probabilities(given, np.arange(rows)))
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    processed = np.asarray(sampler.process_logits(given, np.arange(rows)))
    np.testing.assert_array_equal(np.isfinite(processed), np.isfinite(expected_scores.numpy()))
    np.testing.assert_allclose(torch.from_numpy(processed).softmax(-1).numpy(), expected, atol=1e-5)


def test_ties_are_kept_as_transformers_keeps_them() -> None:
    """Low-precision models produce equal logits: top-k keeps all that equal the last, typical and min-p likewise."""
    logits = np.round(random_logits(8, VOCAB) * 2) / 2
    for options in ({"top_k": 7}, {"min_p": 0.1}, {"typical_p": 0.5}, {"top_k": 20, "typical_p": 0.4}):
        sampler = make_sampler([SamplingParams(**options)] * 8, VOCAB)
        expected = processors(options)(torch.zeros(8, 1, dtype=torch.long), torch.from_numpy(logits)).softmax(-1)
        found = sampler.probabilities(logits, np.arange(8))
        np.testing.assert_array_equal(found > 0, expected.numpy() > 0)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "typical_p": 0.9, "min_p": 0.02},
    ],
)
def test_steps_of_generate(options: dict[str, Any]) -> None:
    """The scores that `generate` itself reports at each step, its own order of processors included."""
    torch.manual_seed(0)
    config = oracle(
        "LlamaConfig",
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = oracle("LlamaForCausalLM", config).eval()
    model.lm_head.weight.data.mul_(40)
    prompt = [3, 4, 5, 3, 4]
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=True,
        max_new_tokens=12,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **{"top_k": 0, **options},
    )
    tokens = generated.sequences[0].tolist()[len(prompt) :]
    output: list[int] = []
    sampler = make_sampler([SamplingParams(**options)], 61, [prompt], [output])
    for logits, scores, token in zip(generated.logits, generated.scores, tokens, strict=True):
        found = sampler.probabilities(logits.float().numpy(), [0])
        np.testing.assert_array_equal(found > 0, scores.numpy() > -np.inf)
        np.testing.assert_allclose(found, scores.softmax(-1).numpy(), atol=1e-5)
        output.append(token)


def test_prompt_logprobs_match_log_softmax() -> None:
    from bifolio.sampling.sampler import prompt_logprobs

    logits = random_logits(200, VOCAB, scale=6.0)
    ids = np.random.default_rng(1).integers(0, VOCAB, 200)
    expected = torch.from_numpy(logits).log_softmax(-1)
    for given in (logits, torch.from_numpy(logits)):
        scored = prompt_logprobs(given, ids, 5)
        np.testing.assert_allclose(scored.logprobs, expected.gather(1, torch.from_numpy(ids)[:, None])[:, 0], atol=1e-5)
        best = expected.topk(5)
        assert [[token for token, _ in row] for row in scored.top] == best.indices.tolist()
        np.testing.assert_allclose([[p for _, p in row] for row in scored.top], best.values, atol=1e-5)
        ranks = (expected > expected.gather(1, torch.from_numpy(ids)[:, None])).sum(1) + 1
        np.testing.assert_array_equal(scored.ranks, ranks)
