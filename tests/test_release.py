"""A release: its version, bill of materials, digests, and sources without unguarded Linux-only code."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


files = script("release_files")
portable = script("check_portable")


@pytest.mark.parametrize("name", ["release", "wheel-doors"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    path = ROOT / "scripts" / name
    assert path.stat().st_mode & 0o111
    subprocess.run(["sh", "-n", str(path)], check=True)


def test_the_version_is_the_same_everywhere() -> None:
    from bifolio import __version__

    assert files.version() == __version__


@pytest.mark.parametrize(
    ("heading", "message"), [("## 9.9.9 (2026-01-01)", "begin with"), ("## {} (not released)", "needs a date")]
)
def test_a_version_without_a_dated_heading_is_refused(
    heading: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bifolio import __version__

    (tmp_path / "src" / "bifolio").mkdir(parents=True)
    for name in ("pyproject.toml", "src/bifolio/__init__.py"):
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading.format(__version__)}\n", encoding="utf-8")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(files.ReleaseError, match=message):
        files.version()


def test_the_bill_of_materials_lists_packages_and_their_needs() -> None:
    def package(name: str, *requires: str) -> dict[str, object]:
        return {"name": name, "version": "1.0", "licence": "MIT", "summary": "", "requires": list(requires)}

    bill = files.bill_of_materials([package("bifolio", "Numpy", "absent"), package("numpy"), package("pip")])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/bifolio@1.0"
    assert [component["name"] for component in bill["components"]] == ["numpy"]
    assert bill["dependencies"][0] == {"ref": "pkg:pypi/bifolio@1.0", "dependsOn": ["pkg:pypi/numpy@1.0"]}


@pytest.mark.full
def test_packages_are_those_of_the_environment() -> None:
    names = {files.normalised(package["name"]) for package in files.packages_of(sys.executable)}
    assert {"numpy", "tokenizers"} <= names


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "SHA256SUMS").write_text("old")
    assert files.sums(tmp_path) == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"


def test_linux_only_code_is_found_unless_a_condition_encloses_it() -> None:
    assert list(portable.places("#include <linux/futex.h>\n")) == [(1, "#include <linux/futex.h>")]
    assert not list(portable.places("#if defined(__linux__)\n#include <sched.h>\n#endif\n"))
    assert list(portable.places("#if defined(__linux__)\n#else\ncpu_set_t set;\n#endif\n")) == [(3, "cpu_set_t set;")]
    assert not list(portable.places("#ifdef MADV_HUGEPAGE\nmadvise(p, n, MADV_HUGEPAGE);\n#endif\n"))
    assert not list(portable.places("// sched_setaffinity is not there\n"))


def test_the_native_sources_compile_elsewhere_than_on_linux() -> None:
    assert portable.main() == 0
