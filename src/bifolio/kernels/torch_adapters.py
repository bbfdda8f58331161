"""Low-rank adapters on torch tensors: one product after the other, differentiable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import Adapter, AdapterUse, Array, Batch, ExpertLowRank, LowRank

UP, DOWN = 0, 1  # sites of the products of one expert


def on_torch(adapter: Adapter, tensor: Callable[[Any], torch.Tensor]) -> Adapter:
    """The adapter with its matrices as tensors."""

    def each(parts: tuple[LowRank, ...]) -> tuple[LowRank, ...]:
        return tuple(
            replace(
                part,
                down=None if part.down is None else tensor(part.down),
                up=tensor(part.up),
                bias=None if part.bias is None else tensor(part.bias),
            )
            for part in parts
        )

    products = {site: each(parts) for site, parts in adapter.products.items()}
    experts = {
        site: tuple(ExpertLowRank(each(own.up), each(own.down)) for own in every)
        for site, every in adapter.experts.items()
    }
    return Adapter(products, experts, each(adapter.embedding))


def adapted_embedding(x: torch.Tensor, ids: torch.Tensor, scale: float, adapters: AdapterUse) -> Array:
    """x with the changes of the table by the adapters of the tokens."""
    for number, adapter in enumerate(adapters.loaded):
        rows = np.flatnonzero(adapters.rows == number)
        if not len(rows) or not adapter.embedding:
            continue
        x, places = x.clone(), torch.from_numpy(rows).to(x.device)
        for part in adapter.embedding:
            own = part.up[ids[places]]
            own = own if part.down is None else own @ part.down
            own = (own * scale).to(x.dtype)
            x[places] = own if part.down is None else x[places] + own
    return x


def adapted(y: torch.Tensor, x: torch.Tensor, site: int, adapters: AdapterUse) -> torch.Tensor:
    """y + up (down x) + bias for the tokens of each adapter."""
    for number, adapter in enumerate(adapters.loaded):
        parts, rows = adapter.products.get(site, ()), np.flatnonzero(adapters.rows == number)
        if not len(rows) or not parts:
            continue
        y, places = y.clone(), torch.from_numpy(rows).to(y.device)
        for part in parts:
            if part.down is None:
                own = x[places].to(part.up.dtype) @ part.up.T
                y[places] = (own if part.bias is None else own + part.bias).to(y.dtype)
                continue
            change = (x[places].to(part.down.dtype) @ part.down.T) @ part.up.T
            change = change if part.bias is None else change + part.bias
            columns = torch.arange(part.column, part.column + change.shape[1], device=y.device)
            y[places[:, None], columns] += change.to(y.dtype)
    return y


def adapted_logits(y: torch.Tensor, x: torch.Tensor, site: int, batch: Batch) -> torch.Tensor:
    """The logits y of the rows x with the changes of the head by the adapters of a batch."""
    rows = None if batch.logit_rows is None else torch.as_tensor(batch.logit_rows).cpu().numpy()
    own = replace(batch, logit_rows=rows).logit_adapters
    return y if own is None else adapted(y, x, site, own)


def of_expert(adapters: AdapterUse, tokens: torch.Tensor, site: int, number: int) -> AdapterUse:
    """The adapters of the tokens of one expert, whose two products are the sites `UP` and `DOWN`."""
    each = [adapter.experts[site][number] if site in adapter.experts else ((), ()) for adapter in adapters.loaded]
    loaded = tuple(Adapter({UP: up, DOWN: down}) for up, down in each)
    return AdapterUse(loaded, adapters.rows[tokens.cpu().numpy()])
