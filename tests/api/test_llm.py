"""The offline API: prompts in every form, results in order, streams that can be left, chats, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.api.prompts import as_prompts, show_progress
from bifolio.errors import (
    ChatTemplateError,
    ConfigError,
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    TokenIdError,
)
from bifolio.kernels.reference import ReferenceKernels
from bifolio.model.huggingface.hf_loader import load_folder
from helpers import END_OF_TEXT, drain, make_engine, output_ids, tiny_folder, tiny_tokenizer

TEXT = "Once upon a time a little fox"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True, chat_template=CHAT)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(
        folder, kernels=ReferenceKernels(), block_size=4, max_model_len=96, max_num_seqs=4, poison_free_blocks=True
    )


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text).ids)


def check_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert not llm.engine.requests
    llm.engine.blocks.check_invariants()


# -- the object itself ---------------------------------------------------------------------------------------------


def test_the_repr_names_model_device_blocks_and_length(llm: LLM) -> None:
    shown = repr(llm)
    name, blocks = llm.model.path.name, llm.engine.stats().num_blocks
    for part in (f"LLM({name!r}", "device='cpu'", f"num_blocks={blocks + 1}", "block_size=4", "max_model_len=96"):
        assert part in shown
    llm.close()
    assert repr(llm) == f"LLM({name!r}, closed)"


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"has no option 'max_modellen': did you mean 'max_model_len'\?"):
        LLM("nothing", max_modellen=5)


# -- prompts and results --------------------------------------------------------------------------------------------


def test_prompts_in_every_form_give_the_same_tokens(llm: LLM) -> None:
    ids = ids_of(TEXT)
    forms = [TEXT, ids, tuple(ids), np.array(ids), {"prompt": TEXT}, {"prompt_token_ids": ids},
             {"prompt_token_ids": np.array(ids)}]  # fmt: skip
    outputs = llm.generate(forms, GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert outputs[0].prompt == outputs[4].prompt == TEXT
    assert outputs[1].prompt is None
    for single in forms:
        (output,) = llm.generate(single, GREEDY)
        assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_results_come_in_the_order_of_the_prompts_with_a_parameter_for_each(llm: LLM) -> None:
    texts = [TEXT[: 5 + 3 * i] for i in range(9)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=9 - i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate(texts, params)
    assert [output.prompt for output in outputs] == texts
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(9, 0, -1))
    for text, each, output in zip(texts, params, outputs, strict=True):
        (alone,) = llm.generate(text, each)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    check_idle(llm)


def test_nothing_in_nothing_out(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert as_prompts([]) == []


def test_the_text_is_the_tokens_decoded(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate(TEXT, params)
    completion = output.outputs[0]
    whole = tiny_tokenizer().decode(ids_of(TEXT) + completion.token_ids)
    assert TEXT + completion.text == whole
    assert completion.finish_reason == "length"


def test_results_have_the_fields_that_users_of_vllm_know(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(TEXT, params)
    assert output.finished
    assert output.error is None
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        assert all(len(entry.top) == 2 for entry in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs))
    times = output.metrics
    assert 0 < times.arrival <= times.first_scheduled <= times.first_token <= times.finished
    assert min(times.queue_time, times.prefill_time, times.decode_time, times.time_to_first_token) >= 0
    (plain,) = llm.generate(TEXT, GREEDY)
    assert plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is plain.prompt_logprobs is None


def test_best_of_gives_the_better_ones_first(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, n=2, best_of=4, max_tokens=6, ignore_eos=True, logprobs=0)
    everything = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=6, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(TEXT, params)
    (all_four,) = llm.generate(TEXT, everything)
    ranked = sorted((c.cumulative_logprob for c in all_four.outputs), reverse=True)
    assert [c.cumulative_logprob for c in output.outputs] == ranked[:2]


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    (free,) = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    text = free.outputs[0].text
    stop = text[7:10]
    cut = text[: text.index(stop)]
    (stopped,) = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=[stop]))
    completion = stopped.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (cut, "stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(TEXT, kept)[0].outputs[0].text == cut + stop


def test_the_end_of_text_is_not_part_of_the_text(llm: LLM) -> None:
    end = ids_of(END_OF_TEXT)[0]
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0})
    completion = llm.generate(TEXT, params)[0].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [end], "stop")


def test_prompts_alone_can_be_scored(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert all(entry is not None for entry in output.prompt_logprobs[1:])


def test_the_models_own_defaults_are_used(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m", tokenizer=True)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "max_new_tokens": 3, "eos_token_id": 0})
    )
    llm = LLM(folder, kernels="reference", max_model_len=64)
    assert llm.default_params().temperature == 0
    assert llm.default_params(temperature=0.5).temperature == 0.5
    (output,) = llm.generate(TEXT)
    expected = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=3))
    assert output.outputs[0].token_ids == expected[0].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_cache_type_runs(folder: Path, dtype: str) -> None:
    llm = LLM(folder, kernels="reference", dtype=dtype, max_model_len=64, poison_free_blocks=True)
    (output,) = llm.generate(TEXT, GREEDY)
    assert len(output.outputs[0].token_ids) == 8
    assert llm.plan.bytes_per_token == 2 * 2 * 2 * 8 * {"f32": 4, "f16": 2, "bf16": 2}[dtype]


def test_an_llm_and_a_bare_engine_agree(folder: Path, llm: LLM) -> None:
    engine = make_engine(load_folder(folder), max_model_len=96)
    request = engine.add_request("r", ids_of(TEXT), GREEDY)
    drain(engine)
    assert output_ids(request) == [llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids]


# -- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_gives_every_token_as_it_comes(llm: LLM) -> None:
    params = SamplingParams(temperature=0, n=1, max_tokens=12, ignore_eos=True)
    texts = [TEXT, "The fox liked to read"]
    expected = [output.outputs[0] for output in llm.generate(texts, params)]
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    pieces: dict[str, str] = {"0": "", "1": ""}
    for result in llm.stream(texts, params):
        if result.token is not None:
            tokens[result.request_id].append(result.token)
        pieces[result.request_id] += result.text
    assert [tokens["0"], tokens["1"]] == [completion.token_ids for completion in expected]
    assert [pieces["0"], pieces["1"]] == [completion.text for completion in expected]
    check_idle(llm)


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, n=2, ignore_eos=True)
    stream = llm.stream([TEXT, TEXT], endless)
    seen = list(itertools.islice(stream, 6))
    assert len(seen) == 6
    assert llm.engine.stats().num_used_blocks > 0
    stream.close()
    check_idle(llm)
    for result in llm.stream(TEXT, endless):
        if result.token is not None:
            break
    del result
    check_idle_soon(llm)
    assert len(llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids) == 8


def check_idle_soon(llm: LLM) -> None:
    """A `for` that was left with `break` drops its generator at once in CPython."""
    import gc

    gc.collect()
    check_idle(llm)


def test_an_error_while_streaming_frees_the_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(TEXT, SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    check_idle(llm)


# -- chats ----------------------------------------------------------------------------------------------------------


def test_chat_writes_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids_of("user: Hello\nassistant:")
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "Hi"}]], GREEDY)
    assert len(two) == 2
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_chat_without_a_template_or_messages_is_refused(tmp_path: Path, llm: LLM) -> None:
    bare = LLM(tiny_folder(tmp_path / "m", tokenizer=True), kernels="reference", max_model_len=64)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        bare.chat([{"role": "user", "content": "Hello"}])
    with pytest.raises(ChatTemplateError, match="at least one message"):
        llm.chat([])


# -- refusals -------------------------------------------------------------------------------------------------------


def test_bad_prompts_refuse_the_whole_call_and_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(EmptyPromptError):
        llm.generate([TEXT, ""])
    with pytest.raises(EmptyPromptError):
        llm.generate([{"prompt_token_ids": []}])
    with pytest.raises(EmptyPromptError):
        llm.generate([[]])
    with pytest.raises(TokenIdError, match="outside the vocabulary"):
        llm.generate([TEXT, [10**6]])
    with pytest.raises(PromptTooLongError, match="shorten it or raise max_model_len"):
        llm.generate([TEXT, "word " * 500])
    with pytest.raises(RequestError, match="token id"):
        llm.generate([TEXT, [1.5, 2.5]])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="a prompt has no 'text': it has prompt, prompt_token_ids"):
        llm.generate([{"text": TEXT}])
    with pytest.raises(RequestError, match="a prompt is text, a list of token ids"):
        llm.generate([{"prompt": None}])
    with pytest.raises(RequestError, match="2 prompts and 3 SamplingParams"):
        llm.generate([TEXT, TEXT], [GREEDY] * 3)
    check_idle(llm)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    llm = LLM(tiny_folder(tmp_path / "m"), kernels="reference", max_model_len=64)
    with pytest.raises(RequestError, match="pass prompts as lists of token ids"):
        llm.generate("text")
    (output,) = llm.generate([5, 6], GREEDY)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 8


def test_impossible_settings_say_the_numbers_that_would_work(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"outside 1\.\.256"):
        LLM(folder, kernels="reference", max_model_len=1000)
    with pytest.raises(ConfigError, match=r"needs 17: pass max_model_len <= 64, or at least"):
        LLM(folder, kernels="reference", num_blocks=5, block_size=16)
    with pytest.raises(ConfigError, match="max_model_len <= "):
        LLM(folder, kernels="reference", memory="20kB")
    with pytest.raises(ConfigError, match="is not an amount of memory"):
        LLM(folder, kernels="reference", memory="a lot")
    with pytest.raises(ConfigError, match="auto, bfloat16, float16, half, float32 or float"):
        LLM(folder, kernels="reference", dtype="fp8")
    with pytest.raises(ConfigError, match="choose one of"):
        LLM(folder, kernels="fast")
    with pytest.raises(ConfigError, match="token_budget"):
        LLM(folder, kernels="reference", max_model_len=64, token_budget=3)


# -- little things --------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLM(folder, kernels="reference", max_model_len=64, memory="1MB", verbose=True)
    printed = capsys.readouterr().err
    for word in ("weights", "KV per token", "KV cache", "blocks", "reference"):
        assert word in printed


def test_a_progress_bar_for_those_who_watch(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = llm.generate([TEXT] * 3, GREEDY, use_tqdm=True)
    assert len(outputs) == 3
    assert "generating" in capsys.readouterr().err
    assert not show_progress(None, 3)
    assert show_progress(True, 1)
    assert not show_progress(False, 1000)


def test_priorities_decide_who_goes_first(folder: Path) -> None:
    llm = LLM(folder, kernels="reference", max_model_len=64, max_num_seqs=1)
    outputs = llm.generate([TEXT] * 3, GREEDY, priority=[2, 0, 1])
    ends = [output.metrics.finished for output in outputs]
    assert ends[1] < ends[2] < ends[0]


def test_requests_with_the_most_tokens_to_generate_run_first(folder: Path) -> None:
    """The last steps of a call then have as many sequences as possible. A stream gives tokens in order of arrival."""
    llm = LLM(folder, kernels=ReferenceKernels(), block_size=4, max_model_len=96, max_num_seqs=2)
    counts = [2, 9, 4, 4, 12, 1]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    prompts = [[3 + number, 5, 7] for number in range(len(counts))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == counts
    alone = [llm.generate([prompt], one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == [each.outputs[0].token_ids for each in alone]
    scheduled = [output.metrics.first_scheduled for output in outputs]
    assert sorted(range(len(counts)), key=lambda number: scheduled[number]) == [4, 1, 2, 3, 0, 5]
    first_seen = list(dict.fromkeys(result.request_id for result in llm.stream(prompts, params)))
    assert first_seen == [str(number) for number in range(len(counts))]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_tools_are_refused_as_by_the_server_where_the_template_drops_them(llm: LLM) -> None:
    from bifolio.serve.http.errors import ApiError
    from bifolio.serve.http.exchange import decode
    from bifolio.serve.http.tools import plan_tools
    from bifolio.serve.protocols.openai_types import ChatRequest

    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ChatTemplateError, match="tools: this model's chat template has no place for them") as refusal:
        llm.chat(messages, GREEDY, tools=TOOLS)
    request = decode(json.dumps({"messages": messages, "tools": TOOLS}).encode(), ChatRequest)
    with pytest.raises(ApiError) as answer:
        plan_tools(request, llm.model)
    assert answer.value.message == str(refusal.value)
    assert llm.chat(messages, GREEDY, tools=[])
