"""Options of `LLM` under the names that vLLM gives them: taken, translated, or warned about by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from bifolio.config import KVDtype, SpeculativeConfig, checked_kv_dtype
from bifolio.engine.speculative.ngram import SIZES
from bifolio.errors import ConfigError, did_you_mean

WEIGHT_DTYPES = {
    "auto": None,
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
}
SHORT_NAMES = ("f32", "f16", "bf16", "q8_0")  # older spelling: they named the type of the cache as well
CACHE_DTYPES = {"float32": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16", "int8": "q8_0",
                "fp8_e4m3": "fp8"}  # fmt: skip
IGNORED = {
    "trust_remote_code": "bifolio never runs code of a model's repository",
    "enforce_eager": "decode steps on a GPU are always captured as CUDA graphs",
    "state_checkpoint_tokens": "checkpoints are spaced by the size of the states",
    "tokenizer": "the tokenizer comes with the model",
    "tokenizer_mode": "there is one kind of tokenizer",
    "tokenizer_revision": "revisions are chosen by `bifolio pull`",
    "revision": "revisions are chosen by `bifolio pull`",
    "download_dir": "models are fetched by `bifolio pull` into $BIFOLIO_CACHE",
    "load_format": "the format follows from the file",
    "swap_space": "a preempted sequence is computed again, or read from the tiers of kv_offload",
    "cpu_offload_gb": "weights stay on one device",
    "enable_chunked_prefill": "prompts are always computed in chunks of chunk_size",
    "disable_log_stats": "LLM writes no log",
    "disable_custom_all_reduce": "there is one device",
    "max_seq_len_to_capture": "every decode step is captured",
    "disable_async_output_proc": "output is always processed beside the next step",
    "distributed_executor_backend": "there is one process",
    "max_cpu_loras": "max_loras is the number of adapters in memory",
    "max_logprobs": "up to 1024 logprobs are always allowed",
    "generation_config": "the model's sampling defaults are always used where a call passes none",
    "compilation_config": "kernels are compiled ahead or on first use",
}
FILE_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4")  # quantization=
TAKEN = ("enable_lora",)  # adapters may always be loaded
ALWAYS_ON = ("enable_chunked_prefill",)  # False is warned about as well
_SAME = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "task": "generate",
         "runner": "generate", "skip_tokenizer_init": False}  # fmt: skip


_HEADS: dict[str, Literal["eagle", "mtp"]] = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp", "deepseek_mtp": "mtp"}


def weight_dtype(dtype: Any) -> str | None:
    """The type of dense weights on a GPU, from vLLM's names, torch's types or ours; None: the kernels decide."""
    name = str(dtype).removeprefix("torch.")
    if name == "q8_0":  # older spelling of kv_cache_dtype
        return None
    if name not in WEIGHT_DTYPES:
        names = "auto, bfloat16, float16, half, float32 or float"
        raise ConfigError(f"dtype is {names}, not {name!r}; the type of the cache is kv_cache_dtype")
    return WEIGHT_DTYPES[name]


def weight_quantization(name: Any) -> str | None:
    """The rounding of dense weights; None: they stay as they are. Formats of files are warned about."""
    if name in (None, "auto"):
        return None
    if name not in FILE_FORMATS:
        return str(name)
    warnings.warn(f"quantization={name!r} has no effect: the format follows from the file", UserWarning, stacklevel=3)
    return None


def cache_dtype(dtype: Any, kv_cache_dtype: str, usual: KVDtype, device: str) -> KVDtype:
    """The type of cached keys and values. `dtype` with one of our short names still sets it, with a warning."""
    name = CACHE_DTYPES.get(kv_cache_dtype, kv_cache_dtype)
    if name.startswith("fp8") and (name != "fp8" or device == "cpu"):
        own = "q8_0 is the type with 8 bits on a CPU" if device == "cpu" else "fp8 is E4M3"
        raise ConfigError(f"kv_cache_dtype (--kv-dtype) cannot be {kv_cache_dtype!r}: {own}")
    if name == "q8_0" and device != "cpu":
        raise ConfigError("kv_cache_dtype (--kv-dtype) cannot be 'q8_0' on a GPU: fp8 is the type with 8 bits")
    if name != "auto":
        return checked_kv_dtype(name)
    if dtype in SHORT_NAMES:
        message = f"dtype={dtype!r} sets the type of the cache until the next release: write kv_cache_dtype={dtype!r}"
        warnings.warn(message, DeprecationWarning, stacklevel=4)
        return checked_kv_dtype(dtype)
    return usual


def check_ported(options: Mapping[str, Any], own: Iterable[str] = ()) -> None:
    """Refuse or warn about options of vLLM that bifolio does not have; an unknown name is a TypeError.

    `own` are the names of the options that bifolio has, of which the nearest one is shown.
    """
    for name, value in options.items():
        if name in TAKEN:
            continue
        if name in _SAME:
            if value not in (_SAME[name], None, "auto"):
                raise ConfigError(f"{name}={value!r} is not supported: leave it out, or pass {_SAME[name]!r}")
        elif name not in IGNORED:
            raise TypeError(f"LLM() has no option {name!r}{did_you_mean(name, [*own, *_SAME, *IGNORED])}")
        elif value not in (None, False, "auto") or (name in ALWAYS_ON and value is False):
            warnings.warn(f"{name}={value!r} has no effect: {IGNORED[name]}", UserWarning, stacklevel=3)


def check_one_of(**values: Any) -> None:
    """Refuse two options that decide on the same thing."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} decide on the same thing: pass one of them")


def speculative_from(options: Mapping[str, Any]) -> SpeculativeConfig:
    """vLLM's `speculative_config`: {"method": "ngram", "num_speculative_tokens": 4} or {"model": "draft.gguf", ...}."""
    same = {"prompt_lookup_max": max(SIZES), "prompt_lookup_min": min(SIZES)}
    for name in set(options) - {"method", "model", "num_speculative_tokens"}:
        if name not in same:
            warnings.warn(f"speculative_config[{name!r}] has no effect", UserWarning, stacklevel=3)
        elif options[name] not in (same[name], None):
            reason = f"n-grams of {min(SIZES)} to {max(SIZES)} tokens are looked up"
            warnings.warn(f"speculative_config[{name!r}] has no effect: {reason}", UserWarning, stacklevel=3)
    method = str(options.get("method"))
    is_ngram = method == "ngram" or options.get("model") in ("ngram", "[ngram]")
    values = {
        "length": options.get("num_speculative_tokens"),
        "draft_model": None if is_ngram else options.get("model"),
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return SpeculativeConfig("ngram" if is_ngram else _HEADS.get(method, "draft"), **given)
