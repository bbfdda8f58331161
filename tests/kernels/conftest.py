"""Makes modules beside the tests importable, and runs kernels in CUDA C++ on the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def host_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from host_modules import compile_header

    folder = tmp_path_factory.mktemp("cuda_on_host")
    compile_header(folder)
    return folder


@pytest.fixture
def cuda_on_host(monkeypatch: pytest.MonkeyPatch, host_folder: Path) -> None:
    """Kernels in CUDA C++ run on the host (`host_modules`)."""
    import torch
    from host_modules import HostModule

    from bifolio.kernels.cuda import nvrtc

    monkeypatch.setattr(HostModule, "folder", host_folder, raising=False)
    monkeypatch.setattr(nvrtc, "load_source", lambda parts, device, **constants: HostModule(parts, constants))
    monkeypatch.setattr(nvrtc, "works", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
