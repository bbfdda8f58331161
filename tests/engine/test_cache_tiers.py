"""Tiers below the cache: blocks that leave it, or that an earlier process computed, come back bit for bit."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bifolio import LLM, SamplingParams
from bifolio.config import SpeculativeConfig, TierSettings
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.tiers import content, files
from bifolio.engine.tiers.files import FileTier
from bifolio.engine.tiers.tier import Key, MemoryTier
from bifolio.errors import ConfigError
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.loaded import LoadedModel
from draft_heads import eagle_folder
from helpers import (
    cpu_kernel_names,
    drain,
    make_engine,
    make_kernels,
    random_prompt,
    scratch,
    tiny_folder,
    tiny_loaded,
    tiny_model,
)  # fmt: skip
from hybrid_models import VOCABULARY, tiny_hybrid

BLOCK = 4
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "chunk_size": 8, "max_model_len": 128, "num_blocks": 64}


@cache
def model_of(kind: str) -> LoadedModel:
    if kind == "experts":
        return load_folder(tiny_model("qwen3moe", vocab_size=VOCABULARY)[1])
    return tiny_loaded() if kind == "plain" else tiny_hybrid(kind)


def engine_on(folder: Path | None, kind: str = "plain", **options: Any) -> InferenceEngine:
    tiers = TierSettings(folder=folder) if folder is not None else None
    hybrid = {"checkpoint_tokens": 16} if model_of(kind).config.recurrent is not None else {}
    kernels = make_kernels(cpu_kernel_names()[0])  # whose bits do not depend on the sizes of a pass
    return make_engine(model_of(kind), kernels=kernels, **{**OPTIONS, "tiers": tiers, **hybrid, **options})


def run(
    engine: InferenceEngine, prompt: list[int], salt: bytes = b"", params: SamplingParams = PARAMS
) -> tuple[Any, int]:
    """Tokens with their logprobs, and the cached tokens of the prompt."""
    name = f"request-{engine.stats().num_prompt_tokens}-{len(prompt)}"
    request = engine.add_request(name, prompt, params, salt=salt)
    drain(engine, 100_000)
    assert request.error is None
    sequence = request.sequences[0]
    found = list(sequence.output_token_ids), [(one.logprob, tuple(one.top)) for one in sequence.logprobs]
    return found, request.metrics.num_cached_tokens


@cache
def expected(length: int, kind: str = "plain") -> Any:
    return run(engine_on(None, kind), prompt_of(length))[0]


def prompt_of(length: int) -> list[int]:
    return random_prompt(length, seed=length, vocab_size=VOCABULARY)


def end(engine: InferenceEngine) -> None:
    engine.close()
    assert engine.blocks.num_used_blocks == 0
    assert engine.blocks.state_stats().num_held_states == 0
    engine.blocks.check_invariants()


def tier_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "conv", "delta", "lightning", "mamba", "experts"])
@pytest.mark.parametrize("length", [4, 5, 63, 100])
def test_an_engine_finds_the_prefixes_of_an_earlier_one(tmp_path: Path, length: int, kind: str) -> None:
    first = engine_on(tmp_path, kind)
    assert run(first, prompt_of(length)) == (expected(length, kind), 0)
    end(first)
    second = engine_on(tmp_path, kind)
    found, num_cached = run(second, prompt_of(length))
    assert found == expected(length, kind)
    assert num_cached == (length - 1) // BLOCK * BLOCK
    assert second.stats().tiers.num_tier_hits == num_cached
    end(second)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_a_conversation_larger_than_the_cache_of_others_comes_back(tmp_path: Path, kind: str) -> None:
    """Prompts of three times the cache, in turns: from the second round on all are read from the tier."""
    engine = engine_on(tmp_path, kind, num_blocks=40, num_states=20 if kind != "plain" else 0)
    lengths = [97, 98, 99, 101, 102, 103]
    for turn in range(2):
        for length in lengths:
            found, num_cached = run(engine, prompt_of(length))
            assert found == expected(length, kind)
            if turn:
                assert num_cached >= (length - 1) // BLOCK * BLOCK - BLOCK
    end(engine)


@pytest.mark.full
def test_blocks_whose_state_finds_no_room_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All recurrent states are held while the blocks of a hybrid arrive; no pass starts behind a missing state."""
    first = engine_on(tmp_path, "delta")
    run(first, prompt_of(50))
    end(first)
    second = engine_on(tmp_path, "delta")
    assert second.tiers is not None
    assert second.blocks._states is not None
    states, land = second.blocks._states.pool, second.tiers.land

    def land_without_states(*arguments: Any, **options: Any) -> None:
        held = [states.take() for _ in range(states.num_available)]
        land(*arguments, **options)
        for state in held:
            states.drop(state)

    monkeypatch.setattr(second.tiers, "land", land_without_states)
    assert run(second, prompt_of(50)) == (expected(50, "delta"), 0)
    assert second.stats().tiers.num_tier_hits == 0
    assert not caplog.records
    monkeypatch.undo()
    end(second)


