"""The process group of a trainer and an engine: the choice of its backend, and tensors over two ranks of gloo."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bifolio.api import stream_group
from bifolio.api.stream_group import StreamGroup, chosen_backend
from bifolio.api.weight_stream import PREFIX, WeightStream
from bifolio.errors import ConfigError

torch = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")


@pytest.mark.parametrize(
    ("wanted", "device", "has_nccl", "expected"),
    [
        ("", "cpu", True, "gloo"),
        ("", "cuda", True, "nccl"),
        ("", "cuda", False, "gloo"),
        ("gloo", "cuda", True, "gloo"),
        ("nccl", "cuda:1", True, "nccl"),
    ],
)
def test_the_backend_follows_from_both_ends(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, has_nccl: bool, expected: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(stream_group, "uuid_of", lambda device: "GPU-1")
    assert chosen_backend(wanted, device) == expected
    assert chosen_backend(wanted, device, "GPU-2") == expected


def test_a_backend_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_group, "uuid_of", lambda device: "GPU-1")
    for has_nccl, arguments, message in (
        (True, ("nccl", "cpu"), "the engine is on cpu"),
        (False, ("nccl", "cuda"), "has no NCCL here"),
        (True, ("mpi", "cuda"), "nccl or gloo"),
        (True, ("", "cuda", "GPU-1"), "one GPU"),
    ):
        monkeypatch.setattr(dist, "is_nccl_available", lambda has_nccl=has_nccl: has_nccl)
        with pytest.raises(ConfigError, match=message):
            chosen_backend(*arguments)
    assert chosen_backend("gloo", "cuda", "GPU-1") == "gloo"


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_trainer_sends_tensors_to_rank_0(kind: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    sent = [torch.randn(3, 5).to(getattr(torch, kind)), torch.ones((), dtype=getattr(torch, kind))]

    def train() -> None:
        other = dist.TCPStore("127.0.0.1", store.port, 2, is_master=False)
        group, options = dist.ProcessGroupGloo(dist.PrefixStore(PREFIX, other), 1, 2), dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 1, 0
        for tensor in sent:
            group.broadcast([tensor], options).wait()
            group.barrier().wait()

    trainer = threading.Thread(target=train)
    trainer.start()
    group = StreamGroup("gloo", dist.PrefixStore(PREFIX, store), 2, "cpu")
    found = [group.receive(kind, tensor.shape) for tensor in sent]
    trainer.join(30)
    assert all(torch.equal(a, b) for a, b in zip(sent, found, strict=True))
    group.abort()


def test_the_stream_refuses_nccl_beside_the_cpu() -> None:
    stream = WeightStream("cpu")
    with pytest.raises(ConfigError, match="NCCL sends from GPU to GPU"):
        stream.join("127.0.0.1", 1, 2, "nccl")
    stream.leave()
