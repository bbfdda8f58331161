"""Doors on a GPU: every family as users open it, `LLM(folder, device="cuda")` and the others, in bf16.

The cache is sized by the plan that measures a step (no `num_blocks`, no `memory`), as it is for users; the caches of
these models are small, so that several processes share the GPU. Models are read from a
store (`scripts/door-models`) where there is one: transformers may be too old here for some families. BIFOLIO_DOOR=all
opens every row with every option. Without a GPU (`--device torch`) the same doors run on torch's kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from door_models import HYBRID, ROW_FAMILIES, first_rows, has_gguf
from served import check_served_door, served

from doors import (
    OPTIONS,
    SMALL,
    Door,
    Tolerance,
    check_beams,
    check_grammar,
    check_talk,
    opened_llm,
    recorded,
)

BF16 = Tolerance(largest=0.35, median=0.08, repeated=1.0)
ROUTED = Tolerance(largest=3.5, median=0.25, repeated=6.0)  # a rounded score may choose another expert
EXPERTS = {"afmoe", "deepseek2", "deepseek32", "deepseek4", "dots1", "ernie4_5moe", "exaone_moe", "glm4moe", "glm_dsa",
           "gptoss", "granitemoe", "hunyuan_moe", "hunyuan_v3", "jamba", "lfm2moe", "llama4", "mimo2", "minimax_m2",
           "mixtral", "olmoe", "nemotron_h", "phimoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next"}  # fmt: skip
EXPERT_ROWS = {"gemma4 with experts", "granitehybrid with experts"}
ROWS = sorted(ROW_FAMILIES, key=lambda name: ROW_FAMILIES[name] not in HYBRID)  # hybrids first
FIRST = sorted(first_rows().values(), key=ROWS.index)
KINDS = ("qwen3next", "qwen35", "bamba", "falcon_h1", "lfm3", "llama", "gemma3n", "deepseek2", "gptoss", "qwen3moe")
LONG = ("llama", "qwen35", "bamba", "lfm2")
EVERY = os.environ.get("BIFOLIO_DOOR") == "all"
FEW = {"max_num_seqs": 8, "token_budget": 256, "warm_up": False}  # sizes of doors that do not take the defaults
SERVER_MODULES = ("starlette", "uvicorn", "msgspec", "prometheus_client")
Settings = Callable[..., dict[str, Any]]


def tolerance_of(name: str) -> Tolerance:
    return ROUTED if ROW_FAMILIES[name] in EXPERTS or name in EXPERT_ROWS else BF16


@pytest.fixture
def settings(device: str, gpu_kernels: Callable[..., Any], request: pytest.FixtureRequest) -> Settings:
    """Options of `LLM`: the device alone. Without a GPU, kernels that stand for it, on a small cache."""

    def make(**options: Any) -> dict[str, Any]:
        if device != "cpu":
            return {"device": device, **options}
        kernels = gpu_kernels("bf16", deterministic=options.get("deterministic", False))
        return {"kernels": kernels, **FEW, "block_size": 16, **options}

    return make


@pytest.mark.parametrize("name", ROWS if EVERY else FIRST)
def test_a_folder_with_default_options(name: str, settings: Settings, device: str, release_gpu: None) -> None:
    """A talk, then requests with beams and, where llguidance is installed, a grammar to the same engine."""
    tolerance, door = tolerance_of(name), Door(name, "gpu", "folder", "defaults")
    with opened_llm(door.path, **settings()) as entry:
        assert device == "cpu" or entry.llm.plan.step_bytes > 0  # measured
        with recorded(door):
            check_talk(entry, door.model, tolerance)
        with recorded(Door(name, "gpu", "folder", "beams")):
            check_beams(entry, door.model, tolerance)
        if importlib.util.find_spec("llguidance") is None:
            return
        with recorded(Door(name, "gpu", "folder", "grammar")):
            check_grammar(entry, door.model, tolerance)


@pytest.mark.parametrize("name", [name for name in (ROWS if EVERY else FIRST) if has_gguf(name)])
def test_a_gguf_file(name: str, settings: Settings, release_gpu: None) -> None:
    door = Door(name, "gpu", "gguf", "defaults")
    if not (door.model.gguf is not None and door.model.gguf.exists()):
        pytest.importorskip("gguf", reason="writes GGUF files; or make a store elsewhere")
    with recorded(door), opened_llm(door.path, **settings(**FEW)) as entry:
        check_talk(entry, door.model, tolerance_of(name))


@pytest.mark.parametrize("name", ROWS if EVERY else KINDS)
@pytest.mark.parametrize("option", ["deterministic", "draft", "small memory"])
def test_options(name: str, option: str, settings: Settings, device: str, release_gpu: None) -> None:
    tolerance, door = tolerance_of(name), Door(name, "gpu", "folder", option)
    chosen: dict[str, Any] = {**FEW, **OPTIONS[option].settings}
    if option == "small memory":  # the smallest block of a GPU's kernels is 16 tokens
        chosen |= {**SMALL, "block_size": 16, "num_blocks": 9}
    if option == "deterministic" and device != "cpu":
        tolerance = replace(tolerance, repeated=0.0)  # the warm and the cold run are equal bit for bit
    with recorded(door), opened_llm(door.path, **settings(**chosen)) as entry:
        OPTIONS[option].check(entry, door.model, tolerance)


@pytest.mark.one_process
@pytest.mark.parametrize("name", LONG)
def test_the_default_sizes_of_a_long_model(
    name: str, settings: Settings, device: str, tmp_path: Path, release_gpu: None
) -> None:
    """A model that allows long contexts gets steps and a cache of the usual sizes, as a real one does."""
    folder, door = tmp_path / "long", Door(name, "gpu", "folder", "long contexts")
    shutil.copytree(door.model.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    with recorded(door), opened_llm(folder, **settings()) as entry:
        if device != "cpu":
            assert entry.llm.engine.config.max_model_len == 8192
            assert entry.llm.plan.max_cached_tokens >= 8192
            assert entry.llm.plan.cache_bytes < entry.llm.plan.free_bytes
        check_talk(entry, door.model, tolerance_of(name))


@pytest.mark.parametrize("name", ROWS if EVERY else FIRST)
def test_a_server(name: str, device: str, release_gpu: None) -> None:
    """`bifolio serve --device cuda` with default sizes, and a client."""
    missing = [module for module in SERVER_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"bifolio serve needs {', '.join(missing)}")
    door = Door(name, "gpu", "serve", "defaults")
    if device == "cpu":
        with served(door.path, kernels="torch") as client:
            check_talk(client, door.model, tolerance_of(name))
        return
    check_served_door(door, tolerance_of(name), "--device", device)
