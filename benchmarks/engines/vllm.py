"""vLLM through `LLM.generate`, in the environment that `--peer-env` sets up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, Unsupported, adapters_of

USUAL = {"dtype": "bfloat16", "generation_config": "vllm", "gpu_memory_utilization": 0.85}


class Vllm:
    """`LLM(folder)`; prefix caching is on by default, as in bifolio."""

    def __init__(self, opening: Opening) -> None:
        import vllm

        if opening.model.suffix == ".gguf":
            raise Unsupported("vLLM is measured with folders")
        self._module: Any = vllm
        self._adapters = adapters_of(opening.model)
        own = {"enable_lora": True, "max_loras": len(self._adapters)} if self._adapters else {}
        self.llm: Any = vllm.LLM(str(opening.model), **{**USUAL, **own, **opening.options})
        self.vocab_size = int(json.loads((opening.model / "config.json").read_text())["vocab_size"])

    def prepare(self, asks: Sequence[Ask]) -> Call:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        params = [self._params(ask) for ask in asks]
        adapters = [self._adapter(ask) for ask in asks]

        def call() -> Done:
            outputs = self.llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
            return Done([list(completion.token_ids) for output in outputs for completion in output.outputs])

        return call

    def _adapter(self, ask: Ask) -> Any:
        number = ask.options.get("adapter")
        if number is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"a{number}", number + 1, str(self._adapters[number]))

    def _params(self, ask: Ask) -> Any:
        options = {"temperature": 0.0, "max_tokens": ask.max_tokens, "ignore_eos": True, "detokenize": False}
        options |= {name: value for name, value in ask.options.items() if name != "adapter"}
        if "beams" in options:
            raise Unsupported("vLLM's beam search runs outside its engine")
        schema = options.pop("schema", None)
        if schema is not None:
            from vllm.sampling_params import StructuredOutputsParams

            options["structured_outputs"] = StructuredOutputsParams(json=schema)
        return self._module.SamplingParams(**options)

    def reserve(self, sequences: int, length: int) -> None:
        """Sizes are the engine's own defaults."""

    def about(self) -> dict[str, str]:
        return {"vllm": str(self._module.__version__)}

    def close(self) -> None:
        """The process ends."""
