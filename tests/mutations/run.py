"""Seed bugs into copies of the cache and prove that the state machine finds each of them.

    python tests/mutations/run.py [name ...]

Every bug is a replacement of source text in a temporary copy of the package. Each copy runs twice: with the block
manager's own invariants, and without them, where only the values read back, the counts and the freed blocks can differ.
The first run must fail for every bug, and the copy without a bug must pass both. Exit status 1 if a bug survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
POOL, MANAGER, TABLE, STORAGE = "block_pool.py", "block_manager.py", "block_table.py", "storage.py"
STATES, TABLE_STATES = "states.py", "table_states.py"


class Replacement(NamedTuple):
    file: str  # in src/bifolio/cache
    old: str  # occurs exactly once
    new: str


MUTANTS: dict[str, list[Replacement]] = {
    "no pin": [
        Replacement(POOL, "self.pins[block_id] += 1  #", "self.pins[block_id] += 0  #"),
        Replacement(POOL, "self.pins[block_id] -= 1", "self.pins[block_id] -= 0"),
    ],
    "count off by one on fork": [
        Replacement(MANAGER, "for block_id in child.block_ids:", "for block_id in child.block_ids[:-1]:"),
    ],
    "digest on a partial block": [
        Replacement(MANAGER, "num_full = num_computed // self.block_size", "num_full = self.blocks_for(num_computed)"),
    ],
    "copy after write": [
        Replacement(STORAGE, "            self._manager.run_moves([self.storage])\n", ""),
        Replacement(
            STORAGE,
            "storage.write(layer, index, keys[layer][None], values[layer][None])\n",
            "storage.write(layer, index, keys[layer][None], values[layer][None])\n"
            "            manager.run_moves([storage])\n",
        ),
    ],
    "double free": [
        Replacement(POOL, "self.blank.append(block_id)", "self.blank.extend([block_id, block_id])"),
    ],
    "free that ignores the count": [
        Replacement(POOL, "        if self.ref_counts[block_id]:\n            return\n", ""),
    ],
    "off-by-one truncate: a block too few": [
        Replacement(
            MANAGER,
            "return self._shrink(table, self.blocks_for(num_tokens))",
            "return self._shrink(table, num_tokens // self.block_size)",
        ),
    ],
    "off-by-one truncate: a block too many": [
        Replacement(
            MANAGER,
            "return self._shrink(table, self.blocks_for(num_tokens))",
            "return self._shrink(table, self.blocks_for(num_tokens + 1))",
        ),
    ],
    "off-by-one truncate: a digest too many": [
        Replacement(
            MANAGER,
            "del table.chain[num_tokens // self.block_size :]",
            "del table.chain[self.blocks_for(num_tokens) :]",
        ),
    ],
    "written block stays findable": [
        Replacement(TABLE, "pool.forget(tail)", "pass"),
    ],
    "evicted block stays findable": [
        Replacement(POOL, "popitem(last=False)\n            self.forget(block_id)", "popitem(last=False)"),
    ],
    "shared tail written in place": [
        Replacement(TABLE, "if ref_counts[tail] > 1 or digests[tail] is not None:", "if digests[tail] is not None:"),
    ],
    "siblings not counted": [
        Replacement(TABLE, "if ref_counts[tail] - left > 1:", "if ref_counts[tail] > 1:"),
    ],
    "prefix hit leaves the block on the free list": [
        Replacement(POOL, "self.evictable.pop(block_id, None)", "pass"),
    ],
    "copy to a released block still runs": [
        Replacement(POOL, "src = self.moves.pop(block_id, None)", "src = None"),
    ],
    "salt ignored": [
        Replacement("digests.py", "blake2b(salt, digest_size", 'blake2b(b"", digest_size'),
    ],
    "digest without its prefix": [
        Replacement("digests.py", "blake2b(parent + words", "blake2b(words"),
    ],
    "fork with a pending copy": [
        Replacement(MANAGER, "self._check_no_pending_move(parent.block_ids)", "pass"),
    ],
    "no lock": [
        Replacement(MANAGER, "from threading import RLock", "from contextlib import nullcontext as RLock"),
    ],
    "device table misses a replaced block": [
        Replacement(TABLE, "table.mark_changed(len(table.block_ids) - 1)", "pass"),
    ],
}

STATE_MUTANTS: dict[str, list[Replacement]] = {
    "shared state written in place": [
        Replacement(STATES, "and self.ref_counts[state] == 1", "and self.ref_counts[state] >= 1"),
    ],
    "checkpoint written in place": [
        Replacement(STATES, "and self.digests[state] is None\n            and state", "and state"),
    ],
    "fork of a state without a reference": [
        Replacement(TABLE_STATES, "            self.pool.retain(child.current)", "            pass"),
    ],
    "state of a rejected draft": [
        Replacement(TABLE_STATES, "if position <= num_tokens:", "if position <= num_tokens + 1:"),
    ],
    "checkpoint under another digest": [
        Replacement(TABLE_STATES, "digest = chain[index - 1]", "digest = chain[max(index - 2, 0)]"),
    ],
    "evicted checkpoint stays findable": [
        Replacement(STATES, "            del self.checkpoints[digest]", "            pass"),
    ],
    "checkpoint outlives its block": [
        Replacement(MANAGER, "self._pool.on_forget = self._states.pool.forget", "pass"),
    ],
    "state behind the truncated end": [
        Replacement(TABLE_STATES, "if num_tokens >= owner.position and owner", "if num_tokens >= 0 and owner"),
    ],
    "evicted state of a resting table": [
        Replacement(STATES, "            owner.current = LOST", "            pass"),
    ],
}
MUTANTS |= STATE_MUTANTS

TESTS = {"no lock": "test_cache_threads.py"} | dict.fromkeys(STATE_MUTANTS, "test_states.py")  # others: state machine


def mutated_copy(folder: Path, replacements: list[Replacement]) -> None:
    """Copy the package into `folder` and put the bug in."""
    shutil.copytree(ROOT / "src" / "bifolio", folder / "bifolio", ignore=shutil.ignore_patterns("__pycache__"))
    for replacement in replacements:
        path = folder / "bifolio" / "cache" / replacement.file
        text = path.read_text()
        if text.count(replacement.old) != 1:
            count = text.count(replacement.old)
            raise SystemExit(f"{replacement.file} has {count} times {replacement.old!r}: update the mutation")
        path.write_text(text.replace(replacement.old, replacement.new))


def passes_test(folder: Path, test: str, with_invariants: bool) -> bool:
    """Run a test of the cache on the package in `folder`."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BIFOLIO_MACHINE_SHRINK": "0",
        "BIFOLIO_MACHINE_INVARIANTS": "1" if with_invariants else "0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "cache" / test)]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise SystemExit(f"{test} could not run:\n{result.stdout}\n{result.stderr}")
    return result.returncode == 0


def try_mutant(name: str, replacements: list[Replacement]) -> bool:
    """Print the verdict on one copy; True when it is the expected one."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        mutated_copy(Path(folder), replacements)
        test = TESTS.get(name, "test_state_machine.py")
        passes, passes_blind = (passes_test(Path(folder), test, with_invariants) for with_invariants in (True, False))
    if not replacements:
        verdict = "passes, as expected" if passes and passes_blind else "FAILS WITHOUT A BUG"
    else:
        verdict = "SURVIVES" if passes else "found" + ("; only by the invariants" if passes_blind else "")
    print(f"{name:48s} {verdict}  ({time.monotonic() - started:.0f} s)", flush=True)
    return (passes and passes_blind) if not replacements else not passes


def main(names: list[str]) -> int:
    chosen = {name: MUTANTS[name] for name in names} if names else {"(no bug)": [], **MUTANTS}
    results = [try_mutant(name, replacements) for name, replacements in chosen.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
