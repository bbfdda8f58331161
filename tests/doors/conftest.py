"""Doors use the small models of tests/model and the stand-in for a device of tests/engine."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("engine", "model"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
