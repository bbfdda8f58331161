"""`--shard` of tests/gpu: every test runs in exactly one shard, and the large ones run one after the other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LARGE = {3, 4, 9}  # of twelve tests


@pytest.fixture
def conftest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_conftest", Path(__file__).parent / "gpu" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Item:
    def __init__(self, number: int) -> None:
        self.number = number

    def get_closest_marker(self, name: str) -> bool:
        return name == "one_process" and self.number in LARGE


def kept(conftest: ModuleType, shard: str) -> list[int]:
    """Numbers of the tests that a shard keeps; those that it reports as deselected are the others."""
    items, deselected = [Item(number) for number in range(12)], []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name, default: shard, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    numbers = [item.number for item in items]
    assert sorted(numbers + [item.number for item in deselected]) == list(range(12))
    return numbers


@pytest.mark.parametrize("count", [2, 3, 5, 20])
def test_shards_are_a_partition(conftest: ModuleType, count: int) -> None:
    first, *others = (kept(conftest, f"{index}/{count}") for index in range(1, count + 1))
    assert set(first) == LARGE
    assert sorted(first + [number for shard in others for number in shard]) == list(range(12))
    sizes = [len(shard) for shard in others]
    assert max(sizes) - min(sizes) <= 1


def test_one_shard_is_everything(conftest: ModuleType) -> None:
    assert kept(conftest, "1/1") == list(range(12))


@pytest.mark.parametrize("shard", ["0/2", "3/2", "x", "1", "1/", "-1/2"])
def test_a_shard_that_does_not_exist_is_an_error(conftest: ModuleType, shard: str) -> None:
    with pytest.raises(pytest.UsageError, match="pass a part and the number of parts, such as 1/4"):
        kept(conftest, shard)
