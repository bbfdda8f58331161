"""Measuring the engine: benchmarks, replayed request traces, and profiles of both phases.

The benchmarks use the engine's public methods only; no module of `engine/` imports this package.
"""
