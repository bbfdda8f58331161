"""Kernels for GPUs in Triton's interpreter: a run of its own, `TRITON_INTERPRET=1 pytest tests/interpreter`.

The variable must be set before triton is imported, and it would turn every kernel of the process into Python. Cases
and checks are those of tests/kernels, tests/laws and tests/gpu, in small shapes.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

for folder in ("kernels", "laws", "gpu"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


def remember_builtins() -> None:
    """Let the interpreter list the builtins of a module once: it does so at every call of a device function."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
        return  # another version
    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def names(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def patch_builtin(module: Any, *arguments: Any) -> None:
        for name in names(module):
            member = getattr(module, name)
            if is_builtin(member):  # not yet patched
                patch_attr(module, name, member, *arguments)

    interpreter._patch_builtin = patch_builtin


if "collect_ignore_glob" not in globals():
    remember_builtins()
