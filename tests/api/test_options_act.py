"""No option of the Python API is ignored in silence: each changes something, is refused, or is listed with a reason."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from bifolio import LLM, AsyncLLM, BeamSearchParams, Grammar, SamplingParams, StructuredOutputsParams
from bifolio.api.vllm_options import IGNORED as PORTED
from bifolio.api.vllm_options import speculative_from
from bifolio.config import SpeculativeConfig
from bifolio.errors import BifolioError, ConfigError, RequestError
from bifolio.sampling_params import IGNORED, RequestOutputKind
from helpers import scratch, tiny_folder, tiny_tokenizer

E = tiny_tokenizer().token_to_id("e")
PROMPT = "the fox the fox the fox the"
OPTIONS: dict[str, Any] = {"max_model_len": 128, "num_blocks": 64, "kernels": "reference", "max_num_seqs": 8}


def processor(tokens: list[int], logits: Any) -> Any:
    logits[E] = 1000.0
    return logits


# Values of every kind: those that an option does not take are refused by it.
VALUES: list[Any] = [
    True, False, 0, 1, 2, 3, 0.3, 0.0, 1.5, "e", ["e"], [5], [0], [E], [[E]], [[0]], {E: 2000.0}, None, [processor],
    "never", RequestOutputKind.DELTA, StructuredOutputsParams(choice=["ab"]),
]  # fmt: skip
PUSHED = {"max_tokens": 6, "logit_bias": {0: 1000.0, E: 900.0}}  # the end of the text, and a token after it
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1, "max_tokens": 8},
    {"temperature": 0.0, "max_tokens": 16, "logit_bias": {E: 10.0}, "dry_multiplier": 0.3},
    {"temperature": 0.5, "seed": 1, "max_tokens": 8, "xtc_threshold": 0.01},
    {"temperature": 0.5, "seed": 1, "max_tokens": 8, "xtc_probability": 1.0},
    {"temperature": 1.0, "seed": 1, "max_tokens": 8, "stop": ["e", "o", "a", "t", "i"]},
    {"temperature": 0.0, **PUSHED},
    {"temperature": 0.0, **PUSHED, "ignore_eos": True},
]
SEARCHED: list[dict[str, Any]] = [
    {"max_tokens": 6},
    {"max_tokens": 6, "num_groups": 2},
    {"max_tokens": 6, "stop": ["e", "o", "a", "t", "i"]},
    PUSHED,
    {**PUSHED, "ignore_eos": True},
    {"max_tokens": 6, "logit_bias": {E: 10.0}},
]


@pytest.fixture(scope="module")
def folder() -> Any:
    return tiny_folder(tokenizer=True)


@pytest.fixture(scope="module")
def outputs(folder: Any) -> Iterator[Callable[[Any], Any]]:
    """A function from parameters to all that a request with them returns."""
    llm = AsyncLLM(folder, **OPTIONS)

    async def sampled(params: SamplingParams) -> Any:
        found = [output async for output in llm.generate(PROMPT, params)]
        return len(found), found[-1]

    def run(params: Any) -> Any:
        if isinstance(params, BeamSearchParams):
            return shown(1, asyncio.run(llm.beam_search(PROMPT, params))[0])
        return shown(*asyncio.run(sampled(params)))

    yield run
    llm.shutdown()


def shown(count: int, output: Any) -> str:
    each = [(item.text, item.token_ids, item.finish_reason, item.stop_reason, item.logprobs) for item in output.outputs]
    return repr((count, each, output.prompt_logprobs))


def acts(kind: Any, name: str, bases: list[dict[str, Any]], outputs: Callable[[Any], Any]) -> bool:
    """Whether some value of the option changes the output; or all but the default are refused by its name."""
    num_taken, is_named = 0, False
    for base in bases:
        plain = outputs(kind(**base))
        for value in [*VALUES, *([Grammar.regex("[ab]+")] if name == "grammar" else [])]:
            try:
                params = kind(**{**base, name: value})
            except (BifolioError, TypeError) as error:
                is_named |= name in str(error)
                continue
            try:
                if outputs(params) != plain:
                    return True
            except BifolioError as error:
                is_named |= name in str(error)
                continue
            num_taken += value != getattr(kind(**base), name)
    return is_named and not num_taken


@pytest.mark.full
@pytest.mark.parametrize(("kind", "bases"), [(SamplingParams, SAMPLED), (BeamSearchParams, SEARCHED)])
def test_every_sampling_option_changes_the_output(kind: Any, bases: Any, outputs: Callable[[Any], Any]) -> None:
    names = [field.name for field in fields(kind) if field.init]
    silent = [name for name in names if name not in IGNORED and not acts(kind, name, bases, outputs)]
    assert not silent, f"{kind.__name__} ignores {silent}: act on them, refuse them, or list them in IGNORED"


# Values of options of LLM that are no numbers or flags; all others come from VALUES.
NAMED: dict[str, list[Any]] = {
    "dtype": ["float16", "q8_0"], "kv_cache_dtype": ["f16"], "memory": ["64MB"], "device": ["nowhere"],
    "kernels": ["native"], "activations": ["int8", "nothing"], "speculative": [SpeculativeConfig("ngram")],
    "speculative_config": [{"method": "ngram"}], "model": ["no-such-model"], "max_model_len": [64],
    "kv_offload": ["1MB"], "kv_offload_dir": [scratch() / "tier"], "kv_offload_disk": ["1MB"],
    "cpu_experts": ["all"],
}  # fmt: skip
ON_A_GPU = {  # and for hybrid models: nothing to see here
    "gpu_memory_utilization": "the share of a GPU's memory",
    "warm_up": "kernels of a GPU are compiled ahead",
    "enable_sleep_mode": "memory of a GPU that sleeps; that of a CPU does without",
    "dtype": "dense weights on a GPU",
    "on_load": "a function",
}


def built(folder: Any, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """All that the options decided on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(**{"model": folder, **OPTIONS, **options}) as llm:
            seeds = None if llm._seeds is None else llm._seeds.getstate()
            kernels = llm.engine.runner.kernels
            pool, is_alone = getattr(kernels, "pool", None), llm.engine.runner.peers is None
            planes = getattr(kernels, "activation_planes", None)
            set_up = (kernels.name, kernels.device, None if pool is None else pool.num_threads, planes, is_alone)
            printed = capsys.readouterr().err if options.get("verbose") else ""
            return repr(
                (llm.engine.config, llm.plan.num_blocks, set_up, seeds, printed, [str(w.message) for w in caught])
            )


