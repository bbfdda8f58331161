"""Views of mapped files, and their pages in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from bifolio.model.file_access import map_file
from bifolio.quant.mapped import mapping_of, release_pages


def resident_bytes() -> int:
    """Bytes of mapped files that this process has in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def test_only_read_only_views_of_a_file_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1 << 16))
    data = map_file(tmp_path / "x")
    assert mapping_of(data) is mapping_of(data[100:200].reshape(10, 10)) is not None
    assert mapping_of(data[::2]) is None
    assert mapping_of(data.copy()) is None


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_pages_leave_memory_and_come_back(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 32 << 20, dtype=np.uint8)
    (tmp_path / "x").write_bytes(content.tobytes())
    data = map_file(tmp_path / "x")
    part = data[1000:-1000]
    assert int(part.sum()) == int(content[1000:-1000].sum())
    before = resident_bytes()
    release_pages(part)
    assert before - resident_bytes() > 30 << 20
    assert np.array_equal(part, content[1000:-1000])
    release_pages(content)  # no map: nothing happens
