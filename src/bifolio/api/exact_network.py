"""The network with the values of the engine's kernels and the gradients of torch.

On the CPU each operation is computed twice: by torch, which knows its gradient, and by the native kernels, whose value
the next operation reads. So the values of a pass are those of the engine to the last bit, and its gradients are those
of torch at these values.

On a GPU the engine's kernels fuse operations, so the whole pass is computed twice: the logprobs are the engine's, and
their gradients those of torch's own pass.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array, Batch, Experts, KernelSet, Routing
from bifolio.kernels.operation_hook import hooked, operations_of
from bifolio.model import transformer
from bifolio.model.weights import ModelWeights, prepare


class _WithValue(torch.autograd.Function):
    """A given value with the gradient of another tensor."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def with_value(like: torch.Tensor, value: np.ndarray) -> torch.Tensor:
    """These numbers, with the gradient of `like`."""
    found = torch.from_numpy(np.array(value, np.float32)).reshape(like.shape).to(like.device)
    result: torch.Tensor = _WithValue.apply(like, found)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def engine_logits(weights: ModelWeights, batch: Batch, kernels: KernelSet) -> Array:
    """Logits f32[t, vocab] of a fresh batch by a deterministic set, as those of an engine with these weights."""
    return transformer.forward(prepare(weights, kernels), batch, kernels, None)


def exact_kernels(differentiable: KernelSet, native: KernelSet) -> KernelSet:
    """The first set with the values of the second."""
    if differentiable.device != "cpu" or differentiable.kv_dtype != "f32" or not native.deterministic:
        raise ConfigError(
            "exact logprobs need parameters in float32 on the CPU and the native kernels: move the model with "
            ".float().cpu(), or pass exact=False"
        )
    theirs = operations_of(native)
    theirs["embed"] = partial(_embed, native)
    return hooked(
        differentiable, lambda name, work, *arguments, **options: _both(work, theirs[name], arguments, options)
    )


def _both(work: Any, twin: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = work(*arguments, **options)
    with torch.no_grad():  # operations of the native set may change their rows in place
        rows = [_on_host(each, copied=isinstance(each, torch.Tensor)) for each in arguments]
        value = twin(*rows, **{name: _on_host(each) for name, each in options.items()})
    return _joined(result, value)


def _embed(native: KernelSet, table: np.ndarray, ids: np.ndarray, *arguments: Any, **options: Any) -> Any:
    return native.embed(native.prepare_embedding(table), ids, *arguments, **options)


def _on_host(value: Any, copied: bool = False) -> Any:
    """A value with numpy arrays in place of tensors, at any depth; experts are not prepared for another kernel set."""
    if isinstance(value, Experts):
        value = replace(value, prepared=None)
    if isinstance(value, torch.Tensor):
        array = value.detach().numpy()
        return np.array(array, order="C") if copied else array
    if isinstance(value, tuple):
        parts = [_on_host(part, copied) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_on_host(part, copied) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Experts):  # prepared for torch: the native set packs the matrices itself
            value = replace(value, prepared=None)
        parts_by_name = {one.name: _on_host(getattr(value, one.name), copied) for one in fields(value) if one.init}
        return replace(value, **parts_by_name)
    return value


def _joined(result: Any, value: Any) -> Any:
    """The results of both sets as one."""
    if isinstance(result, torch.Tensor):
        if result.is_floating_point():
            return with_value(result, value)
        return torch.from_numpy(np.array(value)).to(result.dtype)
    if isinstance(result, tuple):
        if isinstance(result, Routing) and not np.array_equal(result.experts.numpy(), value.experts):
            result = result._replace(weights=result.weights.detach())  # a tie: no gradient through the other choice
        parts = [_joined(one, other) for one, other in zip(result, value, strict=True)]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result
