"""Checks that `AttentionSegment.phase` selects the attention kernel of a set."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from attention_cases import attend, shape_of
from case_table import activations, new_context, normal, segment_over

from bifolio.errors import PhaseError
from bifolio.kernels.interface import AttentionPhase, Heads, KernelSet

PHASE_KERNELS = {  # set -> paths of its attention functions
    "reference": {
        AttentionPhase.PREFILL: "bifolio.kernels.reference.ReferenceKernels._attend_prefill",
        AttentionPhase.DECODE: "bifolio.kernels.reference.ReferenceKernels._attend_decode",
    },
    "torch": {
        AttentionPhase.PREFILL: "bifolio.kernels.torch_reference.TorchKernels._attend_prefill",
        AttentionPhase.DECODE: "bifolio.kernels.torch_reference.TorchKernels._attend_decode",
    },
    "triton": {
        AttentionPhase.PREFILL: "bifolio.kernels.triton.attention.prefill_attention",
        AttentionPhase.DECODE: "bifolio.kernels.triton.attention.decode_attention",
    },
}


def check_phase_selects(kernels: KernelSet, phase: AttentionPhase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same queries over the same contexts run the kernel of the segment's phase, and no other."""
    called: set[AttentionPhase] = set()
    for watched_phase, path in PHASE_KERNELS[kernels.name].items():
        monkeypatch.setattr(path, _watched(resolve_name(path), watched_phase, called))
    rng, shape, lengths = np.random.default_rng(0), shape_of("grouped"), [9, 33]
    context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
    attend(kernels, normal(rng, 2, shape.num_heads, shape.head_dim), shape, context, phase, [1, 1], lengths)
    assert called == {phase}


def _watched(honest: Any, phase: AttentionPhase, called: set[AttentionPhase]) -> Any:
    def watched(*arguments: Any, **options: Any) -> Any:
        called.add(phase)
        return honest(*arguments, **options)

    return watched


def check_decode_needs_a_cache(kernels: KernelSet) -> None:
    rng, shape = np.random.default_rng(0), shape_of("grouped")
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    heads = Heads(*(activations(kernels, normal(rng, 1, n, shape.head_dim)) for n in sizes))
    segment = segment_over(kernels, AttentionPhase.DECODE, [1], [1], None)
    with pytest.raises(PhaseError, match="decode reads the cache"):
        kernels.attend(heads, shape, (segment,), None)
