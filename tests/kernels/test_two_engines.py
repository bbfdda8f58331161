"""Engines with pools of threads of their own run beside each other; `scripts/sanitize-threads` checks for races."""

from __future__ import annotations

import pytest


@pytest.mark.full
def test_engines_beside_each_other_do_not_disturb_each_other() -> None:
    pytest.importorskip("bifolio.kernels._native")
    import two_engines

    assert two_engines.main() == 0
