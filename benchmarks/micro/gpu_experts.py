"""Micro-benchmark: the experts of one layer of the gpt-oss-20b shape in MXFP4, random weights, inside CUDA graphs.

    python -m benchmarks.micro.gpu_experts --tokens 1,64,256 [--triton]

Every launch of a graph chooses other experts, so that the weights come from memory. `--triton` times the kernels
in Triton, which run where CUDA sources cannot be compiled.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_limits import time_in_graph
from benchmarks.shapes import SHAPES
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Experts, Linear, Norm, Routing
from bifolio.kernels.select import require_gpu
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

BLOCK_BYTES, SCALE_EXPONENT = 17, 120  # of MXFP4; random codes times 2 ** (120 - 127) are about 1 / sqrt(2880)
LAUNCHES = 24  # of a graph


def random_experts(count: int, depth: int, width: int) -> Experts:
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> QuantizedTensor:
        blocks = generator.integers(0, 256, (rows, columns // 32, BLOCK_BYTES), np.uint8)
        blocks[:, :, 0] = SCALE_EXPONENT
        return QuantizedTensor(QuantFormat.MXFP4, blocks.reshape(rows, -1), (rows, columns))

    def bias(rows: int) -> np.ndarray:
        return generator.standard_normal(rows).astype(np.float32)

    up = tuple(Linear((matrix(width, depth), matrix(width, depth)), (bias(width), bias(width))) for _ in range(count))
    down = tuple(Linear((matrix(depth, width),), (bias(depth),)) for _ in range(count))
    return Experts(up, down, "swiglu_clamped")


def choices(tokens: int, count: int, top_k: int) -> Routing:
    weights = torch.rand(tokens, top_k, device="cuda")
    chosen = torch.rand(tokens, count, device="cuda").topk(top_k, 1).indices.to(torch.int32)
    return Routing(chosen, weights / weights.sum(1, keepdim=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,2,4,16,64,256,2048")
    parser.add_argument("--triton", action="store_true", help="kernels in Triton alone")
    options = parser.parse_args()
    try:
        require_gpu("cuda")
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    from bifolio.kernels.triton import TritonKernels
    from bifolio.kernels.triton import experts as moe

    config = SHAPES["gpt-oss-20b"]
    if config.moe is None:
        return 1
    count, top_k, depth, width = config.moe.num_experts, config.moe.top_k, config.hidden_size, config.moe.expert_size
    kernels = TritonKernels("cuda", "bf16")
    with ExitStack() as stack:
        if options.triton:
            stack.enter_context(mock.patch.object(moe, "can_mix_fragments", return_value=False))
        experts = kernels.prepare_experts(random_experts(count, depth, width))
    one = sum(part.nbytes for linear in (experts.up[0], experts.down[0]) for part in linear.parts)  # bytes of an expert
    norm = Norm(torch.ones(depth, device="cuda", dtype=torch.bfloat16), None, 1e-5)
    for tokens in map(int, options.tokens.split(",")):
        x, residual = torch.randn(tokens, depth, device="cuda"), torch.randn(tokens, depth, device="cuda")
        routings = [choices(tokens, count, top_k) for _ in range(LAUNCHES if tokens < 1000 else 4)]
        own = x if tokens == 1 else x.to(torch.bfloat16)
        fused = norm if tokens == 1 else None
        launches = [
            partial(moe.mixed, own, routing, experts, torch.bfloat16, norm=fused, residual=residual)
            for routing in routings
        ]
        seconds = time_in_graph(launches, 5)
        used = sum(len(torch.unique(routing.experts)) for routing in routings) / len(routings)
        print(f"{tokens} tokens: {seconds * 1e6:.1f} us, {used:.1f} experts, {used * one / seconds / 1e12:.2f} TB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
