"""Measuring the engine: benchmarks, replayed request traces, and where the time of each phase goes.

Everything here drives the engine from outside, through the verbs that any caller has; nothing in `engine/` knows of it.
"""
