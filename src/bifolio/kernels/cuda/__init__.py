"""Kernels for GPUs in CUDA C++, compiled at run time, for the few passes that Triton cannot express."""
