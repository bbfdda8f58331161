"""Engines are made by `engine/build.py` alone, for users, for tests on a GPU and for benchmarks.

An engine that a test or a benchmark makes by hand proves nothing of the engine that users get: its cache, its states
and its memory are planned by other code. `ALLOWED` lists the unit tests and benchmarks of a part below the engine; it
may only become shorter.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from syntax_trees import nodes, source_trees
from test_structure_rules import last_name

ROOT = Path(__file__).resolve().parents[1]
BUILDERS = {"InferenceEngine", "ModelRunner", "KVStorage", "CudaStorage", "StateStorage", "new_storage", "make_engine",
            "make_runner", "kv_storage"}  # fmt: skip  # the last three are those of tests/helpers.py
ALLOWED = {
    ("benchmarks/micro/gpu_tuning.py", "KVStorage"): "times attention kernels over a cache of random numbers",
    ("benchmarks/micro/gpu_choice.py", "KVStorage"): "times attention to chosen positions over random latents",
    ("benchmarks/micro/gpu_scan.py", "new_storage"): "times the scan of one recurrent layer",
    ("tests/gpu/latent_checks.py", "KVStorage"): "checks attention kernels over random latents",
    ("tests/gpu/check_bench.py", "KVStorage"): "checks attention kernels over a cache of random numbers",
    ("tests/gpu/test_gpu_engine.py", "CudaStorage"): "unit test of CudaStorage.move_blocks",
    ("tests/gpu/test_gpu_engine.py", "kv_storage"): "the storage that CudaStorage is compared with",
}


def made_by_hand(tree: ast.Module) -> set[str]:
    """Names of `BUILDERS` that a file calls: `ModelRunner(...)`, `ModelRunner.new(...)`, `kernels.new_storage(...)`."""
    found = set()
    for node in nodes(tree, ast.Call):
        called = node.func
        owner = last_name(called.value) if isinstance(called, ast.Attribute) else ""
        found |= {last_name(called), owner} & BUILDERS
    return found


@pytest.mark.parametrize("folder", ["tests/gpu", "benchmarks"])
def test_tests_on_a_gpu_and_benchmarks_make_no_engine_by_hand(folder: str) -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in (ROOT / folder).rglob("*.py")
        for name in made_by_hand(ast.parse(path.read_text(encoding="utf-8")))
    }
    allowed = {entry for entry in ALLOWED if entry[0].startswith(folder)}
    assert found - allowed == set(), "use LLM(...), build_engine or built_engines.built_engine"
    assert allowed - found == set(), "remove these entries of ALLOWED"


def test_one_module_of_the_package_makes_engines() -> None:
    makers = {path for path, tree in source_trees().items() if "InferenceEngine" in made_by_hand(tree)}
    assert makers == {"engine/build.py"}


def test_the_rule_sees_every_kind_of_call() -> None:
    calls = (
        "InferenceEngine(m)\nModelRunner.new(m)\nkernels.new_storage(l)\nhelpers.make_engine()\nstorage.KVStorage(l)"
    )
    found = made_by_hand(ast.parse(calls))
    assert found == {"InferenceEngine", "ModelRunner", "new_storage", "make_engine", "KVStorage"}
