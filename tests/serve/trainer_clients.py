"""Trainers' own client code against a server: run in a process of its own, with stand-ins for vLLM's packages.

    python trainer_clients.py trl|prime URL FOLDER...     prints one JSON object

`FOLDER` are folders of weights. The clients themselves are unchanged; vLLM's communicator, which needs a GPU, is
replaced by one on gloo, and packages of which a client uses types alone are empty.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

PROMPT = [5, 9, 11, 40, 41, 42, 3, 8, 20]
GREEDY = {"seed": 4, "ignore_eos": True}


class Group:
    """vLLM's `StatelessProcessGroup` on gloo."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        store = dist.TCPStore(host, port, world_size, is_master=False)
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("client2server", store), rank, world_size)

    @classmethod
    def create(cls, host: str, port: int, rank: int, world_size: int) -> Group:
        return cls(host, port, rank, world_size)

    def barrier(self) -> None:
        self.gloo.barrier().wait()


class Communicator:
    """vLLM's `PyNcclCommunicator` on gloo."""

    def __init__(self, group: Group, device: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.gloo.broadcast([tensor], options).wait()


class StandIn(ModuleType):
    """A package whose names are empty classes, unless they are given."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(name: str, **names: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), StandIn(".".join(parts[:end])))
    sys.modules[name] = StandIn(name, **names)


def folders_of(package: str) -> list[str]:
    """The package's own folder, whose modules are those of its stand-in."""
    return [str(Path(folder) / package) for folder in sys.path if (Path(folder) / package).is_dir()]


def run_trl(url: str, folders: list[str]) -> dict[str, Any]:
    stand_in("vllm", __version__="0.12.0")
    stand_in("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=Communicator)
    stand_in("vllm.distributed.utils", StatelessProcessGroup=Group)
    from trl.generation.vllm_client import VLLMClient  # type: ignore[import-not-found]

    from bifolio import LanguageModel

    client = VLLMClient(base_url=url, group_port=int(folders.pop()), connection_timeout=20)
    options = {"temperature": 0.8, "max_tokens": 10, "n": 2, "generation_kwargs": GREEDY}
    before = client.generate([PROMPT, PROMPT], **options)
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="none")
    client.init_communicator(device="cuda")
    client.update_model_params(LanguageModel.from_pretrained(folders[1]))
    client.reset_prefix_cache()
    after = client.generate([PROMPT], **options)
    cut = client.generate([PROMPT], truncate_prompt_tokens=4, logprobs=3, **options)
    client.close_communicator()
    return {"before": before, "after": after, "cut": cut}


async def run_prime(url: str, folders: list[str]) -> dict[str, Any]:
    for name in ("verifiers.v1.configs.client", "prime_rl.configs.shared"):
        stand_in(name)
    stand_in("renderers")
    sys.modules["renderers"].__path__ = folders_of("renderers")
    quiet = SimpleNamespace(debug=print_nothing, info=print_nothing, warning=print_nothing, error=print_nothing)
    stand_in("prime_rl.utils.logger", get_logger=lambda: quiet)
    sys.modules["prime_rl.utils"].__path__ = [f"{path}/utils" for path in folders_of("prime_rl")]
    from openai import AsyncOpenAI
    from renderers.client import generate  # type: ignore[import-not-found]

    prime: Any = importlib.import_module("prime_rl.utils.client")

    config = SimpleNamespace(
        admin_base_url=[f"{url}/v1"], base_url=f"{url}/v1", headers={}, headers_from_env={}, api_key_var="NO_SUCH_KEY"
    )
    admin = prime.setup_admin_clients(config)
    await prime.check_health(admin, timeout=20)
    await prime.maybe_check_has_model(admin, "tiny")
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    renderer = SimpleNamespace(
        get_stop_token_ids=list, parse_response=lambda ids, **_: SimpleNamespace(
            content="", reasoning_content=None, tool_calls=[], reasoning_complete=True
        )
    )  # fmt: skip

    async def rollout(version: str) -> dict[str, Any]:
        params = {"temperature": 0.8, "max_tokens": 10, **GREEDY}
        found = await generate(client=openai, renderer=renderer, messages=[], model="tiny", prompt_ids=PROMPT,
                               sampling_params=params, cache_salt=version, priority=0)  # fmt: skip
        return {name: found[name] for name in ("completion_ids", "completion_logprobs", "finish_reason")}

    before = await rollout("0")
    await prime.update_weights(admin, Path(folders[1]), step=1)
    after = await rollout("1")
    scored = [0.0] * len(PROMPT)
    if hasattr(prime, "prefill_logprobs"):
        stand_in("vllm.entrypoints.scale_out.token_in_token_out.protocol", GenerateResponse=Answered)
        scored = await prime.prefill_logprobs(openai, "tiny", PROMPT)
    return {"before": before, "after": after, "scored": scored}


class Answered:
    """vLLM's type of an answer."""

    @staticmethod
    def model_validate_json(content: bytes) -> SimpleNamespace:
        return SimpleNamespace(**json.loads(content))


def print_nothing(*_: Any, **__: Any) -> None:
    pass


if __name__ == "__main__":
    kind, address, *paths = sys.argv[1:]
    found = run_trl(address, paths) if kind == "trl" else asyncio.run(run_prime(address, paths))
    print(json.dumps(found))
