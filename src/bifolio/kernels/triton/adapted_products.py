"""Products of a pass with adapters, as deferred values: the operation behind a product is fused with its change."""

from __future__ import annotations

import torch

from bifolio.kernels.triton import norm
from bifolio.kernels.triton.adapters import GroupedRows, ProductPlan, change_of, expand, row_change_of, shrink
from bifolio.kernels.triton.lazy_fusion import Deferred, Product, Sum, tensor
from bifolio.kernels.triton.products import Products


def adapted(
    y: torch.Tensor | Deferred,
    x: torch.Tensor | Deferred,
    plan: ProductPlan,
    grouped: GroupedRows,
    products: Products,
) -> torch.Tensor | Product:
    """The product y of x with the changes of the adapters of its rows."""
    if not isinstance(y, Product) or y.value is not None:
        return expand(tensor(y).clone(), shrink(tensor(x).to(grouped.base.dtype), plan, grouped), plan, grouped)
    plain = y

    def compute(own: Product, activation: str | None, residual: torch.Tensor | None) -> torch.Tensor | Sum:
        if plain.rows == 1:
            change = row_change_of(plan, grouped)
            if products.adds_row_change(plain, change, activation, residual):
                return products.changed(plain, change, activation, residual)
        x = tensor(plain.x)
        if products.adds_changes(plain, plan.is_gated if activation is not None else plan.is_tiled):
            return products.changed(plain, change_of(x, plan, grouped), activation, residual)
        thin = shrink(x, plan, grouped)  # before the product, which reads its weights meanwhile
        if activation is not None and plan.is_gated:
            return expand(products.before_activation(plain), thin, plan, grouped, activation)
        result = plain.compute(plain, None, residual)
        expand(result.delta if isinstance(result, Sum) else result, thin, plan, grouped)
        return result if activation is None else norm.act_mul(tensor(result), activation)

    return Product(y.x, y.linear, compute, is_adapted=True)  # type: ignore[arg-type]
