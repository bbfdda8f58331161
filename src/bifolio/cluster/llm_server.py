"""`BifolioServer`: the server class that `ray.serve.llm` deploys for a bifolio engine.

    LLMConfig(model_loading_config={"model_id": "qwen3", "model_source": "Qwen/Qwen3-8B"},
              server_cls="bifolio.cluster.llm_server:BifolioServer", engine_kwargs={"max_model_len": 16384})

`engine_kwargs` are the arguments of `LLM`. Requests pass through the HTTP application of `bifolio.serve`, inside the
replica, so that fields, limits and errors are those of `bifolio serve`. `ray.serve.llm` is imported when the first
answer is made; its models of requests and answers need vLLM or SGLang.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from bifolio.api import messages as m
from bifolio.cluster.asgi_call import Answer
from bifolio.cluster.replica import Readiness
from bifolio.errors import ConfigError
from bifolio.model.loader import open_text_model
from bifolio.serve.http.app import make_app
from bifolio.serve.http.context import ServerContext
from bifolio.serve.process.supervisor import EngineProcess

CHAT = ("/v1/chat/completions", "ChatCompletionResponse")  # path, and the model of its answer
COMPLETIONS = ("/v1/completions", "CompletionResponse")
EMBEDDINGS = ("/v1/embeddings", "EmbeddingResponse")


class BifolioServer:
    """The deployment class: one engine process and its HTTP application."""

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]
        self._llm_config = llm_config
        options = engine_options(llm_config)
        self._engine = EngineProcess(m.Launch(options))
        self._readiness = Readiness(self._engine)
        mmproj = options.get("mmproj")
        model = open_text_model(options["model"], mmproj)
        await self.start()
        context = ServerContext(model, self._engine, llm_config.model_id, reference=options["model"], mmproj=mmproj)
        self._app = make_app(context)

    # -- for Ray -----------------------------------------------------------------------------------------------------
    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """The options of the configuration, with a GPU for each rank where it names a kind of accelerator."""
        options = copy.deepcopy(dict(llm_config.deployment_config))
        actor = options.setdefault("ray_actor_options", {})
        if llm_config.accelerator_type:
            actor.setdefault("accelerator_type", llm_config.accelerator_type)
            actor.setdefault("num_gpus", llm_config.engine_kwargs.get("tensor_parallel_size", 1))
        return options

    async def start(self) -> None:
        """Wait until the engine is ready."""
        await self._engine.start()

    async def check_health(self) -> None:
        self._readiness.check()

    async def __serve_build_asgi_app__(self) -> Any:
        """The application itself, where Ray streams from replicas without an ingress."""
        return self._app

    async def llm_config(self) -> Any:
        return self._llm_config

    # -- requests ----------------------------------------------------------------------------------------------------
    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """The answer, or pieces of an event stream; an error is the only item."""
        async with aclosing(self._answer(CHAT, request, raw_request_info)) as items:
            async for item in items:
                yield item

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(self._answer(COMPLETIONS, request, raw_request_info)) as items:
            async for item in items:
                yield item

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(self._answer(EMBEDDINGS, request, raw_request_info)) as items:
            async for item in items:
                yield item

    async def _answer(self, target: tuple[str, str], request: Any, raw_request_info: Any) -> AsyncGenerator[Any, None]:
        from ray.serve.llm import openai_api_models as models

        body = json.loads(request.model_dump_json(exclude_unset=True))
        headers = {} if raw_request_info is None else raw_request_info.headers
        path, kind = target
        answer = Answer(self._app, path, body, headers)
        try:
            status = await answer.status()
            if status != 200:
                error = (await answer.content())["error"]
                fields = {"message": error["message"], "type": error.get("type") or "error", "code": status}
                yield models.ErrorResponse.model_validate({"error": fields})
            elif body.get("stream"):
                async for piece in answer.pieces():
                    yield piece.decode()
            else:
                yield getattr(models, kind).model_validate(await answer.content())
        finally:
            await answer.close()  # a cancelled call aborts the request


def engine_options(llm_config: Any) -> dict[str, Any]:
    """The arguments of `LLM` from a configuration."""
    source = llm_config.model_loading_config.model_source or llm_config.model_id
    if not isinstance(source, str):
        raise ConfigError("model_source is a file, a folder or a name: download the model from a cloud mirror first")
    return {**llm_config.engine_kwargs, "model": source}
