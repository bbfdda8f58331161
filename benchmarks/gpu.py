"""Run the GPU benchmark from a source tree: `PYTHONPATH=src python benchmarks/gpu.py --out results`."""

from __future__ import annotations

import sys

from bifolio.measure.gpu import main

if __name__ == "__main__":
    sys.exit(main())
