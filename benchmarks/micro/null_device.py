"""A stand-in for a device: it draws random tokens and takes no time, so that only the host's time is left.

    python -m benchmarks.micro.null_device serve ...     `bifolio serve` whose engine has such a device

Used by `host_step`. Prompts are computed on the CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from bifolio.errors import PhaseError
from bifolio.kernels.interface import TokenScores
from bifolio.kernels.select import select_kernels
from bifolio.kernels.weights import ONE

NUM_TOP = 20  # tokens that the device reports for each drawn token


class DrawnTokens:
    """Tokens of a step that is complete."""

    def __init__(self, tokens: np.ndarray, scores: TokenScores | None) -> None:
        self._tokens, self._scores = tokens, scores

    def wait(self) -> np.ndarray:
        return self._tokens

    def scores(self) -> TokenScores | None:
        return self._scores


class NullDevice:
    """Slots of a device that draws random tokens at once."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._generator = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._scored = np.zeros(num_slots, dtype=np.bool_)

    def draws(self, params: Any, edits: Any) -> bool:
        return True

    def set_params(self, slot: int, params: Any, seed: int, edits: Any, rope: int = 0, adapter: Any = None) -> None:
        self._scored[slot] = params.needs_logprobs

    def set_history(self, slot: int, prompt: np.ndarray, output: Any) -> None: ...

    def set_mask(self, slot: int, is_used: bool) -> None: ...

    def mask_rows(self, slots: np.ndarray) -> np.ndarray:
        return np.empty((len(slots), -(-self._vocab_size // 32)), dtype=np.int32)

    def set_blocks(self, slot: int, first: int, block_ids: Any) -> None: ...

    def set_progress(self, slots: np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> None: ...

    def fill_tokens(self, token_ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(token_ids, 0))

    def draw(self, logits: Any, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> DrawnTokens:
        return self._drawn(slots)

    def set_states(self, slots: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        pass

    def decode(self, slots: np.ndarray, tables: np.ndarray, lengths: np.ndarray) -> DrawnTokens:
        return self._drawn(slots)

    def decode_logits(self, slots: np.ndarray, tables: Any = None, lengths: Any = None) -> Any:
        return np.empty((len(slots), 0), dtype=np.float32)  # not read: `draw` needs the number of draws alone

    def can_verify(self, slots: np.ndarray, length: int) -> bool:
        return False

    def verify(self, slots: np.ndarray, drafts: np.ndarray) -> DrawnTokens:
        raise PhaseError("the null device verifies no drafts: ask `can_verify` first")

    def verified_states(self, row: int) -> np.ndarray:
        raise PhaseError("the null device verifies no drafts: it returns no states")

    def draft_slots(self, network: Any, storage: Any) -> None:
        """A head runs pass by pass."""

    def prompt_states(self, count: int) -> np.ndarray:
        raise PhaseError("the null device runs no pass with prompts: it gives out no states")

    def draw_drafts(self, logits: Any, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        """Drafts are verified on the host."""

    def prompt_logits(self, batch: Any, slots: np.ndarray) -> None:
        return None

    def warm_up(self) -> None: ...

    def warm_up_adapters(self) -> None: ...

    def prepare_adapter(self, adapter: Any) -> Any:
        return adapter

    def stage_adapters(self, use: Any) -> Any:
        return use

    def _drawn(self, slots: np.ndarray) -> DrawnTokens:
        count = len(slots)
        tokens = self._generator.integers(300, self._vocab_size, count).astype(np.int32)
        if not self._scored[slots].any():
            return DrawnTokens(tokens, None)
        ids = np.tile(np.arange(NUM_TOP, dtype=np.int32), (count, 1))
        logits = np.zeros((count, NUM_TOP), dtype=np.float32)
        totals = np.full(count, int(ONE) * 50, dtype=np.int64)
        scores = TokenScores(totals, np.zeros(count, np.float32), np.ones(count, np.int32), ids, logits)
        return DrawnTokens(tokens, scores)


def null_kernels(*arguments: Any, **options: Any) -> Any:
    """The CPU's kernels with such a device; takes the arguments of `select_kernels`."""
    kernels: Any = select_kernels("cpu", threads=1)
    kernels.device_slots = lambda network, storage, sizes: NullDevice(sizes.num_slots, sizes.vocab_size)
    kernels.launches_ahead = True
    return kernels


def main() -> None:
    if "--help" in sys.argv[1:2]:
        print(__doc__)
    elif sys.argv[1] == "serve":
        from bifolio.cli.main import main as run_command
        from bifolio.serve.process import worker_process

        worker_process.default_command = lambda: [sys.executable, "-m", "benchmarks.micro.null_device"]
        run_command()
    else:
        from bifolio.api import engine_options
        from bifolio.serve.process import worker

        vars(engine_options)["select_kernels"] = null_kernels
        worker.main()


if __name__ == "__main__":
    main()