@pytest.mark.full
def test_memory_alone_is_a_tier() -> None:
    engine = engine_on(None, num_blocks=34, tiers=TierSettings(memory_bytes=8 << 20))
    for turn in range(2):
        for length in (97, 98, 99):
            found, num_cached = run(engine, prompt_of(length))
            assert found == expected(length)
            assert (num_cached > 0) == (turn > 0)
    end(engine)


@pytest.mark.full
def test_a_second_turn_is_found_by_the_next_process(tmp_path: Path) -> None:
    """The answer of the first turn is part of the prefix of the second, hybrids included."""
    for kind in ("plain", "delta"):
        first = engine_on(tmp_path, kind)
        (tokens, _), _ = run(first, prompt_of(40))
        longer = [*prompt_of(40), *tokens, *prompt_of(9)]
        end(first)
        second = engine_on(tmp_path, kind)
        found, num_cached = run(second, longer)
        assert num_cached >= 40
        assert found == run(engine_on(None, kind), longer)[0]
        end(second)


@pytest.mark.full
def test_blocks_of_one_salt_are_not_served_to_another(tmp_path: Path) -> None:
    first = engine_on(tmp_path)
    run(first, prompt_of(50), b"tenant a")
    end(first)
    second = engine_on(tmp_path)
    assert run(second, prompt_of(50), b"tenant b") == (expected(50), 0)
    assert run(second, prompt_of(50), b"tenant a") == (expected(50), 48)
    end(second)


@pytest.mark.full
def test_another_model_or_arithmetic_is_another_namespace(tmp_path: Path) -> None:
    first = engine_on(tmp_path)
    run(first, prompt_of(50))
    end(first)
    for options in ({"cache_dtype": "f16"}, {"block_size": 8}):
        other = engine_on(tmp_path, **options)
        assert run(other, prompt_of(50))[1] == 0
        end(other)
    kernels = make_kernels(cpu_kernel_names()[0])
    other = make_engine(
        tiny_loaded(num_hidden_layers=3), kernels=kernels, **OPTIONS, tiers=TierSettings(folder=tmp_path)
    )
    assert run(other, prompt_of(50))[1] == 0
    end(other)


@pytest.mark.full
def test_parallel_samples_beams_and_drafts_start_from_the_tier(tmp_path: Path) -> None:
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"n": 3}, {}),
        ({}, {"speculative": SpeculativeConfig("ngram", length=3, adaptive=False)}),
        ({"prompt_logprobs": 0}, {}),
    ]
    for number, (extra, options) in enumerate(variants):
        params = SamplingParams(max_tokens=9, temperature=0.9, seed=4, ignore_eos=True, **extra)
        prompt = [*prompt_of(60), *prompt_of(30)[:20]]
        plain = run_all(engine_on(None, **options), prompt, params)
        for _ in range(2):
            engine = engine_on(tmp_path / str(number), **options)
            assert run_all(engine, prompt, params) == plain
            end(engine)