@pytest.mark.full
def test_every_option_of_llm_changes_the_engine(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = inspect.signature(LLM.__init__).parameters
    names = [name for name, each in parameters.items() if name != "self" and each.kind is not each.VAR_KEYWORD]
    bases: dict[str, dict[str, Any]] = {
        "memory": {"num_blocks": None}, "kv_offload_disk": {"kv_offload_dir": scratch() / "tier"},
        "threads": {"kernels": "native"}, "activations": {"kernels": "native"},
    }  # fmt: skip
    wanted = [name for name in names if name not in ON_A_GPU]
    silent = [name for name in wanted if not _decides(folder, capsys, name, bases.get(name, {}))]
    assert not silent, f"LLM ignores {silent}"


def _decides(folder: Any, capsys: pytest.CaptureFixture[str], name: str, base: dict[str, Any]) -> bool:
    """Whether a value that the option takes makes another engine; or it takes none of them."""
    plain, num_taken = built(folder, capsys, **base), 0
    for value in NAMED.get(name, VALUES[:6]):
        try:
            found = built(folder, capsys, **{**base, name: value})
        except (BifolioError, TypeError, ValueError):
            continue
        if found != plain:
            return True
        num_taken += 1
    return not num_taken


def test_options_of_vllm_are_warned_about(folder: Any) -> None:
    for name in PORTED:
        with pytest.warns(UserWarning, match=f"{name}=True has no effect: "):
            LLM(folder, **OPTIONS, **{name: True}).close()
    with pytest.warns(UserWarning, match="enable_chunked_prefill=False has no effect"):
        LLM(folder, **OPTIONS, enable_chunked_prefill=False).close()


def test_two_options_for_one_thing_are_refused(folder: Any) -> None:
    for options in (
        {"token_budget": 64, "max_num_batched_tokens": 32},
        {"speculative": SpeculativeConfig("ngram"), "speculative_config": {"method": "ngram"}},
        {"num_blocks": 64, "memory": "64MB"},
    ):
        with pytest.raises(ConfigError, match=" and ".join(options)):
            LLM(folder, **{**OPTIONS, **options})
    llm = LLM(folder, **OPTIONS)
    with pytest.raises(ConfigError, match=r"pass max_num_seqs to LLM"):
        AsyncLLM(llm, max_num_seqs=2)
    engine = AsyncLLM(llm)
    with pytest.raises(RequestError, match="prompt is another name of prompts"):
        engine.generate("a", prompt="b")
    engine.shutdown()


def test_sizes_of_ngrams_are_no_option() -> None:
    speculative_from({"method": "ngram", "prompt_lookup_max": 4})
    with pytest.warns(UserWarning, match="prompt_lookup_max'] has no effect: n-grams of"):
        assert speculative_from({"method": "ngram", "prompt_lookup_max": 9}) == SpeculativeConfig("ngram")
