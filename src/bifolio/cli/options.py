"""Options that several verbs share, and groups of them: a group is one parameter of a verb's function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from bifolio.cli import commands
from bifolio.config import MAX_LORA_RANK, MAX_LORAS, NUMERICS, SPECULATIVE_METHODS, SpeculativeConfig
from bifolio.model.sampling_defaults import help_text

if TYPE_CHECKING:
    from bifolio.api.llm import LLM

SUM = "lora"  # name of the sum of the adapters of --lora
Model = Annotated[
    str | None,
    commands.option("--model", "-m", help="A model folder, a .gguf file, or a model's name (see `bifolio models`)."),
]
MaxTokens = Annotated[int | None, commands.option("--max-tokens", "-n", help="The most tokens to generate.")]
Temperature = Annotated[
    float | None,
    commands.option("--temperature", "-t", help=f"Randomness of sampling; 0 is greedy; {help_text('temperature')}."),
]
TopP = Annotated[
    float | None, commands.option("--top-p", help=f"Keep the most likely tokens up to this mass; {help_text('top_p')}.")
]
TopK = Annotated[
    int | None, commands.option("--top-k", help=f"Keep this many most likely tokens; 0 is off; {help_text('top_k')}.")
]
MinP = Annotated[
    float | None,
    commands.option("--min-p", help=f"Drop tokens less likely than this fraction of the best; {help_text('min_p')}."),
]
RepetitionPenalty = Annotated[
    float | None, commands.option("--repetition-penalty", help="Above 1 discourages repeats.")
]
Seed = Annotated[int | None, commands.option("--seed", help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, commands.option("--stop", help="Text that ends the output; may be repeated.")]
Memory = Annotated[str | None, commands.option("--memory", help="Memory for the KV cache, such as 2GB.")]
MaxModelLen = Annotated[
    int | None, commands.option("--max-model-len", help="The longest prompt plus output, in tokens.")
]
MaxNumSeqs = Annotated[int, commands.option("--max-num-seqs", help="Sequences that run at the same time.")]
BlockSize = Annotated[int, commands.option("--block-size", help="Tokens in one block of the cache.", advanced=True)]
ChunkSize = Annotated[
    int, commands.option("--chunk-size", help="The most prompt tokens of one request per step.", advanced=True)
]
AnyNumSeqs = Annotated[
    int | None,
    commands.option("--max-num-seqs", help="Sequences that run at the same time; default: 16, 256 on a GPU."),
]
AnyBlockSize = Annotated[
    int | None,
    commands.option("--block-size", help="Tokens in one block of the cache; default: 16, 64 on a GPU.", advanced=True),
]
AnyChunkSize = Annotated[
    int | None,
    commands.option(
        "--chunk-size",
        help="The most prompt tokens of one request per step; default: 512, 8192 on a GPU.",
        advanced=True,
    ),
]
Deterministic = Annotated[
    bool,
    commands.option(
        "--deterministic",
        help="On a GPU: output that depends on the request alone, bit for bit; slower.",
        advanced=True,
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    commands.option(
        "--gpu-memory-utilization",
        help="Fraction of GPU memory left by weights and activations that the cache takes.",
        advanced=True,
    ),
]
KvDtype = Annotated[
    str,
    commands.option(
        "--kv-dtype",
        "--kv-cache-dtype",
        help="Format of the KV cache: auto, f32, f16, bf16, q8_0 (CPU) or fp8 (GPU).",
    ),
]
Dtype = Annotated[
    str,
    commands.option(
        "--dtype", help="Type of dense weights on a GPU: auto, bfloat16, float16 or float32.", advanced=True
    ),
]
Quantization = Annotated[
    str | None,
    commands.option("--quantization", help="Rounds dense models at load: q8_0, q4_0, or on a GPU fp8.", advanced=True),
]
CpuExperts = Annotated[
    str | None,
    commands.option(
        "--cpu-experts",
        help="Experts in the memory of the host beside a GPU: all, auto, or the number of layers.",
        advanced=True,
    ),
]
Activations = Annotated[
    str,
    commands.option(
        "--activations",
        help="Rounding of activations with quantised weights on the CPU: int8 (faster), int16 (nearly exact) or auto "
        "(int16 below 1B parameters, but for encoders).",
        advanced=True,
    ),
]
Threads = Annotated[int | None, commands.option("--threads", help="Threads of the CPU kernels; default: all cores.")]
TensorParallelSize = Annotated[
    int,
    commands.option(
        "--tensor-parallel-size", min=1, help="Processes that share the model, each with a part of it.", advanced=True
    ),
]
EnableSleepMode = Annotated[
    bool,
    commands.option("--enable-sleep-mode", help="A GPU's engine can sleep and take other weights.", advanced=True),
]
Device = Annotated[str, commands.option("--device", help="Device: auto, cpu, cuda or cuda:N.")]
KvOffload = Annotated[
    str | None, commands.option("--kv-offload", help="Memory for blocks that leave the KV cache, such as 8GB.")
]
KvOffloadDir = Annotated[
    str | None,
    commands.option("--kv-offload-dir", help="Folder for such blocks: found again later, and after a restart."),
]
KvOffloadDisk = Annotated[
    str | None, commands.option("--kv-offload-disk", help="The most bytes of files in that folder; default: 16GiB.")
]
Verbose = Annotated[bool, commands.option("--verbose", "-v", help="Print the memory plan and notes of the loader.")]
Speculative = Annotated[
    str | None,
    commands.option(
        "--speculative",
        help="Speculative decoding: 'draft' (a small draft model), 'ngram', 'eagle' (an EAGLE-3 head) or 'mtp' (the "
        "model's own head).",
    ),
]
DraftModel = Annotated[
    str | None,
    commands.option(
        "--draft-model", help="Draft model; default: NAME-draft of the model NAME. With eagle: the folder of the head."
    ),
]


Lora = Annotated[
    list[str] | None,
    commands.option(
        "--lora",
        help="Adapter (LoRA) as PATH or PATH:SCALE, a folder of PEFT or a .gguf file; repeatable: their sum.",
    ),
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when an answer ends."""

    HEADING: ClassVar[str] = "sampling"

    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    seed: Seed = None
    stop: Stop = None

    def explicit(self) -> dict[str, Any]:
        """The options that the user gave; the model's defaults stand for the others."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Numerics:
    """The options that decide on numbers: the same names and defaults on every verb that runs a model."""

    HEADING: ClassVar[str] = "numbers and devices"

    kv_dtype: KvDtype = NUMERICS.kv_dtype
    quantization: Quantization = None
    activations: Activations = NUMERICS.activations
    threads: Threads = NUMERICS.threads
    device: Device = NUMERICS.device
    deterministic: Deterministic = NUMERICS.deterministic

    def for_llm(self) -> dict[str, Any]:
        """The arguments of `LLM` that these options stand for."""
        options = {**vars(self), "kv_cache_dtype": self.kv_dtype, "deterministic": self.deterministic or None}
        del options["kv_dtype"]
        return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


Mmproj = Annotated[
    Path | None,
    commands.option("--mmproj", help="File with the tower of a .gguf model; default: the one beside the model."),
]


@dataclass(frozen=True)
class Engine(Numerics):
    """All options of the engine but the size of the batch."""

    HEADING: ClassVar[str] = "engine"

    mmproj: Mmproj = None
    memory: Memory = None
    max_model_len: MaxModelLen = None
    block_size: AnyBlockSize = None
    chunk_size: AnyChunkSize = None
    dtype: Dtype = "auto"
    cpu_experts: CpuExperts = None
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    tensor_parallel_size: TensorParallelSize = 1
    enable_sleep_mode: EnableSleepMode = False
    kv_offload: KvOffload = None
    kv_offload_dir: KvOffloadDir = None
    kv_offload_disk: KvOffloadDisk = None

    def llm(self, model: str | None, lora: list[str] | None = None, **others: Any) -> LLM:
        """The model on an engine with these options, behind a bar with the time left while it is loaded.

        All calls use the sum of the adapters `lora`.
        """
        from bifolio.api.llm import LLM
        from bifolio.cli.progress import steps_bar

        adapters = sum_of_adapters(lora)
        with steps_bar("loading") as on_load:
            # One command runs few batch sizes: its steps are captured when they occur.
            llm = LLM(model, **self.for_llm(), **others, lora_modules=adapters, warm_up=False, on_load=on_load)
        llm.lora = SUM if adapters else None
        return llm


@dataclass(frozen=True)
class BatchEngine(Engine):
    """The options of an engine for several sequences at once, with drafts."""

    max_num_seqs: AnyNumSeqs = None
    speculative: Speculative = None
    draft_model: DraftModel = None

    def for_llm(self) -> dict[str, Any]:
        options = super().for_llm()
        del options["draft_model"]
        return {**options, "speculative": speculative_config(self.speculative, self.draft_model)}


@dataclass(frozen=True)
class Adapters:
    """The adapters of a served model."""

    HEADING: ClassVar[str] = "adapters"

    lora_modules: Annotated[
        list[str] | None,
        commands.option(
            "--lora-modules",
            help="Adapters (LoRA) as NAME=PATH, which requests name as their model; repeatable.",
            takes_several=True,
        ),
    ] = None
    lora_dir: Annotated[
        str | None,
        commands.option("--lora-dir", help="Folder of adapters that are loaded on first use, by their names."),
    ] = None
    max_loras: Annotated[
        int,
        commands.option(
            "--max-loras", min=1, help="Adapters in memory; others are read again when they are used.", advanced=True
        ),
    ] = MAX_LORAS
    max_lora_rank: Annotated[
        int, commands.option("--max-lora-rank", min=1, help="Largest rank of an adapter.", advanced=True)
    ] = MAX_LORA_RANK

    def for_llm(self) -> dict[str, Any]:
        """The arguments of `LLM` that these options stand for."""
        modules: dict[str, str] = {}
        for text in self.lora_modules or []:
            name, sign, path = text.partition("=")
            if not sign or not name or not path:
                raise commands.BadParameter(f"--lora-modules takes NAME=PATH, not {text!r}")
            if name in modules:
                raise commands.BadParameter(f"--lora-modules names {name!r} twice: use another name")
            modules[name] = path
        return {**vars(self), "lora_modules": modules}


def sum_of_adapters(lora: list[str] | None) -> dict[str, list[tuple[str, float]]]:
    """`lora_modules` with the sum of all adapters of a command; empty without any."""
    return {} if not lora else {SUM: [path_and_scale(each) for each in lora]}


def path_and_scale(text: str) -> tuple[str, float]:
    """PATH or PATH:SCALE."""
    path, _, scale = text.rpartition(":")
    if path and not Path(text).exists():
        try:
            return path, finite(scale)
        except ValueError:
            raise commands.BadParameter(f"--lora {text}: the scale {scale!r} is no number") from None
    return text, 1.0


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def speculative_config(method: str | None, draft_model: str | None) -> SpeculativeConfig | None:
    """The configuration that the two options describe; None without them."""
    from bifolio.errors import ConfigError

    if method is None and draft_model is None:
        return None
    if method not in (None, *SPECULATIVE_METHODS):
        raise ConfigError(f"--speculative is 'draft', 'ngram', 'eagle' or 'mtp', not {method!r}")
    if method in ("ngram", "mtp") and draft_model is not None:
        raise ConfigError("--draft-model is for --speculative draft and eagle: leave one of them out")
    if method == "eagle" and draft_model is None:
        raise ConfigError("--speculative eagle needs the folder of a head: pass --draft-model PATH")
    return SpeculativeConfig(cast(Any, method or "draft"), draft_model=draft_model)
