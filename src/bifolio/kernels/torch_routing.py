"""Parts of the choice of experts on torch tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Router, Routing


def scores_of(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """The scores of all experts."""
    if scoring == "sqrt_softplus":
        return F.softplus(logits).sqrt()
    return torch.softmax(logits, dim=-1) if scoring == "softmax" else torch.sigmoid(logits)


def mix_sparsely(logits: torch.Tensor, router: Router) -> Routing:
    """Each choice has the share of its logit in a softmax over the logits that are left and close to it."""
    left, experts, weights = logits, [], []
    for _ in range(router.top_k):
        highest, best = left.max(dim=-1, keepdim=True)
        is_far = (highest - logits) / torch.maximum(logits.abs(), highest) > router.band
        shares = torch.exp(left - highest).masked_fill(is_far, 0.0)
        experts.append(best)
        weights.append(router.scale / shares.sum(dim=-1, keepdim=True))
        left = left.scatter(1, best, -torch.inf)
    return Routing(torch.cat(experts, dim=-1).to(torch.int32), torch.cat(weights, dim=-1))
