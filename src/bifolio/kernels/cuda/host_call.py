"""A function of the host that runs in the order of a stream, also of one that is being captured."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from bifolio.kernels.cuda.nvrtc import check, driver


def launch_host_call(function: int, argument: int) -> None:
    """Call `function(argument)` of a native library on torch's current stream; both must outlive it."""
    stream: Any = torch.cuda.current_stream()
    own = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(function), ctypes.c_void_p(argument)
    check(driver().cuLaunchHostFunc(*own), "cuLaunchHostFunc")
