"""Sliding windows in config.json and in GGUF metadata ↔ the window of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.config import RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.fields import Field, Form

FULL, LOCAL = "full_attention", "sliding_attention"
WINDOW, TYPES = "sliding_window", "layer_types"
Windows = tuple[int | None, ...]


# -- config.json ------------------------------------------------------------------------------------------------------
def window_size(values: Reading) -> int:
    """The size of windows; 0: there are none."""
    return values.json.count(WINDOW, 0, least=0)


def largest_window(values: Writing) -> int | None:
    return max((window for window in values["layers.window"] if window is not None), default=None)


def of_layers(values: Reading, has_window: list[bool]) -> Windows:
    size = window_size(values)
    return tuple(size if local else None for local in has_window) if size else ()


def layer_kinds(values: Reading) -> tuple[str, ...]:
    """FULL or LOCAL for every layer: by name, by a period, or by letters for local and global layers, which repeat."""
    if values.json.get(TYPES) is not None:
        return named_kinds(values)
    key = "sliding_window_pattern" if values.json.get("sliding_window_pattern") else "_sliding_window_pattern"
    if isinstance(letters := values.json.get(key), str) and letters:
        return tuple(LOCAL if letters[layer % len(letters)] == "L" else FULL for layer in values.layers)
    period = values.json.count(key, values.family.window_period, least=0) or values.family.window_period
    return tuple(FULL if period and (layer + 1) % period == 0 else LOCAL for layer in values.layers)


def named_kinds(values: Reading, key: str = TYPES) -> tuple[str, ...]:
    """The kind of each layer, as config.json names them."""
    kinds = values.json.texts(key)
    if len(kinds) != len(values.layers):
        raise values.json.wrong(key, f"a list of the kinds of {len(values.layers)} layers, not of {len(kinds)},")
    return kinds


def written_kinds(values: Writing) -> list[str]:
    return [FULL if window is None else LOCAL for window in values["layers.window"]]


def _every_layer(values: Writing) -> dict[str, Any]:
    windows = set(values["layers.window"])
    if len(windows) > 1:
        raise values.refusal("windows that differ between layers")
    return {} if windows == {None} and not values.writes(WINDOW) else {WINDOW: windows.pop()}


EVERY_LAYER = Form(lambda v: (window_size(v),) * len(v.layers) if window_size(v) else (), _every_layer)
BY_TYPE = Form(
    lambda v: of_layers(v, [kind == LOCAL for kind in layer_kinds(v)]),
    lambda v: {WINDOW: largest_window(v), TYPES: written_kinds(v)},
)


def upper_windows(values: Reading) -> Windows:
    """By `layer_types`, or else for layers from `max_window_layers` on."""
    if values.json.get(TYPES) is not None:
        return of_layers(values, [kind == LOCAL for kind in layer_kinds(values)])
    first = values.json.count("max_window_layers", len(values.layers), least=0)
    return of_layers(values, [layer >= first for layer in values.layers])


def write_upper(values: Writing) -> dict[str, Any]:
    window = largest_window(values)
    return {} if window is None else {"use_sliding_window": True, WINDOW: window, TYPES: written_kinds(values)}


UPPER_LAYERS = Field(
    "layers.window",
    hf=Form(lambda v: upper_windows(v) if v.json.flag("use_sliding_window", False) else (), write_upper),
)


def plain_in_windows(values: Reading, rope: RopeConfig, *local: RopeConfig) -> tuple[RopeConfig, ...]:
    """The ropes of a family whose layers with a window rotate without scaling."""
    if local or not values["layers.window"] or rope.scaling == "none":
        return (rope, *local)
    return rope, RopeConfig(rope.theta, rope.rotary_dim)


def _local_positions(values: Reading) -> tuple[int | None, ...]:
    return tuple(None if window is None else 0 for window in values["layers.window"])


def _check_positions(values: Writing) -> dict[str, Any]:
    if None in values["layers.rope"] and largest_window(values) is None:
        raise values.refusal("no positions and no windows")
    return {}


_LOCAL = Form(_local_positions, _check_positions)
LOCAL_POSITIONS = Field("layers.rope", hf=_LOCAL, gguf=_LOCAL)  # only layers with a window have rope


# -- GGUF files -------------------------------------------------------------------------------------------------------
def _from_gguf(values: Reading) -> Windows:
    header, key = values.header, ".attention.sliding_window_pattern"
    window = header.count(".attention.sliding_window", 0)
    if not window:
        return ()
    pattern = header.array(key)
    if pattern is None:
        period = header.count(key, values.family.window_period)
        return tuple(None if period and (layer + 1) % period == 0 else window for layer in values.layers)
    if len(pattern) != len(values.layers):
        raise header.wrong(key, f"a list for {len(values.layers)} layers, not for {len(pattern)},")
    return tuple(window if has_window else None for has_window in pattern.tolist())


def _to_gguf(values: Writing) -> dict[str, Any]:
    has_window = [window is not None for window in values["layers.window"]]
    sizes = set(values["layers.window"]) - {None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise values.refusal(f"windows of different sizes: {sorted(sizes)}")
    entries: dict[str, Any] = {"attention.sliding_window": sizes.pop()}
    period = values.family.window_period
    if has_window != [not period or (layer + 1) % period != 0 for layer in values.layers]:
        entries["attention.sliding_window_pattern"] = np.array(has_window)
    return entries


def ropes_by_window(values: Reading) -> tuple[int, ...]:
    """The rope of each layer: layers with a window have the second one, if there are two."""
    windows = values["layers.window"]
    return tuple(int(window is not None) for window in windows) if len(values["ropes"]) > 1 else ()


GGUF_WINDOWS = Form(_from_gguf, _to_gguf)
