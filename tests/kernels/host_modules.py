"""Kernels in CUDA C++, compiled for the host (`cuda_on_host.h`): `ON_HOST` lets tests launch them there."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import struct
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from bifolio.kernels.cuda import row_product

COMPILER = shutil.which("g++") or shutil.which("c++")
ON_HOST = pytest.mark.usefixtures("cuda_on_host")
HEADER = Path(__file__).with_name("cuda_on_host.h")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-pthread", "-ffp-contract=off")
CALL = """
extern "C" void run(const int *grid, int threads, const u64 *words) {{
    Dimensions size{{grid[0], grid[1], grid[2]}};
    run_grid(size, {cluster}, threads, [=] {{ {name}({arguments}); }});
}}
"""


class HostModule:
    """Stands for a compiled module: the same source, run on the host."""

    folder: Path

    def __init__(self, parts: tuple[str, ...], constants: dict[str, int]) -> None:
        self.name, self.cluster = parts[-1], constants.get("CLUSTER", 1)
        self.waits = constants.get("THIN_WIDTH", 0) > 0  # for other thread blocks: all run at the same time
        folder = resources.files("bifolio.kernels.cuda")
        texts = [folder.joinpath(f"{part}.cu").read_text("utf-8") for part in parts if part != "common"]
        defines = "".join(f"#define {name} {int(value)}\n" for name, value in constants.items())
        self.source = f'#include "{HEADER.name}"\n' + defines + "\n".join(texts)

    def function(self, name: str) -> HostModule:
        assert name == self.name
        return self

    def launch(self, grid: Any, block: int, arguments: Any, *, shared_bytes: int, pdl: bool) -> None:
        assert pdl
        assert shared_bytes <= row_product.SHARED_BYTES
        places = ", ".join(f"Word{{words[{i}]}}" for i in range(len(arguments)))
        call = CALL.format(cluster=grid[0] if self.waits else self.cluster, name=self.name, arguments=places)
        library = _compiled(self.source + call, self.folder)
        words = (ctypes.c_uint64 * len(arguments))(*map(_word, arguments))
        sizes = (ctypes.c_int * 3)(*grid, *[1] * (3 - len(grid)))
        library.run(sizes, block, words)


def _word(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.data_ptr())
    return value if isinstance(value, int) else int(struct.unpack("I", struct.pack("f", value))[0])


def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    if not library.exists():
        path = folder / f"{name}.cpp"
        path.write_text(source)
        subprocess.run([str(COMPILER), *FLAGS, "-shared", str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def compile_header(folder: Path) -> None:
    """Compile the header once for all sources in this folder."""
    header = Path(shutil.copy(HEADER, folder))
    subprocess.run([str(COMPILER), *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)


def normal(seed: int, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(ours.float()).all()
    assert float((ours.float() - theirs).norm() / theirs.norm()) < tolerance
