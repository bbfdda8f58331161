"""bifolio through `LLM` and through `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, adapters_of


def llm_options(opening: Opening) -> dict[str, Any]:
    options: dict[str, Any] = {"device": opening.device, **opening.options}
    if opening.threads is not None:
        options.setdefault("threads", opening.threads)
    if adapters := adapters_of(opening.model):
        options["lora_modules"] = {path.name: str(path) for path in adapters}
        options.setdefault("max_loras", len(adapters))
    return options


class Offline:
    """`LLM(model).generate(prompts, params)`."""

    def __init__(self, opening: Opening) -> None:
        from bifolio import LLM

        self.llm: Any = LLM(str(opening.model), **llm_options(opening))
        self.vocab_size = int(self.llm.model.config.vocab_size)

    def prepare(self, asks: Sequence[Ask]) -> Call:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        if any("beams" in ask.options for ask in asks):
            searches = [beam_params(ask) for ask in asks]
            return lambda: done(self.llm.beam_search(prompts, searches, use_tqdm=False))
        params = [sampling_params(ask) for ask in asks]
        own = [adapter_name(ask) for ask in asks]
        return lambda: done(self.llm.generate(prompts, params, lora_request=own, use_tqdm=False))

    def reserve(self, sequences: int, length: int) -> None:
        """Sizes are the engine's own defaults."""

    def about(self) -> dict[str, str]:
        import bifolio

        kernels = self.llm.engine.runner.kernels
        plan = f"{self.llm.plan.num_blocks} blocks of {self.llm.plan.block_size}"
        return {"bifolio": bifolio.__version__, "path": str(bifolio.__file__), "kernels": kernels.name, "cache": plan}

    def close(self) -> None:
        self.llm.close()


class Async(Offline):
    """`AsyncLLM(model).generate(...)`: a task for every request."""

    def __init__(self, opening: Opening) -> None:
        from bifolio import AsyncLLM

        super().__init__(opening)
        self._loop = asyncio.new_event_loop()
        self._async: Any = AsyncLLM(self.llm)

    def prepare(self, asks: Sequence[Ask]) -> Call:
        params = [sampling_params(ask) for ask in asks]

        async def all_answers() -> Done:
            calls = [self._async.generate([ask.prompt], each) for ask, each in zip(asks, params, strict=True)]
            return done([output for found in await asyncio.gather(*calls) for output in found])

        return lambda: self._loop.run_until_complete(all_answers())

    def close(self) -> None:
        self._loop.run_until_complete(self._async.close())
        self._loop.close()


def adapter_name(ask: Ask) -> str | None:
    return None if ask.options.get("adapter") is None else f"a{ask.options['adapter']}"


def sampling_params(ask: Ask) -> Any:
    from bifolio import Grammar, SamplingParams

    options = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": True, "detokenize": False, **ask.options}
    options.pop("adapter", None)
    schema = options.pop("schema", None)
    if schema is not None:
        options["grammar"] = Grammar.json_schema(schema)
    return SamplingParams(**options)


def beam_params(ask: Ask) -> Any:
    from bifolio import BeamSearchParams

    return BeamSearchParams(ask.options["beams"], max_tokens=ask.max_tokens, ignore_eos=True)


def done(outputs: Any) -> Done:
    return Done([list(completion.token_ids) for output in outputs for completion in output.outputs])
