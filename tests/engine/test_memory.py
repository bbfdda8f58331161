"""The memory plan: exact bytes before anything is allocated, and numbers that would work when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.config import ModelConfig, RopeConfig
from bifolio.engine import memory
from bifolio.engine.host_memory import GroupMemory, free_memory, limited_groups
from bifolio.engine.memory import parse_bytes, plan_memory, show_bytes, weight_bytes
from bifolio.errors import ConfigError
from helpers import kv_storage, tiny_folder, tiny_loaded

CONFIG = ModelConfig("llama", 1000, 64, 4, 8, 2, 16, 128, 4096, ropes=(RopeConfig(rotary_dim=16),))
PER_TOKEN = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes


def test_a_plan_is_what_the_storage_takes() -> None:
    plan = plan_memory(CONFIG, 0, num_blocks=300, max_model_len=4096)
    storage = kv_storage(4, 300, 16, 2, 16)
    assert plan.cache_bytes == storage.num_bytes == sum(array.nbytes for array in (*storage.keys, *storage.values))
    assert (plan.bytes_per_token, plan.max_cached_tokens) == (PER_TOKEN, 299 * 16)


@pytest.mark.parametrize(("dtype", "share"), [("f32", 1), ("f16", 2), ("bf16", 2)])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_a_budget_is_filled_and_not_exceeded(dtype: str, share: int, block_size: int) -> None:
    budget = 20_000_000
    plan = plan_memory(CONFIG, 0, memory=budget, max_model_len=4096, block_size=block_size, kv_dtype=dtype)  # type: ignore[arg-type]
    assert plan.bytes_per_token == PER_TOKEN // share
    assert budget - plan.bytes_per_block < plan.cache_bytes <= budget


def test_the_default_takes_a_safe_share_of_what_is_free() -> None:
    plan = plan_memory(CONFIG, 10_000_000, max_model_len=4096, max_num_seqs=64, free_bytes=30_000_000)
    assert plan.cache_bytes <= (30_000_000 - 10_000_000) * memory.SAFE_SHARE
    assert plan.cache_bytes > 0.9 * (30_000_000 - 10_000_000) * memory.SAFE_SHARE
    roomy = plan_memory(CONFIG, 0, max_model_len=4096, max_num_seqs=2, free_bytes=1 << 40)
    assert roomy.max_cached_tokens <= 2 * 2 * 4096 + 16  # more than the sequences could ever use helps nobody
    huge = plan_memory(CONFIG, 0, max_model_len=4096, max_num_seqs=10_000, free_bytes=1 << 40)
    assert huge.cache_bytes <= memory.MAX_DEFAULT_BYTES


@pytest.mark.parametrize("options", [{"num_blocks": 5}, {"memory": 100_000}, {"memory": 0}, {"free_bytes": 200_000}])
def test_a_refusal_says_numbers_that_work(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"needs 257: pass .*at least .*B of memory") as caught:
        plan_memory(CONFIG, 0, max_model_len=4096, **options)
    words = str(caught.value).replace(",", "").split()
    assert ("max_model_len" in words) == (options.get("memory") != 0)  # no advice where no token fits
    if "max_model_len" in words:
        fits = int(words[words.index("<=") + 1])
        assert fits >= 1
        assert plan_memory(CONFIG, 0, max_model_len=fits, **options).max_cached_tokens >= fits
    amount = "".join(words[words.index("least") + 1 : words.index("least") + 3])
    enough = int(parse_bytes(amount) * 1.01)  # it is shown with three digits
    assert plan_memory(CONFIG, 0, max_model_len=4096, memory=enough).num_blocks >= 257


def test_weights_are_counted_once_where_they_are_tied(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    assert weight_bytes(loaded.weights) == 4 * (loaded.config.num_parameters - 5 * 32)  # all matrices, no norms
    from bifolio.model.huggingface.hf_loader import load_folder

    tied = load_folder(tiny_folder(tmp_path / "m", tie_word_embeddings=True))
    assert weight_bytes(loaded.weights) - weight_bytes(tied.weights) == 61 * 32 * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("500M", 5 * 10**8), ("512MiB", 2**29), (" 7 kb ", 7000), ("42", 42),
     (42, 42), ("1TB", 10**12)],
)  # fmt: skip
def test_amounts_of_memory(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2XB", "1e9", "2GB please", "nan"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example 2GB"):
        parse_bytes(text)


def test_amounts_are_shown_for_people() -> None:
    assert [show_bytes(n) for n in (0, 999, 1000, 123_456, 5_000_000, 2_500_000_000, 3 * 10**12)] == [
        "0 B", "999 B", "1 kB", "123 kB", "5 MB", "2.5 GB", "3 TB",
    ]  # fmt: skip


def test_free_memory_is_positive_and_below_the_machines() -> None:
    import psutil

    assert 0 < free_memory() <= psutil.virtual_memory().total


def write_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_limits_of_all_groups_above_a_process_count_and_pages_of_files_are_free(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/system.slice/bifolio.service\n")
    stat = "anon 200\nactive_file 300\ninactive_file 400\n"
    write_group(groups / "system.slice" / "bifolio.service",
                {"memory.max": "max\n", "memory.current": "900\n", "memory.stat": stat})  # fmt: skip
    write_group(groups / "system.slice", {"memory.max": "2000\n", "memory.current": "1000\n", "memory.stat": stat})
    assert list(limited_groups(groups, own)) == [GroupMemory(2000, 2000 - (1000 - 700))]
    write_group(groups / "system.slice" / "bifolio.service", {"memory.max": "950\n"})
    assert next(limited_groups(groups, own)) == GroupMemory(950, 950 - (900 - 700))


def test_limits_of_groups_of_the_first_version(tmp_path: Path) -> None:
    """A container sees its own group as the topmost, under a name that leads nowhere."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n")
    write_group(groups / "memory", {
        "memory.limit_in_bytes": "5000\n", "memory.usage_in_bytes": "4000\n",
        "memory.stat": "active_file 1\ntotal_active_file 1500\ntotal_inactive_file 2000\n",
    })  # fmt: skip
    assert list(limited_groups(groups, own)) == [GroupMemory(5000, 4500)]


