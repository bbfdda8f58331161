"""A server of llama.cpp from the package xllamacpp, for a Python that has it: prints its address, ends with its input.

PYTHON benchmarks/tools/llama_server.py '{"model": "model.gguf", "n_ctx": 2048, ...}'
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", help="JSON: the model, the threads, and fields of CommonParams")
    wanted = json.loads(parser.parse_args().options)
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = wanted.pop("model")
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = wanted.pop("threads")
    for name, value in wanted.items():
        setattr(params, name, value)
    server = llama.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
