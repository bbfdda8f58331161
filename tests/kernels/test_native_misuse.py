"""Misuse of every entry point of the native module: an error that names the argument, and nothing is written.

`scripts/sanitize` runs this under the address sanitizer, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from native_support import isas

isas()  # skips this module where the library is not built

from native_adapter_misuses import MISUSES as ADAPTER_MISUSES  # noqa: E402
from native_calls import VALID, Arguments, arrays_in, call, floats, ints, mixed, run_arguments, segment  # noqa: E402
from native_choice_misuses import MISUSES as CHOICE_MISUSES  # noqa: E402
from native_expert_misuses import MISUSES as EXPERT_MISUSES  # noqa: E402
from native_misuses import MISUSES, Misuse  # noqa: E402
from native_program_misuses import MISUSES as PROGRAM_MISUSES  # noqa: E402
from native_rank_misuses import MISUSES as RANK_MISUSES  # noqa: E402
from native_recurrence_misuses import MISUSES as RECURRENCE_MISUSES  # noqa: E402
from native_stream_misuses import MISUSES as STREAM_MISUSES  # noqa: E402
from native_token_misuses import MISUSES as TOKEN_MISUSES  # noqa: E402

from bifolio.errors import BifolioError, KernelArgumentError  # noqa: E402
from bifolio.kernels import native  # noqa: E402

ALL_MISUSES = [*MISUSES, *PROGRAM_MISUSES, *EXPERT_MISUSES, *RANK_MISUSES, *RECURRENCE_MISUSES, *STREAM_MISUSES,
               *TOKEN_MISUSES, *ADAPTER_MISUSES, *CHOICE_MISUSES]  # fmt: skip
# Arrays that are written; None is a value for those that may be left out.
WRITTEN = {"out", "results", "keys", "values", "memory", "windows", "states", "inputs", "outputs"}
OPTIONAL = {"bias", "conv_bias", "logit_rows", "importance", "factors"}
SEGMENT_FIELDS = ("phase", "token_start", "query_starts", "context_lens", "block_tables")
Path = tuple[str | int, ...]


def another_dtype(array: np.ndarray) -> Any:
    others = {"float32": "float64", "int32": "int64", "int64": "int32", "uint8": "int8", "uint64": "int64"}
    return array.astype(others[array.dtype.name])


def misaligned(array: np.ndarray) -> Any:
    moved = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def read_only(array: np.ndarray) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


SPOILERS: dict[str, Callable[[np.ndarray], Any]] = {
    "another dtype": another_dtype,
    "not contiguous": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "backwards": lambda array: np.flip(array.copy(), axis=0),
    "one dimension more": lambda array: array[None],
    "one dimension less": lambda array: array.reshape(-1) if array.ndim > 1 else array[0],
    "misaligned": misaligned,
    "a list": lambda array: array.reshape(-1)[:64].tolist(),
    "read-only": read_only,
    "None": lambda array: None,
}


def array_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the arrays are among the arguments."""
    if isinstance(value, np.ndarray):
        yield path
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from array_paths(item, (*path, key))


def replaced(value: Any, path: Path, change: Callable[[np.ndarray], Any]) -> Any:
    """The arguments with one array changed."""
    if not path:
        return change(value)
    items = dict(value) if isinstance(value, dict) else list(value)
    items[path[0]] = replaced(value[path[0]], path[1:], change)
    return tuple(items) if isinstance(value, tuple) else items


def applies(spoiler: str, entry: str, name: str) -> bool:
    if spoiler == "read-only":
        return name in WRITTEN or (entry, name) == ("Ranks.reduce", "x")
    if spoiler == "None":
        return name not in OPTIONAL and (entry, name) != ("Ranks.gather", "out")
    is_bytes = name in ("bytes", "parts", "headers", "pixels") or (
        entry in ("decode_fp8", "pack_codes", "resample") and name == "out"
    )
    return spoiler != "misaligned" or not is_bytes  # bytes lie anywhere


def spoiled_arrays() -> Iterator[Any]:
    for entry, arguments in VALID.items():
        for path in array_paths(arguments()):
            name = str(path[0]) if path[0] != "segments" else SEGMENT_FIELDS[int(path[2])]
            for spoiler in SPOILERS:
                if applies(spoiler, entry, name):
                    yield pytest.param(entry, path, name, spoiler, id=f"{entry}-{name}-{spoiler}".replace(" ", "_"))


