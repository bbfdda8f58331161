"""Sleep on a GPU: memory is given back, addresses and captured graphs stay, and answers are those of before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bifolio import LLM, SamplingParams
from bifolio.errors import ConfigError
from bifolio.kernels.arena import Arena
from bifolio.kernels.host_pages import HostPages
from helpers import fresh_folder, tiny_folder, tiny_model

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True)
PROMPTS: Any = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (9, 17, 30)]
MakeKernels = Callable[..., Any]


def new_llm(gpu_kernels: MakeKernels, folder: Any, **options: Any) -> LLM:
    kernels = gpu_kernels(deterministic=True)
    kernels.use_arena()
    if kernels.arena is None:  # without a GPU
        kernels.arena = Arena(HostPages())
    sizes = {"block_size": 16, "num_blocks": 40, "max_model_len": 64, "max_num_seqs": 4}
    return LLM(str(folder), kernels=kernels, **{**sizes, **options})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def addresses(llm: LLM) -> list[int]:
    storage, weights = llm.engine.runner.storage, llm.engine.runner.weights
    arrays = [*storage.keys, *storage.values, weights.final_norm.weight]
    return [array.data_ptr() for array in arrays]


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[], None]:
    """From the call on, capturing a graph is an error."""

    def forbid() -> None:
        if request.config.getoption("--device") == "torch":
            return
        from bifolio.kernels.triton.graphs.graph_cache import GraphCache

        def refuse(*arguments: Any) -> None:
            raise AssertionError("a graph is captured again")

        monkeypatch.setattr(GraphCache, "record", refuse)

    return forbid


@pytest.mark.parametrize("name", ["dense", "qwen3moe", "lfm2"])
@pytest.mark.parametrize("level", [1, 2])
def test_answers_after_sleep_without_another_capture(
    gpu_kernels: MakeKernels, no_capture: Callable[[], None], name: str, level: int
) -> None:
    folder = tiny_folder(fresh_folder("sleep")) if name == "dense" else tiny_model(name, vocab_size=61)[1]
    llm = new_llm(gpu_kernels, folder)
    expected, places = tokens(llm), addresses(llm)
    assert tokens(llm) == expected
    no_capture()
    for _ in range(2):
        llm.sleep(level)
        assert llm.is_sleeping()
        llm.wake_up()
        assert addresses(llm) == places
        assert tokens(llm) == expected
    llm.engine.blocks.check_invariants()
    llm.close()


@pytest.mark.usefixtures("own_kernels")
def test_memory_of_the_device_is_free_while_an_engine_sleeps(
    gpu_kernels: MakeKernels, device: str, release_gpu: None
) -> None:
    import torch

    if device == "cpu":
        pytest.skip("needs a device with memory of its own")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8}
    llm = new_llm(gpu_kernels, tiny_folder(fresh_folder("sleep"), **sizes), num_blocks=4000)
    expected, arena = tokens(llm), llm.engine.runner.kernels.arena
    assert arena is not None
    held = arena.num_bytes("weights"), arena.num_bytes("kv_cache")
    assert min(held) > 50 << 20
    awake = torch.cuda.mem_get_info()[0]
    llm.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    assert asleep - awake >= sum(held)
    llm.wake_up(tags=["weights"])
    assert asleep - torch.cuda.mem_get_info()[0] >= held[0]
    llm.wake_up()
    assert tokens(llm) == expected
    llm.close()


def test_new_weights_are_read_by_the_captured_steps(gpu_kernels: MakeKernels, no_capture: Callable[[], None]) -> None:
    old, new = tiny_folder(fresh_folder("sleep")), tiny_folder(fresh_folder("sleep"), seed=1)
    expected = tokens(new_llm(gpu_kernels, new))
    llm = new_llm(gpu_kernels, old)
    first = tokens(llm)
    assert first != expected
    no_capture()
    assert llm.load_weights(new) == 1
    assert tokens(llm) == expected
    llm.sleep()
    llm.wake_up()
    assert tokens(llm) == expected
    llm.sleep(level=2)
    llm.load_weights(old)
    assert llm.is_sleeping()
    llm.wake_up()
    assert tokens(llm) == first
    llm.close()


def test_two_engines_take_turns(gpu_kernels: MakeKernels, no_capture: Callable[[], None]) -> None:
    folders = [tiny_folder(fresh_folder("sleep"), seed=seed) for seed in (0, 1)]
    engines: list[tuple[LLM, list[list[int]]]] = []
    for folder in folders:
        llm = new_llm(gpu_kernels, folder)
        engines.append((llm, tokens(llm)))
        llm.sleep()
    no_capture()
    for turn in range(6):
        llm, expected = engines[turn % 2]
        llm.wake_up()
        assert tokens(llm) == expected
        llm.sleep()


@pytest.mark.usefixtures("own_kernels")
def test_an_engine_without_the_mode_says_so(device: str) -> None:
    if device == "cpu":
        pytest.skip("the CPU sleeps without it")
    llm = LLM(str(tiny_folder(fresh_folder("sleep"))), device=device, block_size=16, num_blocks=40, max_model_len=64)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        llm.sleep()
    llm.close()
