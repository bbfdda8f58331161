"""Settings of a training run: one frozen dataclass, from which the command lines are generated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Preset:
    """The shape of a network; the vocabulary comes from the tokenizer."""

    architecture: str  # "llama", "gpt2" or "lfm2"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    context: int


PRESETS = {
    "char": Preset("gpt2", 128, 4, 4, 4, 512, 64),  # 0.8 M parameters: minutes on a CPU
    "shakespeare": Preset("gpt2", 160, 5, 5, 5, 640, 256),  # 1.6 M
    "draft": Preset("llama", 160, 3, 5, 1, 416, 512),  # 0.8 M and tied embeddings: drafts for speculative decoding
    "stories": Preset("llama", 384, 8, 6, 3, 1024, 512),  # 13 M and tied embeddings
    "gpt2-small": Preset("gpt2", 768, 12, 12, 12, 3072, 1024),
}


class Range(NamedTuple):
    """The values of a setting: from `low` to `high`, where an open end is not one of them."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = True  # infinity is no value of a setting

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"
        return low if math.isinf(self.high) else f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


COUNT, AMOUNT, DECAY = Range(1), Range(0), Range(0, 1)
RANGES = {
    **dict.fromkeys(("steps", "batch_size", "accumulate", "vocab_size", "eval_every", "log_every", "eval_sequences",
                     "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "context"), COUNT),
    **dict.fromkeys(("warmup", "weight_decay", "clip", "seed", "save_every", "sample_every", "sample_tokens",
                     "sample_temperature", "max_minutes"), AMOUNT),
    "beta1": DECAY, "beta2": DECAY, "final_learning_rate": Range(0, 1, open_high=False),
    "learning_rate": Range(0, open_low=True), "eval_fraction": Range(0, 1, open_low=True),
}  # fmt: skip


def check_ranges(settings: Any, ranges: Mapping[str, Range]) -> None:
    """Refuse a value outside the range of its setting, by the name of its option; None stands for a default."""
    for name, allowed in ranges.items():
        value = getattr(settings, name, None)
        if value is not None and not allowed.holds(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: pass a number {allowed}")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of one run. Intervals are in steps; a step processes `batch_size` sequences over all processes."""

    data: tuple[str, ...] = _option((), "text files (plain or .xz) or folders with text files")
    output: str = _option("trained", "folder for the model, its checkpoints and the loss curve")
    # the tokenizer
    tokenizer: str = _option("bpe", "'bpe', 'char', or a tokenizer.json to reuse")
    vocab_size: int = _option(4096, "tokens of a byte-level BPE")
    # the network
    preset: str = _option("stories", f"shape of the network: {', '.join(PRESETS)}")
    architecture: str | None = _option(None, "'llama', 'gpt2' or 'lfm2' (a hybrid) instead of the preset's")
    hidden_size: int | None = _option(None, "width instead of the preset's")
    num_layers: int | None = _option(None, "layers instead of the preset's")
    num_heads: int | None = _option(None, "attention heads instead of the preset's")
    num_kv_heads: int | None = _option(None, "key/value heads instead of the preset's")
    intermediate_size: int | None = _option(None, "width of the MLP instead of the preset's")
    context: int | None = _option(None, "tokens of a training sequence instead of the preset's")
    # the run
    steps: int = _option(2000, "optimizer steps")
    batch_size: int = _option(32, "sequences of one step, over all processes and accumulation")
    accumulate: int = _option(1, "forward and backward passes per step (gradient accumulation), to save memory")
    learning_rate: float = _option(1e-3, "highest learning rate, reached after the warm-up")
    final_learning_rate: float = _option(0.1, "learning rate at the end, as a fraction of the highest")
    warmup: int = _option(100, "steps of linear warm-up")
    weight_decay: float = _option(0.1, "weight decay of matrices and embeddings")
    beta1: float = _option(0.9, "AdamW's decay of the mean gradient")
    beta2: float = _option(0.95, "AdamW's decay of the squared gradient")
    clip: float = _option(1.0, "largest norm of the gradient; 0: no clipping")
    seed: int = _option(0, "seed of initial weights, data order, split and samples")
    teacher: str | None = _option(None, "folder of a teacher model with the same tokenizer, for distillation")
    eval_fraction: float = _option(0.05, "share of the text that is held out")
    eval_every: int | None = _option(None, "steps between evaluations; by default a tenth of the run, at most 250")
    eval_sequences: int = _option(128, "held-out sequences of one evaluation, at most")
    keep_best: bool = _option(False, "export the weights of the best evaluation instead of the last ones")
    log_every: int = _option(10, "steps between points of the loss curve")
    save_every: int = _option(500, "steps between checkpoints; 0: only at the end")
    resume: bool = _option(False, "continue from the checkpoint in the output folder")
    force: bool = _option(False, "replace a model or checkpoint that is already in the output folder")
    sample_every: int = _option(500, "steps between printed samples; 0: none")
    sample_prompt: str = _option("", "text that samples continue")
    sample_tokens: int = _option(100, "tokens of a sample")
    sample_temperature: float = _option(0.8, "temperature of samples")
    max_minutes: float = _option(0.0, "time limit in minutes, after which the run saves and exports; 0: no limit")
    device: str = _option("auto", "'cpu', 'cuda', or 'auto'")
    bf16: bool | None = _option(None, "bfloat16 matrix products; by default on CUDA only")
    compile: bool = _option(False, "compile the network with torch.compile")
    gguf: str | None = _option(None, "also write a GGUF in this format: f32, f16, q8_0 or q4_0")

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"no preset is called {self.preset!r}; choose one of {', '.join(PRESETS)}")
        check_ranges(self, RANGES)
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"a batch of {self.batch_size} sequences cannot be divided into {self.accumulate} equal passes: "
                "choose an accumulate that divides batch_size"
            )
        self._check_heads()
        if self.gguf is not None and self.gguf not in GGUF_FORMATS:
            raise ConfigError(f"a GGUF cannot be written as {self.gguf!r}: choose one of {', '.join(GGUF_FORMATS)}")

    def _check_heads(self) -> None:
        """The width is divided among the heads, and they among those of keys and values."""
        shape = self.shape()
        for name, size, parts in (
            ("num-heads", shape.hidden_size, shape.num_heads),
            ("num-kv-heads", shape.num_heads, shape.num_kv_heads),
        ):
            if size % parts:
                whole = "a width" if name == "num-heads" else "a number of heads"
                raise ConfigError(f"--{name} is {parts}, which does not divide {whole} of {size}: pass a divisor")

    @property
    def steps_between_evaluations(self) -> int:
        """As chosen; otherwise a run has ten evaluations or more."""
        return self.eval_every or max(1, min(250, self.steps // 10))

    def shape(self) -> Preset:
        """The preset with explicitly chosen values."""
        preset = PRESETS[self.preset]
        names = [f.name for f in dataclasses.fields(Preset)]
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "num_heads" in chosen:  # the preset's number of key/value heads may not divide it
            chosen.setdefault("num_kv_heads", chosen["num_heads"])
        return dataclasses.replace(preset, **chosen)

    def model_config(self, vocab_size: int, end_of_text: int | None) -> ModelConfig:
        """The configuration for a vocabulary; `end_of_text` both begins and ends a document."""
        from bifolio.model.families import all_families, family_named  # imports numpy, which --help does not need

        shape = self.shape()
        family = family_named(shape.architecture)
        if family is None or family.fresh_config is None:
            names = " and ".join(repr(known.name) for known in all_families() if known.fresh_config is not None)
            raise ConfigError(f"train makes {names} models, not {shape.architecture!r}")
        config = family.fresh_config(
            vocab_size=vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            max_position=shape.context,
        )
        ends = () if end_of_text is None else (end_of_text,)
        return dataclasses.replace(config, bos_token_id=end_of_text, eos_token_ids=ends)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then cosine decay to the final rate."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        low = self.learning_rate * self.final_learning_rate
        return low + 0.5 * (self.learning_rate - low) * (1.0 + math.cos(math.pi * progress))


GGUF_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")

# Settings that may differ between a run and its continuation: they do not change the result, and `steps` extends it.
FREE_ON_RESUME = frozenset(
    {"steps", "output", "resume", "force", "eval_every", "eval_sequences", "log_every", "save_every", "sample_every",
     "sample_prompt", "sample_tokens", "sample_temperature", "max_minutes", "device", "compile", "gguf", "keep_best",
     "data", "tokenizer"}
)  # fmt: skip
