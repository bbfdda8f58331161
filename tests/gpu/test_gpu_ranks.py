"""Exchanges of tensor parallelism on a GPU: one rank, whose collectives run inside the captured steps.

Several ranks need several GPUs: NCCL refuses two ranks on one. `--device torch` runs this file on gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bifolio import SamplingParams
from bifolio.kernels.interface import Shards
from bifolio.model.loaded import LoadedModel
from built_engines import built_engine
from helpers import drain, output_ids, random_prompt, tiny_loaded

VOCAB = 61
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.9, seed=3, top_p=0.9, n=2, ignore_eos=True),
]


@pytest.fixture
def ranks(device: str) -> Iterator[Any]:
    import torch.distributed as dist

    from bifolio.kernels.torch_ranks import TorchRanks, new_store

    yield TorchRanks.join(device if device != "cuda" else "cuda:0", new_store(1), 0, 1)
    dist.destroy_process_group()


def with_exchanges(model: LoadedModel, exact: bool) -> LoadedModel:
    """The model with the exchanges of several ranks, all of whose parts are on one."""
    weights = model.weights
    config = weights.config
    gathered = {
        "output": Shards((config.query_size,), (config.hidden_size,)),
        "down": Shards((config.intermediate_size,), (config.hidden_size,)),
    }
    added = Shards((), ())
    layers = tuple(
        replace(
            layer,
            output=replace(layer.output, shards=gathered["output"] if exact else added),
            down=replace(layer.down, shards=gathered["down"] if exact else added),
        )
        for layer in weights.layers
    )
    head = replace(weights.head, shards=Shards((), (config.vocab_size,)))
    spread = replace(weights, layers=layers, head=head, embedding_widths=(config.hidden_size,))
    return replace(model, weights=spread)


@pytest.mark.parametrize("exact", [True, False])
def test_collectives_inside_captured_steps(gpu_kernels: Any, ranks: Any, exact: bool) -> None:
    """The tokens are those of an engine without exchanges; decode steps are graphs in both."""
    found = []
    for is_parallel in (False, True):
        kernels = gpu_kernels("f32", deterministic=exact)
        model = tiny_loaded()
        if is_parallel:
            kernels.ranks = ranks
            model = with_exchanges(model, exact)
        engine = built_engine(model, kernels=kernels, num_blocks=128)
        prompts = [random_prompt(9 + number, seed=number, vocab_size=VOCAB) for number in range(2)]
        requests = [engine.add_request(str(i), p, o) for i, (p, o) in enumerate(zip(prompts, PARAMS, strict=True))]
        drain(engine)
        found.append([output_ids(request) for request in requests])
        found[-1].append([entry.logprob for entry in requests[0].sequences[0].logprobs])
    assert found[0][:2] == found[1][:2]
    if exact:
        assert found[0][2] == found[1][2]
    else:
        assert found[0][2] == pytest.approx(found[1][2], abs=1e-4)