def test_weights_that_do_not_fit_are_refused_with_formats_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default beside other processes; with an amount of memory by hand, of the whole machine."""
    parameters = CONFIG.num_parameters
    sizes = {"weight_bytes": 4 * parameters, "max_model_len": 16, "total_bytes": 8 * parameters}
    with pytest.raises(ConfigError, match=r"quantize` the model to q8_0 \(.*\) or q6_k \(.*\), or end other processes"):
        plan_memory(CONFIG, free_bytes=2 * parameters, **sizes)
    with pytest.raises(ConfigError, match=r"the model to q4_0 \("):
        plan_memory(CONFIG, free_bytes=int(0.6 * parameters), **sizes)
    with pytest.raises(ConfigError, match="use a smaller model, or end"):
        plan_memory(CONFIG, free_bytes=parameters // 2, **sizes)
    assert plan_memory(CONFIG, free_bytes=2 * parameters, num_blocks=3, **sizes).num_blocks == 3
    with pytest.raises(ConfigError, match=r"beside weights of .*: ask for less memory"):
        plan_memory(CONFIG, memory=5 * parameters, **sizes)
    with pytest.raises(ConfigError, match=r"machine are free: .*q8_0 \([^)]*\) or q6_k \([^)]*\)$"):
        plan_memory(CONFIG, memory=1 << 20, **{**sizes, "total_bytes": 3 * parameters})


def test_an_engine_for_weights_that_do_not_fit_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bifolio import LLM
    from bifolio.engine import build

    folder = tiny_folder(tmp_path / "m")
    monkeypatch.setattr(build, "free_memory", lambda: 1000)
    monkeypatch.setattr(build, "total_memory", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"in memory, and 1 kB of the 1 GB of this machine are free"):
        LLM(folder)
