"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from bifolio.api.branch import Branch
from bifolio.api.chat_tokenizer import ChatTokenizer
from bifolio.api.engine_options import EngineOptions, loaded
from bifolio.api.engine_verbs import EngineVerbs
from bifolio.api.images import parts_with_images, pictures_of, required_pictures, taken_out, tokens_of
from bifolio.api.lora import LoRA, check_modules
from bifolio.api.outputs import Decode, RequestOutput, request_output
from bifolio.api.pooling_calls import PoolingCalls
from bifolio.api.prompts import (
    Params,
    Prompt,
    as_prompts,
    beam_params,
    checked_params,
    ending_at,
    show_progress,
    suffix_of,
)
from bifolio.api.shared_engine import SharedEngine
from bifolio.api.snapshots import Saved, load, save
from bifolio.api.stream import TokenStream
from bifolio.api.vllm_options import check_one_of, check_ported, speculative_from, weight_quantization
from bifolio.beam_params import BeamSearchParams
from bifolio.config import MAX_LORA_RANK, MAX_LORAS, NUMERICS, AdapterConfig, SpeculativeConfig, TierSettings
from bifolio.engine.adapters import AdapterSource
from bifolio.engine.build import build_engine
from bifolio.engine.memory import check_threads, read_size
from bifolio.engine.requests import as_token_ids
from bifolio.errors import RequestError
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.select import activations_for
from bifolio.model.loaded import LoadedModel
from bifolio.model.registry import DEFAULT_MODEL
from bifolio.model.vision.pictures import Pictures
from bifolio.model.weights import OnLoad
from bifolio.prompts import PromptTokens
from bifolio.quant.convert import conversion_notes
from bifolio.sampling_params import SamplingParams, merge_defaults
from bifolio.text.chat_template import Message, check_messages, check_takes_tools, render_chat
from bifolio.text.roles import Placeholders


