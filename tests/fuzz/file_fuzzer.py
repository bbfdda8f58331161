"""Damaged model files and hostile chat templates in children with limits: each is used, or refused by a named error.

    PYTHONPATH=src:tests python tests/fuzz/file_fuzzer.py --files 25000 --templates 1000

The run fails on a signal, on 10 seconds of CPU time, on 512 MiB of memory above the valid file, and on an error that is
not one of `bifolio.errors`. `--case N` runs one file in this process, to study it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.update(RUST_BACKTRACE="0")
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

import numpy as np
from fork_server import Report, run_cases
from hostile_templates import template
from samples import Sample, samples

from bifolio.text.chat_template import render_chat
from mutations import mutate

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a" * 1000}]
KINDS = ("config", "tokenizer", "gguf", "safetensors", "llama2.c")


class FileCases:
    """Files by number: the kinds take turns, so that each gets an equal share."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self._folder = folder
        self._seed = seed
        made = samples(folder)
        self._by_kind = {kind: [sample for sample in made if sample.kind == kind] for kind in KINDS}
        self._open_valid(made)

    def sample(self, case: int) -> Sample:
        return self._generator(case).choice(self._by_kind[KINDS[case % len(KINDS)]])

    def content(self, case: int) -> bytes:
        rng = self._generator(case)
        return mutate(rng.choice(self._by_kind[KINDS[case % len(KINDS)]]), rng)

    def label(self, case: int) -> str:
        return f"file {case} ({self.sample(case).name})"

    def run(self, case: int) -> str:
        """Write the file and use it."""
        sample, folder = self.sample(case), Path(tempfile.mkdtemp(dir=self._folder))
        try:
            self._use(sample, self.content(case), folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return "used"

    def _use(self, sample: Sample, content: bytes, folder: Path) -> None:
        path = folder / sample.file_name
        path.write_bytes(content)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            sample.open(path)

    def _open_valid(self, made: list[Sample]) -> None:
        """The undamaged files must work; this also imports all modules before the first fork."""
        for sample in made:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self._use(sample, sample.content, folder)

    def _generator(self, case: int) -> random.Random:
        return random.Random(f"{self._seed}/{case}")


def run_files(count: int, seed: int, progress: int = 0, first: int = 0) -> Report:
    with tempfile.TemporaryDirectory() as name:
        cases = FileCases(Path(name), seed)
        return run_cases(first, count, cases.run, cases.label, progress)


def run_templates(count: int, seed: int, progress: int = 0, first: int = 0) -> Report:
    def run(case: int) -> str:
        render_chat(template(case, seed), MESSAGES, special_tokens={"bos_token": "<s>"})
        return "used"

    render_chat("{{ messages }}", MESSAGES)
    return run_cases(first, count, run, lambda case: f"template {case} ({template(case, seed)[:160]!r})", progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=25_000, help="number of damaged files")
    parser.add_argument("--templates", type=int, default=1000, help="number of hostile templates")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this file alone, in this process")
    arguments = parser.parse_args()
    if arguments.case is not None:
        with tempfile.TemporaryDirectory() as name:
            print(FileCases(Path(name), arguments.seed).run(arguments.case))
        return
    runs: list[tuple[str, int, Callable[..., Report]]] = [
        ("files", arguments.files, run_files),
        ("templates", arguments.templates, run_templates),
    ]
    summary, failures = {}, 0
    for name, count, run in runs:
        if not count:
            continue
        began = time.monotonic()
        report = run(count, arguments.seed, 1000, arguments.first)
        for failure in report.failures[:100]:
            print(failure)
        summary[name] = {**report.as_dict(), "seconds": round(time.monotonic() - began)}
        failures += len(report.failures)
    print(json.dumps(summary, indent=2))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
