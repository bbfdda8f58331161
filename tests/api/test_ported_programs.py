"""Code for vLLM runs with the import changed; options that bifolio does not have are named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import re
import sys
import warnings
from pathlib import Path

import pytest

import bifolio
from bifolio import LLM, AsyncLLM, SamplingParams
from bifolio.api.vllm_options import IGNORED
from bifolio.errors import ConfigError, EngineDeadError, RequestError
from helpers import tiny_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "first_hour"))
from vllm_programs import PROGRAMS, ported

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_folder(tokenizer=True, chat_template=CHAT)


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_vllm_runs_with_the_import_changed(name: str, folder: Path) -> None:
    if name == "structured_outputs":
        pytest.importorskip("llguidance")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # typical programs cause no warning
        exec(compile(ported(PROGRAMS[name], str(folder)), name, "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip()


def test_there_are_ten_programs() -> None:
    assert len(PROGRAMS) >= 10


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "half", "float32", "float"])
def test_names_of_weight_types_leave_the_cache_alone(folder: Path, dtype: str) -> None:
    usual = LLM(folder, max_model_len=32).engine.config.cache.dtype
    assert LLM(folder, dtype=dtype, max_model_len=32).engine.config.cache.dtype == usual


def test_the_weight_type_reaches_the_kernels_and_the_cache_type_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bifolio.api import engine_options as module

    seen: list[str | None] = []
    original = module.select_kernels

    def select(device: str, **options: object) -> object:
        seen.append(options["dtype"])  # type: ignore[arg-type]
        return original(device, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "select_kernels", select)
    llm = LLM(folder, dtype="half", kv_cache_dtype="bfloat16", max_model_len=32)
    assert (seen, llm.engine.config.cache.dtype) == (["f16"], "bf16")
    with pytest.warns(DeprecationWarning, match="write kv_cache_dtype='f16'"):
        old = LLM(folder, dtype="f16", max_model_len=32)
    assert old.engine.config.cache.dtype == "f16"
    with pytest.raises(ConfigError, match="q8_0 is the type with 8 bits"):
        LLM(folder, kv_cache_dtype="fp8_e5m2", max_model_len=32)


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_options_without_effect_are_warned_about_by_name(folder: Path, name: str) -> None:
    with pytest.warns(UserWarning, match=f"^{name}="):
        LLM(folder, max_model_len=32, **{name: "x"})  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(folder, max_model_len=32, **{name: None})  # type: ignore[arg-type]


def test_other_options_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is not supported"):
        LLM(folder, pipeline_parallel_size=2)
    with pytest.raises(TypeError, match="no option 'tensor_paralel_size'"):
        LLM(folder, tensor_paralel_size=1)
    assert LLM(folder, max_num_batched_tokens=48, max_model_len=32).engine.config.token_budget == 48


def test_wrong_prompts_and_parameters_are_named(folder: Path) -> None:
    llm = LLM(folder, max_model_len=32)
    for prompts in (None, 5):
        with pytest.raises(RequestError, match="prompts are text, token ids or a list"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"pass SamplingParams\(\*\*options\)"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="BeamSearchParams are for beam_search"):
        llm.generate("a", bifolio.BeamSearchParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams(), None])  # type: ignore[list-item]


def test_a_closed_llm_says_so(folder: Path) -> None:
    with LLM(folder, max_model_len=32) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(EngineDeadError, match="was closed"):
        llm.generate("a")
    llm.close()


def test_a_request_id_is_kept_and_can_be_aborted(folder: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(folder, max_model_len=200) as llm:
            (output,) = await llm.generate("a", SamplingParams(max_tokens=1), "mine")
            assert output.request_id == "mine"
            long = SamplingParams(max_tokens=None, ignore_eos=True)
            finish = ""
            async for growing in llm.generate("a", long, request_id="long"):
                finish = growing.outputs[0].finish_reason or ""
                await llm.abort("long")
            assert finish == "abort"
            assert llm.get_tokenizer().encode("a")

    asyncio.run(run())


def test_public_names_are_listed() -> None:
    for name in ("AsyncLLM", "Grammar", "LLM", "StructuredOutputsParams", "TokensPrompt"):
        assert name in dir(bifolio)
        assert getattr(bifolio, name) is not None
    assert set(bifolio.__all__) <= set(dir(bifolio))
    assert {name for name in dir(bifolio) if not name.startswith("__")} == set(bifolio.__all__) - {"__version__"}


def test_every_field_of_the_parameters_is_documented() -> None:
    source = Path(bifolio.sampling_params.__file__).read_text()  # type: ignore[attr-defined]
    body = source.split("class SamplingParams:")[1].split("def __post_init__")[0]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text()
    for item in dataclasses.fields(SamplingParams):
        assert re.search(rf"^    {item.name}: .*  # \S", body, re.MULTILINE), f"{item.name} has no comment"
        assert f"`{item.name}`" in page, f"{item.name} is not in docs/reference/python.md"
