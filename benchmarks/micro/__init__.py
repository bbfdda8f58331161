"""Unit micro-benchmarks: single kernels, and the host work of a step without a device. No row of a table uses them."""
