"""The network under torch's compiler computes the same losses and gradients."""

from __future__ import annotations

import pytest
import torch

from bifolio.api.language_model import LanguageModel
from bifolio.train.settings import TrainSettings


@pytest.mark.full
def test_the_whole_network_is_traced_without_a_break() -> None:
    config = TrainSettings(preset="draft", hidden_size=32, num_layers=2, num_heads=2).model_config(97, 0)
    torch.manual_seed(0)
    model = LanguageModel(config).train()
    tokens = torch.randint(0, 97, (2, 16))
    logits, loss = model.prefill(tokens, tokens)
    assert loss is not None
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.compile_network(backend="eager")
    torch._dynamo.reset()
    compiled_logits, compiled_loss = model.prefill(tokens, tokens)
    assert compiled_loss is not None
    compiled_loss.backward()
    torch.testing.assert_close(compiled_logits, logits)
    got = [parameter.grad for parameter in model.parameters()]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
