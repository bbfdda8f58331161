"""Tests of the cluster use the tiny models and servers of tests/serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("openai")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))
