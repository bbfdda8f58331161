"""The types of dense weights on torch tensors, by their names in the configuration."""

from __future__ import annotations

import torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bf16"; torch's own name for types that no kernel set takes."""
    return next((name for name, known in DTYPES.items() if known is dtype), str(dtype))
