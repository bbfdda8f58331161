"""Matrix products on a GPU: cuBLAS for many rows, our kernels, with adjacent operations fused in, for few."""

from __future__ import annotations

from typing import Any

import torch

from bifolio.kernels.cuda.row_product import RowChange, can_multiply, row_product
from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.kernels.triton import fp8, fp8_rows, quantised
from bifolio.kernels.triton.adapter_changes import Change
from bifolio.kernels.triton.epilogue import NO_ACTIVATION
from bifolio.kernels.triton.fp8 import Fp8Weight
from bifolio.kernels.triton.gemm_small_m import few_rows
from bifolio.kernels.triton.gemm_tuning import library_is_faster, most_rows
from bifolio.kernels.triton.gemv import one_row
from bifolio.kernels.triton.lazy_fusion import Normed, Product, Sum, tensor
from bifolio.kernels.triton.norm import ACTIVATIONS, act_mul
from bifolio.kernels.triton.quantised import PackedWeights, QuantisedWeight
from bifolio.kernels.triton.tma import can_be_described

EXACT_ROWS = 512  # up to this number, products added to the residual stream stay in f32


class Products:
    """Chooses and launches the kernel of each product."""

    def __init__(
        self, weights: PackedWeights, dtype: torch.dtype, *, deterministic: bool, num_processors: int = 0
    ) -> None:
        """`num_processors`: multiprocessors of a GPU; 0: there is none."""
        self._weights, self._dtype, self._deterministic = weights, dtype, deterministic
        self._num_processors = num_processors
        self.begins_pass = False  # the next product is the first one of a pass

    def linear(self, x: torch.Tensor | Normed, linear: Linear) -> Product:
        rows = x.rows if isinstance(x, Normed) else int(x.shape[0])
        return Product(x, linear, self._multiply if self._is_ours(rows, linear) else self._library_multiply)

    def exact(self, x: torch.Tensor | Normed, linear: Linear) -> torch.Tensor:
        """f32[rows, outputs]"""
        product = self.linear(x, linear)
        if product.compute == self._multiply:
            return self._multiply(product, None, None, torch.float32)
        return self._library_exact(tensor(x), linear)

    def before_activation(self, product: Product) -> torch.Tensor:
        """Gate and up of a product, for an activation in another kernel.

        They stay f32 in deterministic mode, as in the fused kernel: a row has the same bits with both.
        """
        if self._deterministic:
            return self._multiply(product, None, None, torch.float32)
        return tensor(product.compute(product, None, None))

    def adds_changes(self, product: Product, is_divided: bool) -> bool:
        """Whether the kernel of a product adds the changes of adapters to its sums itself.

        `is_divided`: each tile of its columns belongs to one part. Never in deterministic mode: there the order of the
        sums of a row may not depend on the adapters of other rows.
        """
        weight = product.linear.prepared[0] if product.linear.prepared is not None else None
        return (
            is_divided
            and product.compute == self._multiply
            and not self._deterministic
            and product.rows > 1
            and isinstance(weight, torch.Tensor | Fp8Weight)
            and not (isinstance(weight, Fp8Weight) and fp8_rows.rounds(product.rows, self._dtype))
        )

    def adds_row_change(
        self, product: Product, change: RowChange, activation: str | None, residual: torch.Tensor | None
    ) -> bool:
        """The same for one row, whose kernel computes the thin values, too."""
        weight = product.linear.prepared[0] if product.linear.prepared is not None else None
        if (
            product.compute != self._multiply
            or self._deterministic
            or not self._num_processors
            or not isinstance(weight, torch.Tensor | Fp8Weight)
            or (activation is not None and change.parts != 2)
        ):
            return False
        values, _, group = fp8.parts_of(weight)
        x, own = _operand(product)
        return group in (0, values.shape[1]) and can_multiply(
            x, values, norm=own, residual=residual, gated=activation is not None, num_processors=self._num_processors,
            change=change,
        )  # fmt: skip

    def changed(
        self, product: Product, change: Change | RowChange, activation: str | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """A product with the changes of adapters; thin values of several rows were launched just before."""
        return self._multiply(product, activation, residual, change=change)

    def _is_ours(self, rows: int, linear: Linear) -> bool:
        """Whether our own kernels multiply, with the operations before and after fused in.

        Always true in deterministic mode: neither fusion nor the order of sums may depend on the number of rows.
        """
        if not rows or linear.prepared is None:
            return False
        weight = linear.prepared[0]
        if self._deterministic or isinstance(weight, QuantisedWeight):
            return self._deterministic or rows <= quantised.FEW_ROWS
        if isinstance(weight, Fp8Weight):
            return rows <= fp8_rows.SOME_ROWS
        gated = len(linear.parts) == 2
        outputs, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        described = rows <= most_rows(gated) and can_be_described(weight)  # not checked for the many rows of a prompt
        return not library_is_faster(rows, outputs, depth, gated=gated, described=described)

    def _multiply(
        self,
        product: Product,
        activation: str | None,
        residual: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        change: Change | RowChange | None = None,
    ) -> torch.Tensor:
        weight, bias = product.linear.prepared
        out_dtype = out_dtype or (self._dtype if residual is None else residual.dtype)
        options: dict[str, Any] = {"bias": bias, "residual": residual, "activation": activation, "out_dtype": out_dtype}
        is_packed = isinstance(weight, QuantisedWeight)
        if isinstance(weight, Fp8Weight) and fp8_rows.rounds(product.rows, self._dtype) and not self._deterministic:
            return fp8_rows.some_rows(tensor(product.x), weight, **options)
        if isinstance(change, Change):
            return few_rows(tensor(product.x), weight, change=change, **options)
        if product.rows > 1 or self._deterministic:
            few = quantised.few_rows if is_packed else few_rows
            return few(tensor(product.x), weight, fixed=self._deterministic, **options)
        x, options["norm"] = _operand(product)
        if is_packed:
            return quantised.one_row(x, weight, **options)
        values, scales, group = fp8.parts_of(weight)
        if self._num_processors and group in (0, values.shape[1]):
            own: dict[str, Any] = {
                "norm": options["norm"], "residual": residual, "num_processors": self._num_processors, "change": change,
            }  # fmt: skip
            if can_multiply(x, values, gated=activation is not None, **own):
                own["is_first"], self.begins_pass = self.begins_pass, False
                own["activation"] = NO_ACTIVATION if activation is None else ACTIVATIONS[activation]
                row_scales = scales if group else None
                return row_product(x, values, row_scales=row_scales, bias=bias, out_dtype=out_dtype, **own)
        return one_row(x, weight, **options)

    def _library_multiply(self, product: Product, activation: str | None, residual: torch.Tensor | None) -> Array:
        """Multiply many rows by cuBLAS; products added to the residual stream are f32 up to `EXACT_ROWS` rows."""
        x = tensor(product.x)
        if residual is not None and x.shape[0] <= EXACT_ROWS:
            return Sum(residual, self._library_exact(x, product.linear))
        y = self._weights.linear(x, product.linear)
        if residual is not None:
            return Sum(residual, y)
        return y if activation is None else act_mul(y, activation)

    def _library_exact(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """f32[rows, outputs]; on a GPU cuBLAS writes f32."""
        weight, bias = linear.prepared or (None, None)
        if not x.is_cuda or not isinstance(weight, torch.Tensor) or bias is not None or x.dtype == torch.float32:
            return self._weights.linear(x, linear).float()
        return torch.mm(x, weight.T, out_dtype=torch.float32)


def _operand(product: Product) -> tuple[torch.Tensor, Norm | None]:
    """The rows that are multiplied, and the norm that the product computes."""
    if isinstance(product.x, Normed) and product.x.value is None:
        return product.x.x, product.x.norm
    return tensor(product.x), None
