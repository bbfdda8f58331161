"""Kernels for GPUs in Triton's interpreter: a run of its own, `TRITON_INTERPRET=1 pytest tests/interpreter`.

The variable must be set before triton is imported, and it would turn every kernel of the process into Python. Cases
and checks are those of tests/kernels, tests/laws and tests/gpu, in small shapes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

for folder in ("kernels", "laws", "gpu", "interpreter"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


if "collect_ignore_glob" not in globals():
    from lean_interpreter import make_lean

    make_lean()
