"""Kernels for GPUs in Triton's interpreter: a run of its own, `TRITON_INTERPRET=1 pytest tests/interpreter`.

The variable must be set before triton is imported, and it would turn every kernel of the process into Python.
"""

from __future__ import annotations

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
