"""Families of encoders, one file each: networks that make vectors and scores of texts, and generate none.

They are described by tables as the families of decoders are (`model/families`), and found in the same way.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from bifolio.model.families.family import Family


@cache
def all_encoders() -> tuple[Family, ...]:
    """Every family of encoders, sorted by file name."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))
