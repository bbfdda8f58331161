"""llama.cpp through the C interface of its Python package, `llama_cpp`; LLAMA_CPP_LIB_PATH selects another build.

All sequences of a call run in one context. A prompt continues the tokens that its sequence holds already, as the
project's own server does; prompts are computed in batches of 512 tokens, then every sequence decodes one token a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engines import Ask, Call, Done, Opening, Outputs, Unsupported

BATCH = 512
SPARE = 64  # tokens of room in each sequence
TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}  # of keys and values, by their numbers in GGML
OPTIONS = {"flash_attn", "type_k", "type_v"}
SAMPLED = {"temperature", "top_p", "seed"}  # options of requests that its samplers are driven with here


class LlamaCpp:
    """A model and one context, made anew when a call needs a larger one."""

    def __init__(self, opening: Opening) -> None:
        import llama_cpp

        unknown = set(opening.options) - OPTIONS
        if unknown:
            raise Unsupported(
                f"llama.cpp has no option {', '.join(sorted(unknown))} here: {', '.join(sorted(OPTIONS))}"
            )
        self.api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        self._options, self._threads = opening.options, opening.threads
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0 if opening.device == "cpu" else 999
        self._model = llama_cpp.llama_model_load_from_file(str(opening.model).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot open {opening.model}")
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        if not self.vocab_size:
            raise Unsupported("llama.cpp reports no vocabulary")
        self._context: Any = None
        self._sizes = (0, 0)
        self._held: list[list[int]] = []  # the tokens of each sequence whose keys and values are stored
        self._batch = llama_cpp.llama_batch_init(max(BATCH, 256), 0, 1)

    def reserve(self, sequences: int, length: int) -> None:
        if self._context is not None and sequences == self._sizes[0] and length <= self._sizes[1]:
            return
        self._free()
        api = self.api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = (length + SPARE) * sequences
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_seq_max = sequences
        if self._threads is not None:
            parameters.n_threads = parameters.n_threads_batch = self._threads
        if "flash_attn" in self._options:
            parameters.flash_attn_type = 1 if self._options["flash_attn"] else 0
        for name in {"type_k", "type_v"} & set(self._options):
            setattr(parameters, name, TYPES[self._options[name]])
        self._context = api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise Unsupported(f"llama.cpp makes no context of {sequences} x {length} tokens for this model")
        self._sizes, self._held = (sequences, length), [[] for _ in range(sequences)]

    def prepare(self, asks: Sequence[Ask]) -> Call:
        if any(set(ask.options) - SAMPLED or ask.options != asks[0].options for ask in asks):
            raise Unsupported("llama.cpp is driven here with greedy or top-p requests, all alike")
        most = max(len(ask.prompt) + ask.max_tokens for ask in asks)
        if len(asks) > self._sizes[0] or most > self._sizes[1]:
            self.reserve(max(len(asks), self._sizes[0]), max(most, self._sizes[1]))
        sampler = self._sampler(asks[0].options)
        return lambda: Done(self._answers(asks, sampler))

    def _sampler(self, options: dict[str, Any]) -> Any:
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if options.get("temperature", 0.0) == 0.0:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
            return chain
        if "top_p" in options:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_top_p(options["top_p"], 1))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(options["temperature"]))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(options.get("seed", 1)))
        return chain

    def _answers(self, asks: Sequence[Ask], sampler: Any) -> Outputs:
        outputs: Outputs = [[] for _ in asks]
        self._prefill(asks, lambda sequence, row: outputs[sequence].append(self._sample(sampler, row)))
        while running := [n for n, ask in enumerate(asks) if len(outputs[n]) < ask.max_tokens]:
            for place, sequence in enumerate(running):
                self._put(place, outputs[sequence][-1], sequence, is_last=True)
            self._decode(len(running))
            for place, sequence in enumerate(running):
                outputs[sequence].append(self._sample(sampler, place))
        return outputs

    def _prefill(self, asks: Sequence[Ask], drawn: Callable[[int, int], None]) -> None:
        """Compute the tokens that are not stored yet, in batches over all sequences."""
        memory = self.api.llama_get_memory(self._context)
        waiting: list[tuple[int, int, int]] = []  # sequence, place, token
        for sequence, ask in enumerate(asks):
            held = self._held[sequence]
            common = next((n for n, (a, b) in enumerate(zip(held, ask.prompt, strict=False)) if a != b),
                          min(len(held), len(ask.prompt)))  # fmt: skip
            kept = min(common, len(ask.prompt) - 1)  # the last token is computed again: its logits are needed
            if not self.api.llama_memory_seq_rm(memory, sequence, kept, -1):  # states that cannot be cut
                self.api.llama_memory_seq_rm(memory, sequence, -1, -1)
                kept = 0
            del held[kept:]
            waiting += [(sequence, place, ask.prompt[place]) for place in range(kept, len(ask.prompt))]
        for start in range(0, len(waiting), BATCH):
            part = waiting[start : start + BATCH]
            ends = []
            for place, (sequence, position, token) in enumerate(part):
                is_last = position == len(asks[sequence].prompt) - 1
                self._put(place, token, sequence, is_last)
                ends += [(sequence, place)] * is_last
            self._decode(len(part))
            for sequence, place in ends:
                drawn(sequence, place)

    def _put(self, place: int, token: int, sequence: int, is_last: bool) -> None:
        batch, held = self._batch, self._held[sequence]
        batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, len(held), 1
        batch.seq_id[place][0], batch.logits[place] = sequence, is_last
        held.append(token)

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        status = self.api.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")

    def _sample(self, sampler: Any, row: int) -> int:
        return int(self.api.llama_sampler_sample(sampler, self._context, row))

    def about(self) -> dict[str, str]:
        system = self.api.llama_print_system_info().decode()
        return {"llama-cpp-python": self.api.__version__, "llama.cpp": system}

    def _free(self) -> None:
        if self._context is not None:
            self.api.llama_free(self._context)
            self._context = None

    def close(self) -> None:
        self._free()
        self.api.llama_model_free(self._model)
