"""LongRoPE on the Triton kernels: captured decodes and prompts of short and long requests in one batch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio.config import SpeculativeConfig
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels
from helpers import make_engine
from long_rope_requests import long_rope_model, run_all, scores_of, tokens_of

DEVICE, DTYPE = "cpu", "f32"


@pytest.mark.parametrize("with_drafts", [False, True])
def test_each_request_of_a_batch_has_its_own_factors(with_drafts: bool) -> None:
    names = ("short", "long output", "just long")
    expected = run_all(make_engine(long_rope_model(), kernels=ReferenceKernels()), names)
    drafts = SpeculativeConfig("ngram", length=2, adaptive=False) if with_drafts else None
    engine = make_engine(
        long_rope_model(), kernels=TritonKernels(DEVICE, DTYPE), max_num_seqs=4, speculative=drafts, max_model_len=48
    )
    for name, found in run_all(engine, names).items():
        assert tokens_of(found) == tokens_of(expected[name])
        np.testing.assert_allclose(scores_of(found), scores_of(expected[name]), atol=2e-3)
