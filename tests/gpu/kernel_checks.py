"""Every kernel for GPUs against torch in float32, over odd shapes.

The GPU runs all checks (`test_gpu_kernels.py`), Triton's interpreter the small ones (tests/interpreter). Inputs are
drawn fresh, and outputs that are written in place are poisoned before they are computed.
"""

from __future__ import annotations

from attention_checks import cache_checks, decode_checks, prefill_checks
from check_bench import Check
from chosen_checks import chosen_checks
from gemm_checks import norm_checks, product_checks
from latent_checks import latent_checks
from quantised_checks import quantised_checks
from row_checks import row_checks
from shared_attention_checks import shared_attention_checks
from tma_checks import fixed_checks, tma_checks

CHECKS: list[Check] = [
    *norm_checks(),
    *product_checks(),
    *row_checks(),
    *tma_checks(),
    *fixed_checks(),
    *cache_checks(),
    *decode_checks(),
    *shared_attention_checks(),
    *prefill_checks(),
    *chosen_checks(),
    *latent_checks(),
    *quantised_checks(),
]
