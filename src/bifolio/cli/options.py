"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

from bifolio.cli import commands
from bifolio.model.sampling_defaults import help_text

if TYPE_CHECKING:
    from bifolio.config import SpeculativeConfig

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
BlockSize = Annotated[int, commands.option("--block-size", help="Tokens in one block of the cache.")]
ChunkSize = Annotated[int, commands.option("--chunk-size", help="The most prompt tokens of one request per step.")]
AnyNumSeqs = Annotated[
    int | None,
    commands.option("--max-num-seqs", help="Sequences that run at the same time; default: 16, 256 on a GPU."),
]
AnyBlockSize = Annotated[
    int | None, commands.option("--block-size", help="Tokens in one block of the cache; default: 16, 64 on a GPU.")
]
AnyChunkSize = Annotated[
    int | None,
    commands.option(
        "--chunk-size", help="The most prompt tokens of one request per step; default: 512, 8192 on a GPU."
    ),
]
Deterministic = Annotated[
    bool,
    commands.option("--deterministic", help="On a GPU: output that depends on the request alone, bit for bit; slower."),
]
GpuMemoryUtilization = Annotated[
    float,
    commands.option(
        "--gpu-memory-utilization", help="Fraction of GPU memory left by weights and activations that the cache takes."
    ),
]
KvDtype = Annotated[str, commands.option("--kv-dtype", help="Format of the KV cache: auto, f32, f16, bf16 or q8_0.")]
Dtype = Annotated[
    str,
    commands.option("--dtype", help="Type of dense weights on a GPU: auto, bfloat16, float16 or float32."),
]
Activations = Annotated[
    str,
    commands.option(
        "--activations",
        help="Rounding of activations with quantised weights on the CPU: int8 (faster) or int16 (nearly exact).",
    ),
]
Threads = Annotated[int | None, commands.option("--threads", help="Threads of the CPU kernels; default: all cores.")]
Device = Annotated[str, commands.option("--device", help="Device: auto, cpu, cuda or cuda:N.")]
Verbose = Annotated[bool, commands.option("--verbose", "-v", help="Print the memory plan and notes of the loader.")]
Speculative = Annotated[
    str | None,
    commands.option("--speculative", help="Speculative decoding: 'draft' (a small draft model) or 'ngram'."),
]
DraftModel = Annotated[
    str | None,
    commands.option("--draft-model", help="Draft model; default: NAME-draft of the model NAME."),
]


def speculative_config(method: str | None, draft_model: str | None) -> SpeculativeConfig | None:
    """The configuration that the two options describe; None without them."""
    from bifolio.config import SpeculativeConfig
    from bifolio.errors import ConfigError

    if method is None and draft_model is None:
        return None
    if method not in (None, "draft", "ngram"):
        raise ConfigError(f"--speculative is 'draft' or 'ngram', not {method!r}")
    if method == "ngram" and draft_model is not None:
        raise ConfigError("--draft-model is for --speculative draft: leave one of them out")
    return SpeculativeConfig("ngram" if method == "ngram" else "draft", draft_model=draft_model)


def loading() -> AbstractContextManager[Callable[[int, int], None]]:
    """A bar with the time left while a model is prepared; nothing for one that is ready at once."""
    from bifolio.cli.progress import steps_bar

    return steps_bar("loading")
