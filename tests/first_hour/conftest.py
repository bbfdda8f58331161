"""Makes the hub of tests/cli and the browser of tests/serve importable here."""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("cli", "serve"):
    sys.path.insert(0, str(Path(__file__).parent.parent / name))