class LLM(EngineVerbs, PoolingCalls):
    """A model, a cache and an engine. Calls from several threads run in one continuous batch.

    `model` is a Hugging Face-layout folder, a `.gguf` file, or the name of an embedded or pulled model; None takes the
    default embedded model. `mmproj` is the file with the tower of a GGUF model, where it does not lie beside the model.
    The cache gets `num_blocks` blocks, or as many as fit into `memory` ("2GB"), or a safe share of free memory; on a
    GPU, `gpu_memory_utilization` of the memory left by the weights and the largest step.
    `activations` ("int8", "int16") says how finely they are rounded beside quantised weights on the native CPU kernels;
    "auto" is int16 for decoders below a billion parameters, which int8 costs answers. `dtype` is the type of dense
    weights on a GPU ("bfloat16", "float16", "float32"); the CPU uses weights as they lie in the file.
    `quantization` rounds a dense model while it is loaded: "q8_0", "q4_0", or "fp8" on a GPU. `kv_cache_dtype` is
    the type of the cache. `seed` makes requests without a seed of their own repeatable. `deterministic` asks a GPU
    for output that depends on the request alone, to the last bit; on the CPU it always does. `cpu_experts` ("all",
    "auto" or a number of layers) leaves experts of a mixture in the memory of the host beside a GPU.
    `tensor_parallel_size` processes share the model, each with a part of every matrix. An engine on a GPU can `sleep`
    with `enable_sleep_mode`. `warm_up` compiles a GPU's kernels and captures its steps before the first request. Blocks
    that leave the cache are kept in `kv_offload` bytes of memory ("8GB") and in files under `kv_offload_dir`, at most
    `kv_offload_disk` bytes.
    `lora_modules` are low-rank adapters by name, each a path or a list of (path, factor) that are added
    (docs/lora.md); requests name one as `lora_request`. `max_loras` of them stay in memory; unknown names are
    looked up in `lora_dir`. Sizes that are not given are small on the CPU and large on a GPU
    (`engine.build.SIZES`). Options that only vLLM has are warned about by name (`api.vllm_options`). `on_load` is
    called with (layers prepared, layers in all) while weights are prepared.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        *,
        mmproj: str | Path | None = None,
        dtype: Any = "auto",
        quantization: str | None = None,
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
        cpu_experts: str | int | None = None,
        tensor_parallel_size: int = 1,
        enable_sleep_mode: bool = False,
        activations: str = NUMERICS.activations,
        gpu_memory_utilization: float = 0.9,
        speculative: SpeculativeConfig | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        lora_modules: Mapping[str, AdapterSource] | None = None,
        max_loras: int = MAX_LORAS,
        max_lora_rank: int = MAX_LORA_RANK,
        lora_dir: str | Path | None = None,
        max_waiting: int | None = None,
        kv_offload: int | str | None = None,
        kv_offload_dir: str | Path | None = None,
        kv_offload_disk: int | str | None = None,
        poison_free_blocks: bool = False,
        warm_up: bool = True,
        verbose: bool = False,
        on_load: OnLoad = lambda done, total: None,
        **ported: Any,
    ) -> None:
        check_ported(ported, LLM.__init__.__kwdefaults__ or ())
        check_threads(threads)
        check_one_of(token_budget=token_budget, max_num_batched_tokens=max_num_batched_tokens)
        check_one_of(speculative=speculative, speculative_config=speculative_config)
        check_one_of(num_blocks=num_blocks, memory=memory)
        check_modules(lora_modules)
        self.model = loaded(model or DEFAULT_MODEL, mmproj)
        options = EngineOptions(
            dtype=dtype, kv_cache_dtype=kv_cache_dtype, deterministic=deterministic, block_size=block_size,
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, chunk_size=chunk_size, max_waiting=max_waiting,
            token_budget=max_num_batched_tokens if token_budget is None else token_budget,
            enable_prefix_caching=enable_prefix_caching, poison_free_blocks=poison_free_blocks, warm_up=warm_up,
            speculative=speculative if speculative_config is None else speculative_from(speculative_config),
            tensor_parallel_size=tensor_parallel_size, quantization=weight_quantization(quantization),
            cpu_experts=cpu_experts, sleep_mode=enable_sleep_mode,
            adapters=AdapterConfig(max_loras, max_lora_rank, None if lora_dir is None else str(lora_dir)),
            tiers=TierSettings.of(read_size(kv_offload), kv_offload_dir, read_size(kv_offload_disk)),
        )  # fmt: skip
        activations = activations_for(activations, self.model.config.num_parameters, self.model.config.bidirectional)
        kernel_set = options.kernels(kernels, device, threads, activations)
        config = options.config(self.model, kernel_set)
        sizes: Any = {
            "num_blocks": num_blocks,
            "memory": read_size(memory),
            "utilisation": gpu_memory_utilization,
        }
        draft = options.draft_model(self.model)
        team = options.team(self.model, kernel_set, config, threads=threads, activations=activations, **sizes)
        self._placed = partial(
            options.placed, kernels=kernel_set, config=config, threads=threads, activations=activations,
            utilisation=gpu_memory_utilization,
        )  # fmt: skip
        self.plan, engine = build_engine(
            self._placed(self.model), config, kernel_set, draft_model=draft, on_load=on_load, team=team, **sizes
        )
        self._shared = SharedEngine(engine)
        for name, source in (lora_modules or {}).items():
            engine.adapters.load(name, source)
        if lora_modules and warm_up and engine.slots.device is not None:
            engine.slots.device.warm_up_adapters()
        self._pictures = None if self.model.vision is None else Pictures(self.model.vision)
        self._seeds = None if seed is None else random.Random(seed)
        self.lora = None
        if verbose:
            self.print_plan()

    def __repr__(self) -> str:
        if self._shared.is_closed:
            return f"LLM({self.model.path.name!r}, closed)"
        kernels, length = self.engine.runner.kernels, self.engine.config.max_model_len
        return (
            f"LLM({self.model.path.name!r}, device={kernels.device!r}, kernels={kernels.name!r}, "
            f"num_blocks={self.plan.num_blocks}, block_size={self.plan.block_size}, max_model_len={length})"
        )

    # -- generating ------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] = 0,
        lora_request: LoRA = None,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; results have the order of the prompts. With `receipts` each has a `.receipt`."""
        batch = as_prompts(prompts)
        params = self.params_for(batch, sampling_params)
        priorities = [priority] * len(batch) if isinstance(priority, int) else list(priority)
        return self._run(batch, params, priorities, use_tqdm, lora_request, receipts)

    def open(self, prompt: Prompt, *, lora_request: LoRA = None) -> Branch:
        """Compute a prompt and hold it as a `Branch`: to fork, append to, generate from, score and cut it."""
        tokens, [adapter] = self.prompt_tokens(prompt), self.adapters_for(lora_request, 1)
        ids = as_token_ids(tokens.token_ids)
        state = self.with_engine(lambda: self.branches.open(ids, images=tokens.images, adapter=adapter))
        return Branch(self, state).compute()

    def save(
        self, text: Saved, path: str | Path, *, notes: dict[str, Any] | None = None, lora_request: LoRA = None
    ) -> int:
        """Write a branch, an output or tokens (of `chat_prompt`, with images) and their blocks to a file; its bytes.

        `notes` are kept with it: values of JSON. `lora_request` is the adapter that an output or tokens were computed
        with; a branch has its own.
        """
        return save(self, text, path, notes, lora_request)

    def load(self, path: str | Path, *, recompute: bool = False, lora_request: LoRA = None) -> Branch:
        """Continue a saved text, bit for bit, with the adapter that it was saved with.

        Another arithmetic is refused, or its tokens are computed again.
        """
        return load(self, path, recompute, lora_request)[0]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRA = None,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        """Run a beam search for every prompt; `.outputs` are sorted best first and have a `.score`.

        They are fewer than asked for where fewer texts are possible. A search without any has an `.error`.
        """
        batch = as_prompts(prompts)
        return self._run(batch, beam_params(params, len(batch)), [0] * len(batch), use_tqdm, lora_request, receipts)

    def _run(
        self,
        batch: list[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priorities: list[int],
        use_tqdm: bool | None,
        lora_request: LoRA,
        receipts: bool = False,
    ) -> list[RequestOutput]:
        prompts, params = self.resolved(batch, params)
        adapters = self.adapters_for(lora_request, len(batch))
        requests = self._shared.add_all(prompts, params, priorities, adapters)
        self._shared.finish(requests, show_progress(use_tqdm, len(requests)))
        outputs = [request_output(request, self.decode_token) for request in requests]
        if not receipts:
            return outputs
        return [
            output if request.error is not None else dataclasses.replace(output, receipt=self.receipt(request))
            for output, request in zip(outputs, requests, strict=True)
        ]

    @property
    def decode_token(self) -> Decode | None:
        """The text of one token, for logprobs; None for a model without a tokenizer."""
        tokenizer = self.model.tokenizer
        return None if tokenizer is None else lambda token_id: tokenizer.decode([token_id], False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRA = None,
    ) -> TokenStream:
        """Every token as it comes; `StepResult.request_id` is the prompt's index, `.index` the completion's.

        A bad prompt or parameter refuses the call at once. Leaving the loop early ends the requests.
        """
        batch = as_prompts(prompts)
        params = self.params_for(batch, sampling_params)
        adapters = self.adapters_for(lora_request, len(batch))
        return self._shared.stream(*self.resolved(batch, params), adapters)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRA = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template."""
        conversations: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        prompts: list[Prompt] = [self.chat_prompt(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation."""
        return list(self.chat_prompt(messages, **options).token_ids)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> PromptTokens:
        """The tokens and images of a conversation; special tokens come from the template alone (`text.roles`)."""
        tokenizer = self.model.require_tokenizer()
        check_messages(messages)
        messages, images = taken_out(messages)
        pictures = required_pictures(self._pictures).read_all(images) if images else []
        if options.get("tools") and self.model.chat_template is not None:
            check_takes_tools(self.model.chat_template)
        placeholders = Placeholders(tokenizer.special_tokens)
        text = render_chat(
            self.model.chat_template,
            placeholders.protect(list(messages)),
            special_tokens=self.model.special_tokens,
            **placeholders.protect(options),
        )
        parts = placeholders.parts(text)
        if pictures:
            return parts_with_images(self.model, parts, pictures)
        return PromptTokens(None, tokenizer.encode_parts(parts))

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
        self._shared.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hand_over(self, owner: str) -> None:
        """Let another object (such as `AsyncLLM`) run the engine on its own thread; calls are refused from now on."""
        self._shared.hand_over(owner)

    def take_back(self) -> None:
        """Accept calls again, after the other owner has stopped its thread."""
        self._shared.take_back()

    # -- arguments ---------------------------------------------------------------------------------------------
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

    def resolved(self, batch: list[Prompt], params: Sequence[Params]) -> tuple[list[PromptTokens], list[Params]]:
        """The tokens of each prompt, and its parameters: the end of a text with a gap is marked by further tokens."""
        pictures = pictures_of(self._pictures, batch)
        prompts = [tokens_of(self.model, prompt, own) for prompt, own in zip(batch, pictures, strict=True)]
        each = list(params)
        for number, prompt in enumerate(batch):
            if suffix_of(prompt) is not None:
                each[number] = ending_at(each[number], self.model.require_infill().ends)
        return prompts, each

    def prompt_tokens(self, prompt: Prompt) -> PromptTokens:
        """The text, token ids and images of a prompt in any of its forms."""
        return tokens_of(self.model, prompt, *pictures_of(self._pictures, [prompt]))
