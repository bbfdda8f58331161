"""Tensor parallelism: rank 0 plans, samples and sends commands; every rank runs its part of each pass."""
