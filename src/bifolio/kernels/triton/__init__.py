"""Kernels for GPUs, written in Triton."""

from bifolio.kernels.triton.kernel_set import TritonKernels

__all__ = ["TritonKernels"]
