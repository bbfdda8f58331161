"""`LanguageModel`: the network as a torch module with explicit prefill and decode phases.

    prefill(idx, targets)        all positions of known sequences in one pass: training, evaluation
    decode(idx, max_new_tokens)  one token at a time on the paged cache: generation

Both run `transformer.forward`, the function that serving runs. Parameters have the names and layouts of Hugging Face,
so `state_dict()` and saved files are compatible with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bifolio.api.decode_loop import DecodeLoop, TokenChooser
from bifolio.api.exact_network import engine_logits, exact_kernels, with_value
from bifolio.api.language_parameters import ParameterForm, file_tensor, register
from bifolio.config import CacheConfig, ModelConfig
from bifolio.engine.executor import ModelRunner
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.engine.state_plan import num_live_states
from bifolio.errors import (
    ConfigError,
    EmptyPromptError,
    PromptTooLongError,
    TokenIdError,
)
from bifolio.kernels.interface import Batch, KernelSet
from bifolio.kernels.select import select_kernels, torch_kernels
from bifolio.kernels.torch_dtypes import dtype_name
from bifolio.long_rope import rope_of_length
from bifolio.model import transformer
from bifolio.model.huggingface.config import config_from_hf, config_to_hf
from bifolio.model.huggingface.hf_loader import folder_tensors, read_json, with_generation_ids
from bifolio.model.huggingface.safetensors_file import open_safetensors, write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.tensor_names import assemble
from bifolio.model.weights import LayerWeights, ModelWeights
from bifolio.sampling.sampler import prompt_logprobs

IGNORED_TARGET = -100  # positions with this target are excluded from the loss
BLOCK_SIZE = 16  # of the paged cache that `decode` runs on

CHARACTER_MODEL = ModelConfig(  # a small character model for the 65 characters of tinyshakespeare
    architecture="gpt2",
    vocab_size=65,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=512,
    max_position=128,
    norm="layer",
    activation="gelu_tanh",
    gated_mlp=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tie_embeddings=True,
    learned_positions=True,
)


class LanguageModel(nn.Module):
    """A decoder-only language model of most families, dense or with experts; by default a small character model."""

    def __init__(self, config: ModelConfig = CHARACTER_MODEL, *, seed: int | None = None) -> None:
        """Initialise random weights; `seed` makes them reproducible without changing torch's global generator."""
        super().__init__()
        if not config.language_head:
            raise ConfigError(f"LanguageModel holds decoders, and {config.architecture} is an encoder: use bifolio.LLM")
        beside = config.moe is not None and (config.moe.beside_mlp or config.moe.expert_bias)
        mixed = config.moe is not None and config.recurrent is not None
        if beside or mixed or config.mla is not None or config.sinks:
            raise ConfigError(
                f"LanguageModel holds networks without latents, sinks, and experts with biases, beside an MLP or in "
                f"hybrids, which {config.architecture} has: use bifolio.LLM"
            )
        if config.value_norm or config.layer_scales or config.layer_inputs is not None or config.streams is not None:
            raise ConfigError(
                f"LanguageModel holds networks of one residual stream without normed values, factors and inputs of "
                f"layers, which {config.architecture} has: use bifolio.LLM"
            )
        if config.shared_blocks is not None:
            raise ConfigError(
                f"LanguageModel holds networks whose layers share no blocks, which those of {config.architecture} do: "
                "use bifolio.LLM"
            )
        self.config = config
        self.hf_config: dict[str, Any] | None = None  # config.json as read, so that unknown fields are kept when saving
        self.generation_config: dict[str, Any] = {}
        self._form = ParameterForm(config)
        self._names = self._form.names
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for name, shape in self._form.shapes().items():
            register(self, name, nn.Parameter(self._form.initial(name, shape, generator)))
        if config.tie_embeddings:
            register(self, self._names.head + ".weight", self.get_parameter(self._names.embedding + ".weight"))
        self._frequencies: tuple[torch.Tensor, ...] = ()
        self._network: Callable[..., Any] = transformer.forward

    # -- the two phases -----------------------------------------------------------------------------------
    def prefill(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """PREFILL PHASE: idx [B, T] → logits f32[B, T, vocab] and, with targets [B, T], the mean cross-entropy.

        All positions are computed in parallel and nothing is cached: for training and evaluation, where the tokens
        are known. Targets of -100 are excluded from the loss.
        """
        self._check_tokens(idx)
        batch_size, length = idx.shape
        if length > self.config.max_position:
            raise PromptTooLongError(
                f"the sequences have {length} tokens and the model takes {self.config.max_position}: shorten them"
            )
        batch = fresh_batch(idx, self._kernels(), rope_of_length(self.config, length) or 0)
        network = self._network if self.training else transformer.forward
        logits = network(self.weights(), batch, self._kernels(), None)
        logits = logits.unflatten(0, (batch_size, length))
        if targets is None:
            return logits, None
        if targets.shape != idx.shape:
            raise ConfigError(
                f"targets have shape {tuple(targets.shape)} and tokens {tuple(idx.shape)}: make them equal"
            )
        self._check_targets(targets)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED_TARGET)

    def token_logprobs(self, idx: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
        """idx [B, T] → f32[B, T - 1]: the logprob of each token after the ones before it, with its gradient.

        With `exact` they are the logprobs that an engine gives a rollout, to the last bit, if it has these parameters:
        on the CPU in float32 on the native kernels, on a GPU in the same type with `deterministic=True`. Operations, or
        the pass, are then computed twice (`api.exact_network`).
        """
        if not exact:
            logits, _ = self.prefill(idx)
            return _logprobs(logits[:, :-1], idx[:, 1:])
        self._check_tokens(idx)
        batch_size, length = idx.shape
        rope = rope_of_length(self.config, length) or 0
        if self.device.type == "cpu":
            kernels = exact_kernels(self._kernels(), select_kernels("cpu", name="native"))
            logits = transformer.forward(self.weights(), fresh_batch(idx, kernels, rope), kernels, None)
            values, smooth = logits.detach(), logits.unflatten(0, (batch_size, length))
        else:
            kernels, (smooth, _) = self._engine_kernels(), self.prefill(idx)
            values = engine_logits(self.weights(), fresh_batch(idx, kernels, rope), kernels)
        rows = kernels.to_host(values).reshape(batch_size, length, -1)[:, :-1].reshape(-1, values.shape[-1])
        scores = prompt_logprobs(rows, idx[:, 1:].flatten().cpu().numpy(), 0)
        return with_value(_logprobs(smooth[:, :-1], idx[:, 1:]), scores.logprobs)

    @torch.no_grad()
    def decode(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> torch.Tensor:
        """DECODE PHASE: extend idx [B, T] by up to `max_new_tokens` tokens each, one at a time: [B, T + new].

        Temperature 0 selects the most likely token. A sequence that produced a stop token repeats it until all are
        finished. The context is the last `max_position` tokens; beyond that length every token needs a pass over the
        whole window, because all positions shift.
        """
        self._check_tokens(idx)
        _check_count(max_new_tokens)
        choose = TokenChooser(temperature, top_k, top_p, seed, idx.device)
        if not max_new_tokens:
            return idx
        context = self.config.max_position
        loop = self._decode_loop(idx.shape[0], min(idx.shape[1] + max_new_tokens, context))
        stops = torch.tensor(list(stop_token_ids), dtype=idx.dtype, device=idx.device)
        done = torch.zeros(idx.shape[0], dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            chosen = choose(loop.logits(idx[:, -context:])).to(idx.dtype)
            chosen = torch.where(done, idx[:, -1], chosen)
            idx = torch.cat((idx, chosen[:, None]), dim=1)
            done = done | torch.isin(chosen, stops)
            if len(stops) and bool(done.all()):
                break
        return idx

    @torch.no_grad()
    def decode_by_recomputing(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> torch.Tensor:
        """Decode without a cache: recompute the whole prefix for every token. Equal to `decode`, but slow."""
        _check_count(max_new_tokens)
        choose = TokenChooser(temperature, top_k, top_p, seed, idx.device)
        for _ in range(max_new_tokens):
            logits, _ = self.prefill(idx[:, -self.config.max_position :])
            idx = torch.cat((idx, choose(logits[:, -1, :]).to(idx.dtype)[:, None]), dim=1)
        return idx

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Alias of `prefill`, so that `model(idx, targets)` works."""
        return self.prefill(idx, targets)

    def generate(self, idx: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Alias of `decode`."""
        return self.decode(idx, max_new_tokens, **options)

    def compile_network(self, backend: str = "inductor") -> None:
        """Compile `prefill` with torch.compile for training: the first call of a shape is slow, later ones faster."""
        self._network = torch.compile(transformer.forward, backend=backend)

    # -- files --------------------------------------------------------------------------------------------
    @classmethod
    def from_pretrained(cls, folder: str | Path) -> LanguageModel:
        """Load a model from a Hugging Face-layout folder, in float32."""
        folder = Path(folder)
        raw = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        model = cls(with_generation_ids(config_from_hf(raw), generation), seed=0)
        model.hf_config = {name: value for name, value in raw.items() if name != "quantization_config"}  # it is in f32
        model.generation_config = generation
        model._form.read(dict(model.named_parameters()), folder_tensors(folder, raw), str(folder))
        return model

    def load_safetensors(self, path: str | Path) -> None:
        """Read all parameters from one file, or from the files of a folder."""
        path = Path(path)
        tensors = folder_tensors(path) if path.is_dir() else open_safetensors(path).tensors
        self._form.read(dict(self.named_parameters()), tensors, str(path))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the layout of transformers."""
        folder = Path(folder)
        if self.hf_config is None and self.config.weight_factors:
            raise ConfigError(
                "the configuration has factors of weights, which only the config.json that it came from describes: "
                "load the model with from_pretrained"
            )
        folder.mkdir(parents=True, exist_ok=True)
        raw = self.hf_config or config_to_hf(self.config)
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        if self.generation_config:
            text = json.dumps(self.generation_config, indent=2) + "\n"
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        tensors = {name: file_tensor(parameter) for name, parameter in self.named_parameters()}
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})

    # -- internals ----------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self.get_parameter(self._names.embedding + ".weight").device

    def weights(self) -> ModelWeights:
        """The parameters by role, as `transformer.forward` expects them; gradients flow through."""

        def fetch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return self._form.tensor(name, shape, self.get_parameter)

        weights = assemble(self.config, self._names, fetch, fetch)
        weights = replace(weights, layers=tuple(with_experts(layer, self._kernels()) for layer in weights.layers))
        if len(self._frequencies) != len(weights.inverse_frequencies) or any(
            f.device != self.device for f in self._frequencies
        ):
            self._frequencies = tuple(torch.from_numpy(f).to(self.device) for f in weights.inverse_frequencies)
        return replace(weights, inverse_frequencies=self._frequencies)

    def _decode_loop(self, num_sequences: int, max_length: int) -> DecodeLoop:
        kernels = self._kernels()
        blocks_each = -(-max_length // BLOCK_SIZE)
        model = LoadedModel(Path(), self.config, weights=self.weights())
        num_states = num_live_states(self.config, num_sequences)
        cache = CacheConfig(1 + num_sequences * blocks_each, BLOCK_SIZE, kernels.kv_dtype, num_states=num_states)
        return DecodeLoop(ModelRunner.new(model, cache, kernels), num_sequences)

    def _kernels(self) -> KernelSet:
        dtype = self.get_parameter(self._names.embedding + ".weight").dtype
        return torch_kernels(str(self.device), dtype_name(dtype))

    def _engine_kernels(self) -> KernelSet:
        """The set of a deterministic engine with parameters of this type on this device."""
        dtype = dtype_name(self.get_parameter(self._names.embedding + ".weight").dtype)
        return select_kernels(str(self.device), dtype=dtype, deterministic=True)

    def _check_tokens(self, idx: torch.Tensor) -> None:
        if idx.ndim != 2:
            raise ConfigError(f"tokens must have shape [batch, length], not {tuple(idx.shape)}")
        if idx.is_floating_point() or idx.dtype == torch.bool:
            raise TokenIdError(f"token ids are whole numbers, not {idx.dtype}: pass a tensor of torch.long")
        if idx.numel() == 0:
            raise EmptyPromptError("there are no tokens to process: pass at least one per sequence")
        if idx.is_cuda and self.training:
            return  # reading the values would synchronise every training step with the device
        low, high = int(idx.min()), int(idx.max())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise TokenIdError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size} tokens")

    def _check_targets(self, targets: torch.Tensor) -> None:
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TokenIdError(f"targets are token ids, not {targets.dtype}: pass a tensor of torch.long")
        if targets.is_cuda and self.training:
            return
        wrong = targets[(targets != IGNORED_TARGET) & ((targets < 0) | (targets >= self.config.vocab_size))]
        if len(wrong):
            raise TokenIdError(
                f"the target {int(wrong[0])} is outside the vocabulary of {self.config.vocab_size} tokens: pass token "
                f"ids, or {IGNORED_TARGET} to exclude a position from the loss"
            )


def _logprobs(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """f32[B, T]: of the token that follows each position."""
    return logits.log_softmax(dim=-1).gather(-1, following[..., None].long())[..., 0]


def _check_count(max_new_tokens: int) -> None:
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be a whole number of 0 or more, not {max_new_tokens!r}")


def with_experts(layer: LayerWeights, kernels: KernelSet) -> LayerWeights:
    """The layer with its experts as the kernel set takes them."""
    if layer.moe is None:
        return layer
    return replace(layer, moe=replace(layer.moe, experts=kernels.prepare_experts(layer.moe.experts)))


def fresh_batch(idx: torch.Tensor, kernels: KernelSet, rope: int = 0) -> Batch:
    """Pack whole sequences [B, T] into a batch without cached tokens, with logits for every token."""
    batch_size, length = idx.shape
    padding = np.zeros(length, dtype=np.int32)  # replaced by the tokens on their device
    batch = HostBatch.from_runs([], [Run(row, 0, padding, rope) for row in range(batch_size)], None)
    return replace(batch.to(kernels), token_ids=idx.flatten())
