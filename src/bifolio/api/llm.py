"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bifolio.api.chat_tokenizer import ChatTokenizer
from bifolio.api.outputs import Decode, RequestOutput, request_output
from bifolio.api.prompts import Prompt, as_prompts, checked_params, show_progress
from bifolio.api.stream import TokenStream
from bifolio.api.vllm_options import cache_dtype, check_ported, speculative_from, weight_dtype
from bifolio.beam_params import BeamSearchParams
from bifolio.config import NUMERICS, CacheConfig, EngineConfig, SpeculativeConfig
from bifolio.engine.build import build_engine, resolve_sizes
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.memory import check_threads, default_threads, parse_bytes
from bifolio.errors import ConfigError, EngineDeadError, RequestError
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.select import select_kernels
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.model.weights import OnLoad
from bifolio.quant.convert import conversion_notes
from bifolio.sampling_params import SamplingParams, merge_defaults
from bifolio.sequence import Request, StepResult
from bifolio.text.chat_template import Message, check_messages, render_chat
from bifolio.text.roles import Placeholders


class LLM:
    """A model, a cache and an engine. Calls from several threads run in one continuous batch.

    `model` is a Hugging Face-layout folder, a `.gguf` file, or the name of an embedded or pulled model; None takes
    the default embedded model. The cache gets `num_blocks` blocks, or as many as fit into `memory` ("2GB"), or a
    safe share of free memory; on a GPU, `gpu_memory_utilization` of the memory left by the weights and the largest
    step. `activations` ("int8" or "int16") says how finely they are rounded beside quantised weights on the native CPU
    kernels. `dtype` is the type of dense weights on a GPU ("bfloat16", "float16", "float32"); the CPU uses weights as
    they lie in the file. `kv_cache_dtype` is the type of the cache. `seed` makes requests without a seed of their own
    repeatable. `deterministic` asks a GPU for output that depends on the request alone, to the last bit; on the CPU it
    always does. `warm_up` compiles a GPU's kernels and captures its decode steps before the first request. Sizes that
    are not given are small on the CPU and large on a GPU (`engine.build.SIZES`). Options that only vLLM has are warned
    about by name (`api.vllm_options`). `on_load` is called with (layers prepared, layers in all) while weights are
    prepared.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        dtype: Any = "auto",
        kv_cache_dtype: str = NUMERICS.kv_dtype,
        seed: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        chunk_size: int | None = None,
        token_budget: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        deterministic: bool | None = None,
        device: str = NUMERICS.device,
        threads: int | None = NUMERICS.threads,
        kernels: KernelSet | str | None = None,
        activations: str = NUMERICS.activations,
        gpu_memory_utilization: float = 0.9,
        speculative: SpeculativeConfig | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        max_waiting: int | None = None,
        poison_free_blocks: bool = False,
        warm_up: bool = True,
        verbose: bool = False,
        on_load: OnLoad = lambda done, total: None,
        **ported: Any,
    ) -> None:
        from bifolio.model.registry import DEFAULT_MODEL

        check_ported(ported)
        check_threads(threads)
        if speculative_config is not None:
            speculative = speculative_from(speculative_config)
        token_budget = max_num_batched_tokens if token_budget is None else token_budget
        self.model = model if isinstance(model, LoadedModel) else load_model(model or DEFAULT_MODEL)
        kernel_set = (
            kernels
            if kernels is not None and not isinstance(kernels, str)
            else select_kernels(
                device,
                name=kernels,
                threads=threads or default_threads(),
                activations=activations,
                dtype=weight_dtype(dtype),
                deterministic=bool(deterministic),
            )
        )
        sizes = resolve_sizes(kernel_set, block_size, max_num_seqs, chunk_size, token_budget)
        wanted = EngineConfig(
            cache=CacheConfig(
                sys.maxsize,  # until memory is planned
                sizes.block_size,
                cache_dtype(dtype, kv_cache_dtype, kernel_set.kv_dtype),
                enable_prefix_caching,
                poison_free_blocks,
            ),
            max_model_len=self._model_len(max_model_len),
            max_num_seqs=sizes.max_num_seqs,
            token_budget=sizes.token_budget,
            chunk_size=sizes.chunk_size,
            max_waiting=max_waiting,
            deterministic=deterministic is not False if kernel_set.device == "cpu" else bool(deterministic),
            device=kernel_set.device,
            speculative=speculative,
            warm_up=warm_up,
        )
        self._engine: InferenceEngine | None
        self.plan, self._engine = build_engine(
            self.model,
            wanted,
            kernel_set,
            draft_model=self._draft_model(speculative),
            num_blocks=num_blocks,
            memory=None if memory is None else parse_bytes(memory),
            utilisation=gpu_memory_utilization,
            on_load=on_load,
        )
        self._ids = itertools.count()
        self._seeds = None if seed is None else random.Random(seed)
        self._lock = threading.RLock()  # held while the engine is touched: for one step at most
        self._streams: dict[str, list[StepResult]] = {}  # request id -> results that its stream has not read
        self._owner: str | None = None
        if verbose:
            self.print_plan()

    @property
    def engine(self) -> InferenceEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM was closed: make a new one")
        return self._engine

    # -- generating ------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete every prompt; results have the order of the prompts."""
        batch = as_prompts(prompts)
        params = self.params_for(batch, sampling_params)
        priorities = [priority] * len(batch) if isinstance(priority, int) else list(priority)
        requests = self._add_all(batch, params, priorities)
        self._drain(requests, show_progress(use_tqdm, len(requests)))
        return self._outputs(requests)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Run a beam search for every prompt; `.outputs` are sorted best first and have a `.score`."""
        batch = as_prompts(prompts)
        each = [params or BeamSearchParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts and {len(each)} BeamSearchParams: pass one, or one for each")
        requests = self._add_all(batch, each, [0] * len(batch))
        self._drain(requests, show_progress(use_tqdm, len(requests)))
        return self._outputs(requests)

    def _outputs(self, requests: list[Request]) -> list[RequestOutput]:
        return [request_output(request, self.decode_token) for request in requests]

    @property
    def decode_token(self) -> Decode | None:
        """The text of one token, for logprobs; None for a model without a tokenizer."""
        tokenizer = self.model.tokenizer
        return None if tokenizer is None else lambda token_id: tokenizer.decode([token_id], False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> TokenStream:
        """Every token as it comes; `StepResult.request_id` is the prompt's index, `.index` the completion's.

        A bad prompt or parameter refuses the call at once. Leaving the loop early ends the requests.
        """
        batch = as_prompts(prompts)
        unread: list[StepResult] = []
        requests = self._add_all(batch, self.params_for(batch, sampling_params), [0] * len(batch), unread)
        return TokenStream(requests, unread, self._lock, self._step, self._abort)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts: list[Prompt] = [
            {"prompt_token_ids": self.chat_tokens(conversation, **options)} for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation; special tokens come from the template alone (`text.roles`)."""
        tokenizer = self.model.require_tokenizer()
        check_messages(messages)
        placeholders = Placeholders(tokenizer.special_tokens)
        text = render_chat(
            self.model.chat_template,
            placeholders.protect(list(messages)),
            special_tokens=self.model.special_tokens,
            **placeholders.protect(options),
        )
        return tokenizer.encode_parts(placeholders.parts(text))

    # -- configuration -----------------------------------------------------------------------------------------
    def print_plan(self) -> None:
        kernels = self.engine.runner.kernels
        print(f"{self.model.path} ({self.model.config.architecture}), kernels: {kernels.name}", file=sys.stderr)
        notes = conversion_notes(self.model.weights.formats(), kernels.formats, kernels.name)
        for line in [*notes, *self.plan.lines()]:
            print("  " + line, file=sys.stderr)

    def default_params(self, **explicit: Any) -> SamplingParams:
        """The model's sampling defaults (`model.sampling_defaults`), with `explicit` values winning."""
        return SamplingParams(**merge_defaults(self.model.sampling_defaults, **explicit))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that passes none."""
        return self.default_params()

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer, with the methods that callers of transformers know."""
        return ChatTokenizer(self.model)

    def close(self) -> None:
        """Give back the memory of cache and weights; every later call raises EngineDeadError."""
        if self._engine is not None:
            self._engine.abort_all()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- details -----------------------------------------------------------------------------------------------
    def _model_len(self, wanted: int | None) -> int:
        most = self.model.config.max_position
        if wanted is None:
            return min(most, 8192)
        if not 1 <= wanted <= most:
            raise ConfigError(f"max_model_len={wanted} is outside 1..{most}, the context length of this model")
        return wanted

    def _draft_model(self, config: SpeculativeConfig | None) -> LoadedModel | None:
        if config is None or config.method != "draft":
            return None
        return load_model(config.draft_model or f"{self.model.path.stem}-draft")  # `stories` has `stories-draft`

    def params_for(
        self, batch: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """The parameters of each prompt; the model's defaults where none are given."""
        if params is None:
            params = self.default_params()
        each = [params] * len(batch) if isinstance(params, SamplingParams) else checked_params(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts and {len(each)} SamplingParams: pass one, or one for each")
        return each if self._seeds is None else [self._seeded(one, self._seeds) for one in each]

    def _seeded(self, params: SamplingParams, seeds: random.Random) -> SamplingParams:
        """The parameters with a seed drawn from that of the LLM, unless they have their own."""
        return params if params.seed is not None else dataclasses.replace(params, seed=seeds.getrandbits(63))

    def _add_all(
        self,
        batch: list[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priorities: list[int],
        results: list[StepResult] | None = None,
    ) -> list[Request]:
        """Add all requests or none: an invalid prompt raises before any request runs."""
        requests: list[Request] = []
        try:
            for prompt, each, priority in zip(batch, params, priorities, strict=True):
                request_id = f"request-{next(self._ids)}"
                requests.append(self._add(request_id, prompt, each, priority, results))
        except BaseException:
            self._abort(requests)
            raise
        return requests

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        priority: int,
        results: list[StepResult] | None,
    ) -> Request:
        text, token_ids = self.prompt_tokens(prompt)
        with self._lock:
            self._check_owner()
            if isinstance(params, BeamSearchParams):
                request = self.engine.add_beam_search(request_id, token_ids, params, prompt=text, priority=priority)
            else:
                request = self.engine.add_request(request_id, token_ids, params, prompt=text, priority=priority)
            if results is not None:
                self._streams[request_id] = results
            return request

    def _step(self) -> list[StepResult]:
        """One step for the requests of all threads; results of streams go to their readers."""
        with self._lock:
            self._check_owner()
            results = self.engine.step()
            for result in results:
                unread = self._streams.get(result.request_id)
                if unread is not None:
                    unread.append(result)
            return results

    # -- another owner ---------------------------------------------------------------------------------------------
    def hand_over(self, owner: str) -> None:
        """Let another object (such as `AsyncLLM`) run the engine on its own thread; calls are refused from now on."""
        with self._lock:
            self._check_owner()
            if self.engine.has_work:
                raise ConfigError(f"requests are running in this LLM: wait for them before {owner} takes it over")
            self._owner = owner

    def take_back(self) -> None:
        """Accept calls again, after the other owner has stopped its thread."""
        with self._lock:
            self._owner = None

    def _check_owner(self) -> None:
        if self._owner is not None:
            raise ConfigError(f"{self._owner} runs the engine of this LLM: use its methods instead, or close it first")

    def prompt_tokens(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """(text or None, token ids) of a prompt in any of its forms."""
        text: str | None = None
        token_ids: Any = prompt
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            token_ids = text if token_ids is None else token_ids
        if isinstance(token_ids, str):
            text, token_ids = token_ids, self.model.require_tokenizer().encode(token_ids)
        if token_ids is None or isinstance(token_ids, Mapping):
            raise RequestError("a prompt is text, a list of token ids, or {'prompt_token_ids': [...]}")
        return text, token_ids

    def _drain(self, requests: list[Request], progress: bool) -> None:
        try:
            if not progress:
                while any(not request.is_finished for request in requests):
                    self._step()
            else:
                self._drain_with_bar(requests)
        finally:
            self._abort(requests)

    def _drain_with_bar(self, requests: list[Request]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task("generating", total=len(requests), speed="")
            num_tokens = 0
            while any(not request.is_finished for request in requests):
                num_tokens += sum(result.token is not None for result in self._step())
                elapsed = bar.tasks[0].elapsed or 1e-9
                done = sum(request.is_finished for request in requests)
                bar.update(task, completed=done, speed=f"{num_tokens / elapsed:.0f} tok/s")

    def _abort(self, requests: list[Request]) -> None:
        with self._lock:
            unfinished = [request for request in requests if not request.is_finished]
            for request in unfinished:
                self.engine.abort(request.request_id)
            if unfinished:
                self._step()  # releases their slots and blocks
            for request in requests:
                self._streams.pop(request.request_id, None)
