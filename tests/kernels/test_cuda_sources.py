"""Sources in CUDA C++ that are compiled together define every function once: no GPU is needed to see it."""

from __future__ import annotations

import re
from collections import Counter
from importlib import resources

import pytest

pytest.importorskip("torch")

from bifolio.kernels.cuda import row_attention, row_delta, row_product

FEW_PARTS = ("common", "activations", "mxfp4_common")
TOGETHER = {
    "row_product": row_product.SOURCES,
    "row_attention": row_attention.SOURCES,
    "row_delta": row_delta.SOURCES,
    "mxfp4_few": (*FEW_PARTS, "mxfp4_few"),
    "mxfp4_grouped": (*FEW_PARTS, "mxfp4_grouped"),
}
DEFINITION = re.compile(r"^__device__ __forceinline__ \w+ (\w+)\(", re.MULTILINE)


@pytest.mark.parametrize("name", TOGETHER)
def test_functions_are_defined_once(name: str) -> None:
    folder = resources.files("bifolio.kernels.cuda")
    texts = [folder.joinpath(f"{part}.cu").read_text("utf-8") for part in TOGETHER[name]]
    found = Counter(function for text in texts for function in DEFINITION.findall(text))
    assert found
    assert {function for function, count in found.items() if count > 1} == set()
