"""Benchmarks of bifolio and of other engines: rows, one runner, one table, one plot, one JSON.

    python -m benchmarks list
    python -m benchmarks run cpu --engines bifolio,llama.cpp --json found.json
    python -m benchmarks table found.json

A row is a workload on a model file or folder, such as `S-q4_0/decode1`. Every engine opens that file through its public
interface, in a process of its own, with default options unless the row or the column is about an option. Engines run in
turns, and every pass is kept. `micro/` holds unit micro-benchmarks of single parts, `tools/` studies with a result of
their own kind.
"""
