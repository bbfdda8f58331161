"""Cost and gain of draft heads on a GPU, through `LLM` on a folder of a model whose text is known.

    python -m benchmarks.tools.drafts --models /dev/shm/models                  the 8B shape, EAGLE-3 and MTP
    python -m benchmarks.tools.drafts --device torch --tiny                     without a GPU

Heads are right after `--share` of the tokens of one half of the texts, and never in the other half
(`benchmarks.predictable`). Each engine runs in this process, one after the other: a plain one, then one with each head,
with 1 to `--length` drafts in every step and with lengths that the engine chooses. A row is the time of a step, the
wait for the device in it, tokens per second and both as multiples of plain decoding; the outputs are checked. With
`--profile` a table of device time by kernel follows for each row.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.predictable import FIRST, num_known, text_after, write_head, write_pair
from benchmarks.shapes import SHAPES, tiny

WARM_UP = 12  # tokens of each sequence before the clock starts
PROMPT = 100  # tokens
GROUPS = (  # of kernels, by parts of their names
    ("attention", ("attention", "attend", "fmha", "flash", "split_kv", "merge", "pieces")),
    ("draw", ("choose", "best_of", "chunk_sums", "draw", "verify", "accept")),
    ("norm, rope, activation", ("norm", "rope", "rotate", "act_", "silu", "embed")),
    ("products", ("gemm", "gemv", "cutlass", "nvjet", "matmul", "splitk", "linear", "expert", "gather")),
    ("copies", ("memcpy", "memset", "copy", "index", "fill", "elementwise", "cat")),
)


class Measured(NamedTuple):
    """One engine with one batch size."""

    steps: int
    seconds: float
    waited: float  # seconds in which the host waited for tokens of the device
    tokens: int
    accepted: float  # share of the draft tokens

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Waits:
    """Sums the time of all waits for results of the device."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Time `wait` of every class of pending results while the block runs."""
        kinds, own = _pending_kinds(), {}
        for kind in kinds:
            own[kind] = kind.wait
            kind.wait = self._timed(kind.wait)
        try:
            yield
        finally:
            for kind in kinds:
                kind.wait = own[kind]

    def _timed(self, wait: Any) -> Any:
        def timed(pending: Any, *arguments: Any) -> Any:
            started = time.perf_counter()
            found = wait(pending, *arguments)
            self.seconds += time.perf_counter() - started
            return found

        return timed


def _pending_kinds() -> list[Any]:
    """The classes of results in flight that have a method `wait`."""
    try:
        from bifolio.kernels.triton.graphs import results
    except ImportError:
        return []
    found = list(vars(results).values())
    kinds = [kind for kind in found if isinstance(kind, type) and "wait" in vars(kind)]
    return list(dict.fromkeys(kinds))


def begin(llm: Any, count: int, *, is_right: bool, num_tokens: int) -> list[Any]:
    """Add requests whose texts do not overlap, in the half where drafts are right or in the other."""
    from bifolio import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    half = num_known(llm.model.config.vocab_size) // 2
    first, room = (FIRST, half - FIRST) if is_right else (half + FIRST, half - FIRST)
    requests = []
    for number in range(count):
        last = first + number * max((room - num_tokens) // max(count, 1), 1)
        prompt = [first + (number * 97 + 31 * place) % room for place in range(PROMPT)] + [last]
        requests.append(llm.engine.add_request(f"drafts-{number}-{time.monotonic_ns()}", prompt, params))
    return requests


def measure(llm: Any, count: int, num_tokens: int, *, is_right: bool) -> Measured:
    """Run `count` sequences; the clock runs while all of them decode."""
    engine, waits = llm.engine, Waits()
    requests = begin(llm, count, is_right=is_right, num_tokens=num_tokens)
    sequences = [request.sequences[0] for request in requests]
    while any(len(sequence.output_token_ids) < WARM_UP for sequence in sequences):
        engine.step()
    stats = None if engine.speculator is None else engine.speculator.stats
    drafted, accepted = (0, 0) if stats is None else (stats.num_draft_tokens, stats.num_accepted_tokens)
    before, steps, started = sum(len(sequence.output_token_ids) for sequence in sequences), 0, time.perf_counter()
    with waits.counted():
        while all(sequence.finish_reason is None for sequence in sequences):
            engine.step()
            steps += 1
    seconds = time.perf_counter() - started
    tokens = sum(len(sequence.output_token_ids) for sequence in sequences) - before
    share = 0.0
    if stats is not None:
        share = (stats.num_accepted_tokens - accepted) / max(stats.num_draft_tokens - drafted, 1)
    while engine.has_work:
        engine.step()
    for request in requests:
        expected = text_after(request.prompt_token_ids[-1], num_tokens, llm.model.config.vocab_size)
        if request.sequences[0].output_token_ids != expected:
            raise SystemExit(f"a text differs from the model's: {request.sequences[0].output_token_ids[:12]} ...")
    return Measured(steps, seconds, waits.seconds, tokens, share)


def profile(llm: Any, count: int, num_steps: int = 20) -> dict[str, Any]:
    """Microseconds per step of the busy device, of groups of kernels and of the longest kernels."""
    import torch

    engine = llm.engine
    requests = begin(llm, count, is_right=True, num_tokens=8 * num_steps)
    while any(len(request.sequences[0].output_token_ids) < WARM_UP for request in requests):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    groups: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if "cuda" in str(event.device_type).lower():
            name, us = event.name.replace("void ", "").split("(")[0][:70], event.time_range.elapsed_us() / num_steps
            kernels[name][0] += us
            kernels[name][1] += 1 / num_steps
            groups[_group_of(name)] += us
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:16]
    return {
        "busy_us": round(sum(groups.values())),
        "launches": round(sum(entry[1] for entry in kernels.values())),
        "groups_us": {name: round(us) for name, us in sorted(groups.items(), key=lambda item: -item[1])},
        "kernels": [(name, round(us, 1), round(number, 1)) for name, (us, number) in longest],
    }


