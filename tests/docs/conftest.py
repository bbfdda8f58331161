"""Makes the hub and the encoders of other folders importable here, and starts the process that forks programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("cli", "encoders"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))


@pytest.fixture(scope="session")
def forks() -> Iterator[str | None]:
    """The socket of forked programs; none where a process cannot wait for another one and a socket together."""
    if not sys.platform.startswith("linux"):
        yield None
        return
    from forked_programs import serving

    with serving() as path:
        yield path