def run_all(engine: InferenceEngine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    request = engine.add_request("all", prompt, params)
    drain(engine, 100_000)
    return [list(sequence.output_token_ids) for sequence in request.sequences]


@pytest.mark.full
def test_entries_of_a_draft_head_come_back_with_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "HEAD_SECONDS", 600.0)  # blocks are copied when all is written at the end
    target, head = tiny_folder(), str(eagle_folder())
    speculative = SpeculativeConfig("eagle", length=3, draft_model=head, adaptive=False)
    options: dict[str, Any] = {"speculative": speculative, "num_blocks": 64, "block_size": BLOCK, "max_model_len": 128,
                               "kernels": "reference", "kv_offload_dir": tmp_path}  # fmt: skip
    prompt: list[int] = prompt_of(60)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    found, filled = [], []
    for _ in range(2):
        with LLM(target, **options) as llm:
            found.append(llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids)
            blocks = next(one for one in llm.engine.storages if hasattr(one, "filled"))
            filled.append(int(blocks.filled.sum()))
            assert llm.engine.tiers is not None
            hits = llm.engine.tiers.stats().num_tier_hits
    with LLM(target, num_blocks=64, block_size=BLOCK, max_model_len=128, kernels="reference") as llm:
        assert [llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids] * 2 == found
    assert hits == 56
    assert filled[1] >= 40


# -- damaged and foreign files ----------------------------------------------------------------------------------------


@cache
def written() -> dict[str, bytes]:
    """The files of one prompt, by name."""
    folder = scratch() / "written"
    engine = engine_on(folder)
    run(engine, prompt_of(50))
    end(engine)
    return {str(path.relative_to(folder)): path.read_bytes() for path in tier_files(folder)}


DAMAGES: list[Callable[[bytes, int], bytes]] = [
    lambda data, at: data[: at % len(data)],
    lambda data, at: data[: at % len(data)] + bytes([data[at % len(data)] ^ 0x40]) + data[at % len(data) + 1 :],
    lambda data, at: data + b"x" * (at % 9 + 1),
    lambda data, at: b"",
    lambda data, at: bytes(len(data)),
    lambda data, at: data[:8] + (2**63 + at).to_bytes(8, "little") + data[16:],
    lambda data, at: data[at % len(data) :] + data[: at % len(data)] if at % len(data) else data[::-1],
]


@pytest.mark.full
@settings(
    max_examples=25, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)
@given(
    damages=st.dictionaries(
        st.integers(0, 11), st.tuples(st.sampled_from(DAMAGES), st.integers(0, 10_000)), min_size=1, max_size=4
    )
)
def test_a_damaged_file_is_a_miss(damages: dict[int, Any]) -> None:
    folder = scratch() / f"damaged-{random.getrandbits(60)}"
    names = sorted(written())
    for place, name in enumerate(names):
        data = written()[name]
        if place in damages:
            data = damages[place][0](data, damages[place][1])
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    engine = engine_on(folder)
    found, num_cached = run(engine, prompt_of(50))
    assert found == expected(50)
    assert num_cached <= 48
    end(engine)
    for _ in range(len(damages) + 1):  # each run finds one damaged file, and writes it again
        again = engine_on(folder)
        found, num_cached = run(again, prompt_of(50))
        assert found == expected(50)
        end(again)
    assert num_cached == 48


@pytest.mark.full
def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    engine = engine_on(tmp_path)
    run(engine, prompt_of(50))
    end(engine)
    blocks = tier_files(tmp_path)
    contents = [path.read_bytes() for path in blocks]
    for path, data in zip(blocks, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)
    other = engine_on(tmp_path)
    assert run(other, prompt_of(50)) == (expected(50), 0)
    end(other)


@pytest.mark.full
def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    engine = engine_on(folder, "delta")
    run(engine, prompt_of(50))
    end(engine)
    assert tier_files(folder)
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.full
def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    engine = engine_on(tmp_path / "tier")
    run(engine, prompt_of(20))
    end(engine)
    for number, path in enumerate(tier_files(tmp_path / "tier")):
        target = path.rename(tmp_path / f"moved-{number}")
        path.symlink_to(target)
    other = engine_on(tmp_path / "tier")
    assert run(other, prompt_of(20)) == (expected(20), 0)
    end(other)


