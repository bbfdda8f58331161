"""CUDA C++ compiled at run time by NVRTC, the compiler library that torch installs, and launched on torch's stream.

Sources include no headers, since a machine without the CUDA toolkit has none. Machine code is kept on disk, named by a
digest of source, options, architecture and compiler, so that only the first start compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from bifolio.errors import KernelCompileError
from bifolio.folders import cache_dir

DEPENDENT = 6  # launch attribute of the driver: programmatic dependent launch
MAX_SHARED_BYTES = 8  # function attribute of the driver: dynamic shared memory
PLAIN_SHARED_BYTES = 48 * 1024  # dynamic shared memory that needs no attribute


logger = logging.getLogger(__name__)


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaFunction:
    """A kernel on the current device."""

    def __init__(self, module: CudaModule, name: str) -> None:
        self._module, self._shared_bytes = module, 0
        self._handle = ctypes.c_void_p()
        check(driver().cuModuleGetFunction(ctypes.byref(self._handle), module.handle, name.encode()), name)

    def launch(
        self,
        grid: Sequence[int],
        block: int,
        arguments: Sequence[torch.Tensor | int | float],
        *,
        shared_bytes: int = 0,
        pdl: bool = False,
    ) -> None:
        """Launch on torch's current stream. Tensors are pointers, integers 32 bits, floats f32.

        `pdl`: the kernel may start before the preceding one has ended (and waits itself, `griddepcontrol.wait`).
        """
        if shared_bytes > max(self._shared_bytes, PLAIN_SHARED_BYTES):
            check(driver().cuFuncSetAttribute(self._handle, MAX_SHARED_BYTES, shared_bytes), "shared memory")
            self._shared_bytes = shared_bytes
        values = [_argument(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        attributes = (_LaunchAttribute * 1)(_LaunchAttribute(DEPENDENT, b"", 1))
        stream: Any = torch.cuda.current_stream()
        config = _LaunchConfig(
            (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
            (ctypes.c_uint * 3)(block, 1, 1),
            shared_bytes,
            stream.cuda_stream,
            attributes,
            int(pdl),
        )
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self._handle, pointers, None), "launch")


class CudaModule:
    """Compiled kernels, loaded on the current device."""

    def __init__(self, cubin: bytes) -> None:
        torch.zeros(1, device="cuda")  # makes torch's context the current one
        self.handle = ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(self.handle), cubin), "load")
        self._functions: dict[str, CudaFunction] = {}

    def function(self, name: str) -> CudaFunction:
        """A kernel declared `extern "C"`."""
        if name not in self._functions:
            self._functions[name] = CudaFunction(self, name)
        return self._functions[name]


def is_available() -> bool:
    """Whether this machine has NVRTC and a GPU of compute capability 9.0 or higher."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return False
    return _compiler() is not None


def compile_module(source: str, name: str, options: Sequence[str] = ()) -> CudaModule:
    """Compile kernels for the current device, or load them from the disk. `name` appears in errors."""
    major, minor = torch.cuda.get_device_capability()
    suffix = "a" if (major, minor) >= (9, 0) else ""
    return CudaModule(compiled(source, name, f"sm_{major}{minor}{suffix}", options))


@cache
def load_source(parts: tuple[str, ...], device: int, **constants: int) -> CudaModule:
    """The kernels of joined sources of this package (`NAME.cu`), loaded on the current device, which is `device`."""
    folder = resources.files("bifolio.kernels.cuda")
    source = "".join(folder.joinpath(f"{part}.cu").read_text("utf-8") for part in parts)
    return compile_module(source, parts[-1], [f"-D{name}={int(value)}" for name, value in constants.items()])


@cache
def works() -> bool:
    """Whether kernels for one row can be compiled and loaded: on Hopper, whose shared memory and clusters they use."""
    if not is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        compile_module('extern "C" __global__ void nothing() {}', "nothing").function("nothing")
    except KernelCompileError as error:
        logger.warning("kernels in CUDA C++ are not used: %s", error)
        return False
    return True


def compiled(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The machine code of a source, kept on disk."""
    compiler = _compiler()
    if compiler is None:
        raise KernelCompileError(f"{name} cannot be compiled: libnvrtc was not found; install torch with CUDA")
    major, minor = ctypes.c_int(), ctypes.c_int()
    compiler.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    flags = (f"--gpu-architecture={architecture}", "--std=c++17", *options)
    digest = hashlib.sha256("\0".join((source, *flags, f"{major.value}.{minor.value}")).encode()).hexdigest()
    kept = cache_dir() / "cubins" / f"{name}-{digest[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        cubin = _compile(compiler, source, name, flags)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(kept)
    except OSError:
        pass  # a disk without room or rights costs the next start a compilation
    return cubin


def _compile(compiler: Any, source: str, name: str, flags: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
    try:
        given = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        if compiler.nvrtcCompileProgram(program, len(flags), given):
            size = ctypes.c_size_t()
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise KernelCompileError(f"{name} does not compile: {log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _argument(value: torch.Tensor | int | float) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def check(status: int, action: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelCompileError(f"CUDA driver, {action}: {(text.value or b'unknown error').decode()} ({status})")


@cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> Any:
    """libnvrtc of the CUDA version that torch was built with; None: not found."""
    major = (torch.version.cuda or "0").split(".")[0]
    soname = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    found = [
        path
        for root in (spec.submodule_search_locations or () if spec else ())
        for path in Path(root).glob(f"*/lib/{soname}")
    ]
    for candidate in (*map(str, found), soname):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None
