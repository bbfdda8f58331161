"""Captured passes: one cache of CUDA graphs for all parts of a step."""
