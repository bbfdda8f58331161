"""The server class for `ray.serve.llm`: answers are those of the offline API; names of vLLM are a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from serving import ENGINE, model_folder
from vllm_names import write_names

from bifolio import LLM, SamplingParams
from bifolio.cluster.llm_server import BifolioServer, engine_options
from bifolio.errors import ConfigError

GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


class Fields(dict):  # type: ignore[type-arg]
    """In place of a model of pydantic: any field."""

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Fields:
        return cls(values)

    def model_dump_json(self, exclude_unset: bool) -> str:
        assert exclude_unset
        return json.dumps(self)


class Failure(Fields):
    """An error, by its class."""


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("ray.serve.llm"), ModuleType("ray.serve.llm.openai_api_models")
    for name in ("ChatCompletionResponse", "CompletionResponse", "EmbeddingResponse"):
        setattr(module, name, Fields)
    module.ErrorResponse = Failure  # type: ignore[attr-defined]
    package.openai_api_models = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.serve.llm", package)


def config(**changes: Any) -> Any:
    loading = SimpleNamespace(model_source=str(model_folder()))
    values = {"model_id": "tiny", "model_loading_config": loading, "engine_kwargs": dict(ENGINE),
              "deployment_config": {"num_replicas": 2}, "accelerator_type": None}  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


async def items(answers: Any) -> list[Any]:
    return [item async for item in answers]


@pytest.mark.full
def test_answers_are_those_of_the_offline_api(models: None) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(model_folder(), **ENGINE) as llm:
        text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
        chat = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)[0].outputs[0].text

    async def main() -> None:
        server = object.__new__(BifolioServer)
        await server.__init__(config())  # type: ignore[misc, func-returns-value]  # as Ray calls it
        await server.check_health()
        completion = Fields(model="tiny", prompt="Once upon a time", **GREEDY)
        (whole,) = await items(server.completions(completion))
        assert whole["choices"][0]["text"] == text
        messages = [{"role": "user", "content": "Hello"}]
        (answer,) = await items(server.chat(Fields(model="tiny", messages=messages, **GREEDY)))
        assert answer["choices"][0]["message"]["content"] == chat
        pieces = "".join(await items(server.completions(Fields(completion, stream=True))))
        *events, last, _ = pieces.split("\n\n")
        assert last == "data: [DONE]"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == text
        headers = SimpleNamespace(headers={"Authorization": "Bearer any", "Host": "example.org"})
        (refused,) = await items(server.completions(Fields(completion, prompt=[1] * 600), headers))
        assert isinstance(refused, Failure)
        assert refused["error"]["code"] == 400
        (vector,) = await items(server.embeddings(Fields(model="tiny", input="Hello")))
        assert len(vector["data"][0]["embedding"]) > 0
        left = server.completions(Fields(completion, stream=True, max_tokens=400))
        await anext(left)
        await left.aclose()
        assert server._engine.num_open == 0
        await server._engine.close()

    asyncio.run(main())


def test_options_of_the_deployment() -> None:
    assert BifolioServer.get_deployment_options(config()) == {"num_replicas": 2, "ray_actor_options": {}}
    given = config(accelerator_type="H100", engine_kwargs={"tensor_parallel_size": 2})
    assert BifolioServer.get_deployment_options(given)["ray_actor_options"] == {
        "accelerator_type": "H100",
        "num_gpus": 2,
    }
    assert given.deployment_config == {"num_replicas": 2}  # of the configuration, unchanged
    mirror = SimpleNamespace(model_source=SimpleNamespace(bucket_uri="s3://models"))
    with pytest.raises(ConfigError, match="cloud mirror"):
        engine_options(config(model_loading_config=mirror))


SCRIPT = """
import json, sys
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment
from ray.serve.llm.openai_api_models import CompletionRequest, ErrorResponse

folder, engine, found = json.loads(sys.argv[1])
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
config = LLMConfig(
    model_loading_config={"model_id": "tiny", "model_source": folder}, engine_kwargs=engine,
    server_cls="bifolio.cluster.llm_server:BifolioServer", deployment_config={"num_replicas": 1},
)
handle = serve.run(build_llm_deployment(config), route_prefix=None).options(stream=True)
body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
whole = [item for item in handle.completions.remote(CompletionRequest(**body), None)]
pieces = [item for item in handle.completions.remote(CompletionRequest(**body, stream=True), None)]
wrong = [item for item in handle.completions.remote(CompletionRequest(model="tiny", prompt=[1] * 600), None)]
assert isinstance(wrong[0], ErrorResponse)
with open(found, "w") as file:
    json.dump([whole[0].model_dump()["choices"][0]["text"], "".join(pieces), wrong[0].error.code], file)
serve.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra cluster")
def test_ray_deploys_the_class(tmp_path: Path) -> None:
    """A replica on real Ray, built by `ray.serve.llm` with the stand-in for the names that it imports."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(model_folder(), **ENGINE) as llm:
        text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    path = os.pathsep.join([str(write_names(tmp_path)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    found = tmp_path / "found.json"
    argument = json.dumps([str(model_folder()), ENGINE, str(found)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, argument], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    whole, pieces, code = json.loads(found.read_text())
    assert whole == text
    events = [event.removeprefix("data: ") for event in pieces.split("\n\n")[:-2]]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert code == 400