def _group_of(name: str) -> str:
    lower = name.lower()
    return next((group for group, parts in GROUPS if any(part in lower for part in parts)), "other")


class Table:
    """Prints rows beside those of the plain engine, and writes each as JSON."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._plain: dict[int, Measured] = {}
        columns = f"{'engine':22} {'seqs':>4} {'ms/step':>8} {'wait ms':>8} {'step/plain':>10}"
        print(f"{columns} {'tok/s':>9} {'gain':>6} accepted")

    def add(self, name: str, count: int, found: Measured, *, is_right: bool = True) -> None:
        if name == "plain":
            self._plain[count] = found
        plain = self._plain.get(count, found)
        step, gain = found.step_ms / plain.step_ms, found.tokens_per_second / plain.tokens_per_second
        wait = 1e3 * found.waited / max(found.steps, 1)
        print(f"{name:22} {count:4} {found.step_ms:8.3f} {wait:8.3f} {step:10.3f} {found.tokens_per_second:9.1f} "
              f"{gain:6.3f} {found.accepted:7.1%}", flush=True)  # fmt: skip
        row = {
            "engine": name,
            "sequences": count,
            "is_right": is_right,
            "step_ms": found.step_ms,
            "wait_ms": wait,
            "step": step,
            "tokens_per_second": found.tokens_per_second,
            "gain": gain,
            "accepted": found.accepted,
        }
        self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def run_engine(options: argparse.Namespace, folder: Path, head: Path, method: str | None, table: Table) -> None:
    """Open an engine and add all of its rows."""
    from bifolio import LLM
    from bifolio.engine.speculative.policy import DraftPolicy

    llm = LLM(str(folder), **engine_options(options, head, method))
    lengths = [0] if method is None else [*range(1, options.length + 1), -1]
    for length in lengths:
        if llm.engine.speculator is not None:
            longest = options.length if length < 0 else length  # without the measurements of fixed lengths
            is_late = llm.engine.speculator.policy.is_late
            llm.engine.speculator.policy = DraftPolicy(longest, adaptive=length < 0, is_late=is_late)
        name = "plain" if method is None else f"{method} {'chosen' if length < 0 else length}"
        for count in options.sequences:
            for _ in range(options.rounds if length <= 0 else 1):
                table.add(name, count, measure(llm, count, options.tokens, is_right=True))
                if length < 0:
                    wrong = measure(llm, count, options.tokens, is_right=False)
                    table.add(f"{name}, wrong", count, wrong, is_right=False)
            if options.profile and length >= 0:
                found = profile(llm, count)
                print(json.dumps({"profile": name, "sequences": count, **found}, indent=1), flush=True)
                table.write({"profile": name, "sequences": count, **found})
    llm.close()
    del llm
    gc.collect()


def engine_options(options: argparse.Namespace, head: Path, method: str | None) -> dict[str, Any]:
    """Options of `LLM`."""
    most = max(options.sequences)
    length = PROMPT + options.tokens + 64
    found: dict[str, Any] = {"max_model_len": length, "max_num_seqs": most, "enable_prefix_caching": False,
                             "num_blocks": 2 * most * (length // 16 + 2), "block_size": 16,
                             "deterministic": options.deterministic}  # fmt: skip
    if options.device == "torch":
        found |= {"device": "cpu", "kernels": "torch"}
    elif options.device == "interpret":
        from bifolio.kernels.triton import TritonKernels

        found |= {"device": "cpu", "kernels": TritonKernels("cpu", "f32", deterministic=options.deterministic)}
    else:
        found["device"] = options.device
    if method is not None:
        found["speculative_config"] = {"method": method, "num_speculative_tokens": options.length}
        if method == "eagle":
            found["speculative_config"]["model"] = str(head)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out/models"), help="folder for model files")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--tiny", action="store_true", help="few small layers")
    parser.add_argument("--share", type=float, default=0.6, help="of the drafts that are right")
    parser.add_argument("--device", default="cuda", help="cuda, torch or interpret")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--methods", nargs="*", default=["eagle", "mtp"], choices=["eagle", "mtp"])
    parser.add_argument("--length", type=int, default=3, help="the most drafts of a step")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=800, help="of each output")
    parser.add_argument("--rounds", type=int, default=2, help="of plain runs and of runs with chosen lengths")
    parser.add_argument("--profile", action="store_true", help="device time by kernel")
    parser.add_argument("--json", type=Path, help="append rows to this file")
    options = parser.parse_args()
    from bifolio.errors import ConfigError
    from bifolio.kernels.select import require_gpu

    if options.device.startswith("cuda"):
        try:
            require_gpu(options.device)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    base = options.models / ("tiny" if options.tiny else ".") / f"predictable-{options.shape}"
    folder, head = base.with_name(f"{base.name}-{options.share}"), base.with_name(f"{base.name}-{options.share}-eagle")
    config = tiny(SHAPES[options.shape]) if options.tiny else SHAPES[options.shape]
    base.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        write_pair(folder, config, options.share)
    if not (head / "config.json").exists():
        write_head(head, config, options.share)
    table = Table(options.json)
    for method in (None, *options.methods):
        run_engine(options, folder, head, method, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
