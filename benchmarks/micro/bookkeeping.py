"""Micro-benchmark: host time of block management and planning per sequence of a decode step.

    python -m benchmarks.micro.bookkeeping [--sequences 256] [--repeats 64]

Every sequence has 512 tokens and gets one more in each step. Blocks hold 16 tokens, so one step in sixteen allocates a
block for every sequence: `median` is a step without allocation, `mean` includes all steps. The target for the planner
is under 4 us per sequence at 256 sequences, and a cost proportional to their number. Times are CPU time of this thread,
which depends less on other load than wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from bifolio.cache import KVCacheBlockManager
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import BatchSlot
from bifolio.sequence import Request, Sequence

BLOCK_SIZE = 16
CONTEXT = 512
TOKEN_BUDGET = 8192  # larger than any decode step
WARM_UP = 16
TARGET_US = 4.0
Step = Callable[[], None]
Subject = tuple[Step, Step]  # the timed part of a step, and the untimed part between steps


def filled_manager(num_sequences: int, num_steps: int) -> KVCacheBlockManager:
    """Sequences with distinct contexts, and blocks for all steps."""
    blocks_each = (CONTEXT + num_steps) // BLOCK_SIZE + 1
    manager = KVCacheBlockManager(num_sequences * blocks_each + 1, BLOCK_SIZE)
    for sequence_id in range(num_sequences):
        manager.open_table(sequence_id)
        manager.append(sequence_id, CONTEXT)
    return manager


def manager_alone(num_sequences: int, num_steps: int) -> Subject:
    """The block manager's part of planning: check for free blocks, append, copies."""
    manager = filled_manager(num_sequences, num_steps)

    def step() -> None:
        appends = [(sequence_id, 1) for sequence_id in range(num_sequences)]
        if manager.blocks_needed(appends) > manager.num_free_blocks or not manager.try_append_many(appends):
            raise SystemExit("the benchmark's pool is too small")
        manager.take_moves()

    return step, lambda: None


def planner(num_sequences: int, num_steps: int) -> Subject:
    """A complete plan of a decode step, as in the engine."""
    return _planned(num_sequences, num_steps, with_commit=False)


def planner_and_commit(num_sequences: int, num_steps: int) -> Subject:
    """The plan, the changed block table entries, and the commit of computed blocks to the prefix cache."""
    return _planned(num_sequences, num_steps, with_commit=True)


def _planned(num_sequences: int, num_steps: int, with_commit: bool) -> Subject:
    manager = filled_manager(num_sequences, num_steps)
    phases = PhaseManager(PrefillOrchestrator(manager), DecodeOrchestrator(manager))
    sequences = [_decoding_sequence(number) for number in range(num_sequences)]
    slots = [BatchSlot(index, sequence, (index,)) for index, sequence in enumerate(sequences)]

    def step() -> None:
        plan = phases.plan(slots, TOKEN_BUDGET)
        if len(plan.decodes) != num_sequences:
            raise SystemExit("the benchmark's pool is too small")
        if with_commit:
            manager.take_changes(range(num_sequences))
            for sequence in sequences:
                manager.commit(sequence.id, sequence.token_ids, sequence.num_computed)

    def advance() -> None:
        for sequence in sequences:
            sequence.launch(1, draws=True)
            sequence.advance(1)
            sequence.append_token(1)

    return step, advance


def _decoding_sequence(number: int) -> Sequence:
    request = Request(str(number), number, [number] * CONTEXT, SamplingParams(), seed=0)
    tokens = [number] * (CONTEXT + 1)
    return Sequence(number, request, 0, tokens, CONTEXT, 0, output_token_ids=tokens[-1:], num_computed=CONTEXT)


# Each entry builds the measured functions for (sequences, number of steps).
SUBJECTS: dict[str, Callable[[int, int], Subject]] = {
    "manager: needed, append, copies": manager_alone,
    "planner: PhaseManager.plan": planner,
    "planner, row changes, commit": planner_and_commit,
}


def time_steps(subject: Subject, repeats: int) -> list[float]:
    """CPU seconds of each step, after warm-up steps."""
    step, advance = subject
    times = []
    for _ in range(WARM_UP + repeats):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
        advance()
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=64)
    arguments = parser.parse_args()
    print(f"{'':32s} {'sequences':>9s} {'us/step':>9s}   us/sequence: {'median':>6s} {'mean':>6s}")
    for name, subject in SUBJECTS.items():
        for num_sequences in (arguments.sequences // 4, arguments.sequences, arguments.sequences * 4):
            times = time_steps(subject(num_sequences, arguments.repeats + WARM_UP), arguments.repeats)
            step_us = [statistics.median(times) * 1e6, statistics.mean(times) * 1e6]
            median, mean = (us / num_sequences for us in step_us)
            note = f"   target {TARGET_US:.0f}" if num_sequences == arguments.sequences else ""
            print(f"{name:32s} {num_sequences:9d} {step_us[0]:9.0f} {'':15s} {median:6.2f} {mean:6.2f}{note}")


if __name__ == "__main__":
    main()
