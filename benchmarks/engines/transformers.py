"""transformers through `generate`, for folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, Unsupported

KNOWN = {"temperature", "top_p", "n"}


class Transformers:
    """One batch of prompts of equal lengths at a time."""

    def __init__(self, opening: Opening) -> None:
        import torch
        import transformers

        if opening.model.suffix == ".gguf":
            raise Unsupported("transformers is measured with folders")
        self._torch: Any = torch
        self._version = str(transformers.__version__)
        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(opening.model), dtype=torch.bfloat16, **opening.options
        )
        self._model = loaded.to(opening.device).eval()
        self.vocab_size = int(loaded.config.vocab_size)

    def prepare(self, asks: Sequence[Ask]) -> Call:
        if len({(len(ask.prompt), ask.max_tokens, str(ask.options)) for ask in asks}) > 1:
            raise Unsupported("transformers is measured with batches of equal requests")
        if unknown := set(asks[0].options) - KNOWN:
            raise Unsupported(f"transformers is not driven with {', '.join(unknown)} here")
        torch, first = self._torch, asks[0]
        ids = torch.tensor([ask.prompt for ask in asks], device=self._model.device)
        options: dict[str, Any] = {"do_sample": False}
        if first.options.get("temperature"):
            options = {"do_sample": True, "temperature": first.options["temperature"], "top_k": 0}
            options |= {"top_p": first.options.get("top_p", 1.0), "num_return_sequences": first.options.get("n", 1)}
        lengths = {"max_new_tokens": first.max_tokens, "min_new_tokens": first.max_tokens, "pad_token_id": 0}

        def call() -> Done:
            with torch.inference_mode():
                found = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options, **lengths)
            return Done(found[:, ids.shape[1] :].tolist())

        return call

    def reserve(self, sequences: int, length: int) -> None:
        """Caches grow."""

    def about(self) -> dict[str, str]:
        return {"transformers": self._version, "torch": str(self._torch.__version__)}

    def close(self) -> None:
        """The process ends."""
