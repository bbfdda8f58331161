"""Sources in CUDA C++ that are compiled together define every function once: no GPU is needed to see it."""

from __future__ import annotations

import re
from collections import Counter
from importlib import resources

import pytest

TOGETHER = {
    "row_product": ("common", "activations", "row_changes"),
    "row_attention": ("common",),
    "row_delta": ("common", "activations"),
    "mxfp4_few": ("common", "activations", "mxfp4_common"),
    "mxfp4_grouped": ("common", "activations", "mxfp4_common"),
}
DEFINITION = re.compile(r"^__device__ __forceinline__ \w+ (\w+\([^)]*\))", re.MULTILINE)


@pytest.mark.parametrize("name", TOGETHER)
def test_functions_are_defined_once(name: str) -> None:
    folder = resources.files("bifolio.kernels.cuda")
    texts = [folder.joinpath(f"{part}.cu").read_text("utf-8") for part in (*TOGETHER[name], name)]
    texts = [re.sub(r"^#else$.*?^#endif$", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    found = Counter(function for text in texts for function in DEFINITION.findall(text))
    assert found
    assert {function for function, count in found.items() if count > 1} == set()