# -- disks ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_full_disk_stops_the_tier_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3000]

    def write(file: int, data: Any) -> int:
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return os.write(file, data)

    monkeypatch.setattr(files, "_write_all", write)
    engine = engine_on(tmp_path)
    assert run(engine, prompt_of(63))[0] == expected(63)
    assert engine.tiers is not None
    assert engine.tiers.copies.flush(10)
    tier = engine.tiers.tiers[0]
    assert isinstance(tier, FileTier)
    assert tier.is_paused
    assert tier.num_failed_writes == 1
    assert not list(tmp_path.rglob("*.part"))
    end(engine)
    monkeypatch.undo()
    other = engine_on(tmp_path)
    found, num_cached = run(other, prompt_of(63))
    assert found == expected(63)
    assert 0 < num_cached < 60
    end(other)


@pytest.mark.full
def test_the_files_stay_within_their_budget(tmp_path: Path) -> None:
    for turn in range(2):
        engine = engine_on(None, tiers=TierSettings(folder=tmp_path, disk_bytes=30_000))
        for length in (97, 98, 99, 100):
            assert run(engine, prompt_of(length))[0] == expected(length)
        assert engine.tiers is not None
        assert engine.tiers.copies.flush(10)
        assert sum(path.stat().st_size for path in tier_files(tmp_path)) == engine.stats().tiers.num_tier_bytes
        assert 20_000 < engine.stats().tiers.num_tier_bytes <= 30_000, turn
        end(engine)


def test_the_least_recently_used_content_makes_room(tmp_path: Path) -> None:
    keys = [Key(bytes([number]) * 16) for number in range(4)]
    data = np.arange(100, dtype=np.uint8)
    size = 100 + files.HEADER.size
    for tier in (MemoryTier(300), FileTier(tmp_path, b"n" * 16, 3 * size)):
        for key in keys[:3]:
            tier.put(key, b"r" * 16, data)
        assert tier.get(keys[0], b"r" * 16) is not None
        tier.put(keys[3], b"r" * 16, data)
        assert [key in tier for key in keys] == [True, False, True, True]
        assert tier.get(keys[2], b"s" * 16) is None  # of another root
        tier.put(Key(b"x" * 16), b"r" * 16, np.zeros(1000, np.uint8))  # larger than the tier
        assert Key(b"x" * 16) not in tier


def test_old_unfinished_files_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / (b"n" * 16).hex() / "aa"
    folder.mkdir(parents=True)
    of_a_dead_process = subprocess.Popen([sys.executable, "-c", ""])
    of_a_dead_process.wait()
    names = [f"{'aa' * 16}.block.{pid}-1.part" for pid in (of_a_dead_process.pid, os.getppid())]
    for name in [*names, "notes.txt"]:
        (folder / name).write_text("x")
    FileTier(tmp_path, b"n" * 16, 1000)
    assert sorted(path.name for path in folder.iterdir()) == sorted([names[1], "notes.txt"])


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_tiers_are_refused_where_they_cannot_work(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.write_text("")
    for options, sentence in (
        ({"kv_offload_disk": "1GB"}, "limits the files in kv_offload_dir: pass both"),
        ({"kv_offload": "1GB", "enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"kv_offload": "1GB", "tensor_parallel_size": 2}, "tensor_parallel_size 1"),
        ({"kv_offload": "much"}, "is not an amount of memory"),
        ({"kv_offload_dir": place}, "a file' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(tiny_folder(), kernels="reference", num_blocks=64, max_model_len=64, **options).close()


# -- processes that are killed ----------------------------------------------------------------------------------------

CHILD = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_cache_tiers import engine_on, prompt_of, run
engine = engine_on(Path({folder!r}), {kind!r})
print("ready", flush=True)
for length in range(20, 100):
    run(engine, prompt_of(length))
    print(length, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_a_killed_process_leaves_a_valid_tier(tmp_path: Path, kind: str) -> None:
    """kill -9 at random moments: later processes find what was whole, and compute the same bits."""
    here = Path(__file__).parent
    code = CHILD.format(paths=[str(here), str(here.parent)], folder=str(tmp_path), kind=kind)
    generator, num_cached = random.Random(1), 0
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.stdout.readline()
        time.sleep(generator.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        engine = engine_on(tmp_path, kind)
        for length in (20, 21, 40, 70):
            found, count = run(engine, prompt_of(length))
            assert found == expected(length, kind)
            num_cached += count
        end(engine)  # its own files are whole from here on
        assert not list(tmp_path.rglob("*.part"))
    assert num_cached > 0
