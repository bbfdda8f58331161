"""Settings of an engine, and the defaults of all that influence numerical results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bifolio.config.cache import CacheConfig
from bifolio.config.tiers import TierSettings
from bifolio.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NumericDefaults:
    """Defaults of all settings that influence numerical results.

    `generate`, `chat`, `serve`, `eval`, the benchmarks, `LLM` and `AsyncLLM` take their defaults from `NUMERICS`, so a
    greedy request gives the same answer with each of them.
    """

    device: str = "auto"  # a GPU if there is one, else the CPU
    kv_dtype: str = "auto"  # type of cached keys and values: f32 on the CPU, the type of the weights on a GPU
    activations: Literal["auto", "int8", "int16"] = "auto"  # with quantised weights on the CPU: by the model's size
    threads: int | None = None  # of the CPU kernels; None: one for each core
    deterministic: bool = False  # on a GPU; the CPU kernels are always deterministic


NUMERICS = NumericDefaults()


SPECULATIVE_METHODS = ("ngram", "draft", "eagle", "mtp")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Settings of speculative decoding: draft several tokens, then verify them in one pass."""

    method: Literal["ngram", "draft", "eagle", "mtp"] = "ngram"
    length: int = 4  # the most draft tokens per step
    draft_model: str | None = None  # a model (draft), or the folder of a head (eagle)
    adaptive: bool = True  # shorten or pause drafts that cost more time than they save

    def __post_init__(self) -> None:
        if self.method not in SPECULATIVE_METHODS:
            names = ", ".join(repr(name) for name in SPECULATIVE_METHODS)
            raise ConfigError(f"the speculative method is one of {names}, not {self.method!r}")
        if self.method == "eagle" and self.draft_model is None:
            raise ConfigError("speculative method 'eagle' needs the folder of a head: pass draft_model")
        if not 1 <= self.length <= 32:
            raise ConfigError(f"speculative length must be between 1 and 32, not {self.length}")


MAX_LORAS, MAX_LORA_RANK = 16, 256  # defaults


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Limits of the low-rank adapters of an engine."""

    max_loras: int = MAX_LORAS  # adapters in memory; the least recently used ones are read again on use
    max_rank: int = MAX_LORA_RANK  # of a change
    folder: str | None = None  # adapters that are loaded by their name on first use

    def __post_init__(self) -> None:
        for name, value in (("max_loras", self.max_loras), ("max_lora_rank", self.max_rank)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ConfigError(f"lora_dir {self.folder} is no folder: pass one that holds adapters")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine: limits of a step, of the queue and of sequences."""

    cache: CacheConfig
    max_model_len: int
    max_num_seqs: int = 16
    token_budget: int = 512  # the most tokens per step, prefill and decode together
    chunk_size: int = 512  # the most prompt tokens of one sequence in one step
    max_waiting: int | None = None  # the most requests in the queue; None: no limit
    deterministic: bool = True
    device: str = "cpu"
    speculative: SpeculativeConfig | None = None
    launch_ahead: int | None = None  # steps launched before the previous one is collected; None: the kernel set's value
    tiers: TierSettings | None = None  # below the cache; None: there are none
    warm_up: bool = True  # on a GPU: compile kernels and capture decode steps before the first request
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    def __post_init__(self) -> None:
        if self.launch_ahead not in (None, 0, 1):
            raise ConfigError(f"launch_ahead must be 0 or 1, not {self.launch_ahead}")
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, not {self.chunk_size}")
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"the token budget of {self.token_budget} per step is below max_num_seqs={self.max_num_seqs}: every "
                f"running sequence needs one token a step; pass token_budget >= {self.max_num_seqs} or fewer sequences"
            )
        needed = -(-self.max_model_len // self.cache.block_size) + 1
        if self.cache.num_blocks < needed:
            most = (self.cache.num_blocks - 1) * self.cache.block_size
            raise ConfigError(
                f"{self.cache.num_blocks} blocks of {self.cache.block_size} tokens cannot hold one sequence of "
                f"max_model_len={self.max_model_len} tokens: pass num_blocks >= {needed} or max_model_len <= {most}"
            )