def error_of(entry: str, arguments: Arguments) -> Exception | None:
    try:
        call(entry, arguments)
    except Exception as error:
        return error
    return None


def contents(arguments: Arguments) -> list[bytes]:
    return [array.tobytes() for array in arrays_in(arguments)]


@pytest.mark.parametrize("entry", VALID)
def test_the_valid_call_is_accepted(entry: str) -> None:
    """So every error below comes from the one argument that is changed."""
    assert error_of(entry, VALID[entry]()) is None
    assert error_of("set_num_threads", {"count": 0}) is None


@pytest.mark.parametrize("misuse", ALL_MISUSES, ids=str)
def test_misuse_is_refused(misuse: Misuse) -> None:
    arguments = (VALID[misuse.entry]() if misuse.entry in VALID else {}) | misuse.changes
    before = contents(arguments)
    with pytest.raises(misuse.error, match=misuse.match):
        call(misuse.entry, arguments)
    assert contents(arguments) == before


@pytest.mark.parametrize(("entry", "path", "name", "spoiler"), spoiled_arrays())
def test_arrays_of_another_kind_are_refused(entry: str, path: Path, name: str, spoiler: str) -> None:
    arguments = replaced(VALID[entry](), path, SPOILERS[spoiler])
    match, before = "the bytes of a part" if name == "parts" else re.escape(name), contents(arguments)
    with pytest.raises(KernelArgumentError, match=rf"{match}.* must "):
        call(entry, arguments)
    assert contents(arguments) == before


def test_every_entry_point_has_a_misuse() -> None:
    module = native.library()
    entries = set()
    for name in dir(module):
        if name.startswith("_"):
            continue
        entries.add(name)
        member = getattr(module, name)
        if isinstance(member, type):
            methods = [m for m in vars(member) if not m.startswith("_") and callable(getattr(member, m))]
            entries.update(f"{name}.{method}" for method in methods)
    assert entries == {misuse.entry for misuse in ALL_MISUSES}
    assert entries - {"Linear"} == set(VALID)


def test_the_error_is_one_of_ours_and_a_value_error() -> None:
    with pytest.raises(KernelArgumentError) as caught:
        call("set_num_threads", {"count": -1})
    assert isinstance(caught.value, BifolioError)
    assert isinstance(caught.value, ValueError)


def test_a_refused_thread_count_leaves_the_threads_alone() -> None:
    before = native.num_threads()
    with pytest.raises(KernelArgumentError):
        native.set_num_threads(10**6)
    assert native.num_threads() == before


def test_arrays_without_rows_are_fine() -> None:
    nothing = {"given": [floats(0, 64), floats(0, 4)], "results": [floats(0, 64)]}
    assert error_of("Program.run", mixed(**nothing)) is None
    nothing = {"logit_rows": ints(), "results": [np.empty((0, 50), np.float32)]}
    assert error_of("Program.run", run_arguments() | nothing) is None


def test_one_program_in_several_threads() -> None:
    """Callers take turns: a larger batch, which needs larger buffers, does not disturb a smaller one that runs."""
    arguments = run_arguments()
    tokens = 2000
    large = arguments | {
        "ids": np.zeros(tokens, np.int32),
        "positions": np.zeros(tokens, np.int32),
        "slots": np.full(tokens, 64, np.int64),
        "segments": [
            segment(
                query_starts=np.arange(tokens + 1, dtype=np.int32),
                context_lens=np.ones(tokens, np.int32),
                block_tables=np.full((tokens, 1), 4, np.int32),
            )
        ],
    }
    call("Program.run", arguments)
    expected = arguments["results"][0].copy()
    results: list[np.ndarray] = []

    def run_small() -> None:
        for _ in range(50):
            results.append(np.empty_like(expected))
            call("Program.run", arguments | {"results": [results[-1]]})

    threads = [threading.Thread(target=run_small) for _ in range(2)]
    for thread in threads:
        thread.start()
    call("Program.run", large | {"results": [np.empty_like(expected)]})
    for thread in threads:
        thread.join()
    assert len(results) == 100
    for result in results:
        np.testing.assert_array_equal(result, expected)
