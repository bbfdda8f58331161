"""The choice of experts on numpy arrays, as the reference set defines it."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.kernels.operands import Array, Router, Routing


def route_rows(logits: np.ndarray, router: Router) -> Routing:
    """The experts of each token."""
    logits = logits.astype(np.float32)
    if router.band:
        return mix_sparsely(logits, router)
    scores = expert_scores(np, logits, router.scoring)
    ranked = scores if router.bias is None else scores + router.bias
    if router.top_groups < router.num_groups:
        groups = ranked.reshape(len(ranked), router.num_groups, -1)
        best = np.sort(groups, axis=-1)[..., -router.group_best :].sum(axis=-1)
        chosen = np.argsort(-best, axis=-1, kind="stable")[:, : router.top_groups]
        keeps = np.zeros(best.shape, np.bool_)
        np.put_along_axis(keeps, chosen, True, axis=-1)
        ranked = np.where(keeps[..., None], groups, -np.inf).reshape(ranked.shape)
    experts = np.argsort(-ranked, axis=-1, kind="stable")[:, : router.top_k]
    return weighed(np, experts.astype(np.int32), scores, router)


def weighed(xp: Any, experts: Array, scores: Array, router: Router) -> Routing:
    """The weights of chosen experts, i32[t, top_k], from the scores of all."""
    weights = xp.take_along_axis(scores, xp.astype(experts, xp.int64), axis=-1)
    if router.renormalise:
        weights = weights / (xp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    if router.expert_scales is not None:
        weights = weights * router.expert_scales[experts]
    return Routing(experts, weights * router.scale)


def expert_scores(xp: Any, logits: Array, scoring: str) -> Array:
    """The scores of all experts from f32 logits."""
    if scoring == "sqrt_softplus":
        return xp.sqrt(xp.clip(logits, 0.0, None) + xp.log1p(xp.exp(-xp.abs(logits))))
    if scoring == "sigmoid":
        return 0.5 * (1.0 + xp.tanh(0.5 * logits))
    scores = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    return scores / xp.sum(scores, axis=-1, keepdims=True)


def mix_sparsely(logits: np.ndarray, router: Router) -> Routing:
    """Each choice has the share of its logit in a softmax over the logits that are left and close to it."""
    left, rows = logits.copy(), np.arange(len(logits))
    experts, weights = [], []
    for _ in range(router.top_k):
        best = left.argmax(axis=-1)
        highest = left[rows, best][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            is_far = (highest - logits) / np.maximum(np.abs(logits), highest) > np.float32(router.band)
        shares = np.where(is_far, np.float32(0), np.exp(left - highest))
        experts.append(best)
        weights.append(router.scale / shares.sum(axis=-1))
        left[rows, best] = -np.inf
    return Routing(np.stack(experts, axis=-1).astype(np.int32), np.stack(weights, axis=-1).astype(np.float32))
