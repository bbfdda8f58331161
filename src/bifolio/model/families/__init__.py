"""Model families, one file each.

Modules of this package that define `FAMILY` are discovered automatically: a new family is one file here and its entries
in the table of test configurations. Code outside this package does not compare architecture names.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError, UnsupportedModelError
from bifolio.model.families.family import Family

__all__ = ["Family", "all_families", "family_named", "family_of", "family_of_folder", "family_of_gguf", "family_of_hf"]


@cache
def all_families() -> tuple[Family, ...]:
    """Every family, sorted by file name."""
    modules = [importlib.import_module(f"{__name__}.{name}") for name in sorted(_files())]
    families = tuple(module.FAMILY for module in modules if hasattr(module, "FAMILY"))
    for names in (lambda f: (f.name,), lambda f: f.hf_types, lambda f: f.gguf_architectures):
        _by_name(families, names)
    return families


def _known() -> tuple[Family, ...]:
    """The families of decoders, and those of encoders."""
    from bifolio.model.encoders import all_encoders

    return all_families() + all_encoders()


def family_named(name: str) -> Family | None:
    """The family with this `ModelConfig.architecture`."""
    return _claiming(name, lambda family: (family.name,))


def family_of(config: ModelConfig) -> Family:
    """The family of a network."""
    family = family_named(config.architecture)
    if family is None:
        raise _unsupported(config.architecture, (known.name for known in _known()))
    return family


def family_of_folder(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    family = family_of_hf(raw.get("model_type"))
    return family if family.hf_variant is None else family_of_hf(family.hf_variant(raw))


def family_of_hf(model_type: object) -> Family:
    """The family of a `model_type` in config.json."""
    found = _claiming(model_type, lambda family: family.hf_types)
    if found is None:
        raise _unsupported(model_type, _by_name(_known(), lambda family: family.hf_types))
    return found


def family_of_gguf(architecture: str, path: str) -> Family:
    """The family of a `general.architecture` in the GGUF file at `path`."""
    found = _claiming(architecture, lambda family: family.gguf_architectures)
    if found is None:
        raise _unsupported(architecture, _by_name(_known(), lambda family: family.gguf_architectures), f"{path}: ")
    return found


def _files() -> frozenset[str]:
    """Names of the modules of this package."""
    return frozenset(found.name for found in pkgutil.iter_modules(__path__))


def _claiming(name: object, names: Callable[[Family], Iterable[str]]) -> Family | None:
    """The family with a name. Most are in the file of that name: then a process reads that file alone."""
    if not isinstance(name, str):
        return None
    if name in _files():
        family = getattr(importlib.import_module(f"{__name__}.{name}"), "FAMILY", None)
        if family is not None and name in names(family):
            return family  # type: ignore[no-any-return]
    return _by_name(_known(), names).get(name)


def _by_name(families: Iterable[Family], names: Callable[[Family], Iterable[str]]) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for family in families:
        for name in names(family):
            if name in found:
                raise ConfigError(f"the families {found[name].name!r} and {family.name!r} both claim {name!r}")
            found[name] = family
    return found


def _unsupported(name: object, known: Iterable[str], where: str = "") -> UnsupportedModelError:
    """The error of a name that no family has, with the names that are most like it."""
    nearest = difflib.get_close_matches(str(name), sorted(known), n=3)
    similar = f"; supported and similar: {', '.join(nearest)}" if nearest else ""
    return UnsupportedModelError(
        f"{where}the architecture {name!r} is not supported{similar}; docs/models.md lists all that are"
    )
