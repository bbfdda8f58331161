"""LongRoPE on a GPU: CUDA graphs of short and long requests in one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bifolio.config import SpeculativeConfig
from bifolio.kernels.reference import ReferenceKernels
from built_engines import built_engine
from long_rope_requests import REQUESTS, long_rope_model, run_all, scores_of, tokens_of


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("with_drafts", [False, True])
def test_each_request_of_a_batch_has_its_own_factors(with_drafts: bool, gpu_kernels: Callable[..., Any]) -> None:
    expected = run_all(built_engine(long_rope_model(), kernels=ReferenceKernels()))
    drafts = SpeculativeConfig("ngram", length=2, adaptive=False) if with_drafts else None
    found = []
    for length in (48, 256):
        kernels = gpu_kernels("f32", deterministic=True)
        engine = built_engine(long_rope_model(), kernels=kernels, speculative=drafts, max_model_len=length)
        assert engine.slots.device is not None
        found.append(run_all(engine))
    for name in REQUESTS:
        assert tokens_of(found[0][name]) == tokens_of(found[1][name]) == tokens_of(expected[name])
        assert scores_of(found[0][name]).tolist() == scores_of(found[1][name]).tolist()
        np.testing.assert_allclose(scores_of(found[0][name]), scores_of(expected[name]), atol=5e-3)
