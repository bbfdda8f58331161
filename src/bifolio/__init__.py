"""bifolio: prefill and decode over one paged KV cache.

Public names are imported on first use: `import bifolio` loads no model code, and torch is imported only when a class
that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "LLM": "bifolio.api.llm",
    "AsyncLLM": "bifolio.api.async_llm",
    "Branch": "bifolio.api.branch",
    "AsyncBranch": "bifolio.api.branch",
    "Score": "bifolio.api.outputs",
    "Grammar": "bifolio.sampling.grammar",
    "AsyncLLMEngine": "bifolio.api.async_llm",
    "EngineArgs": "bifolio.api.engine_args",
    "AsyncEngineArgs": "bifolio.api.engine_args",
    "SamplingParams": "bifolio.sampling_params",
    "RequestOutputKind": "bifolio.sampling_params",
    "StructuredOutputsParams": "bifolio.structured_outputs",
    "GuidedDecodingParams": "bifolio.structured_outputs",
    "TextPrompt": "bifolio.prompts",
    "TokensPrompt": "bifolio.prompts",
    "LoRARequest": "bifolio.api.lora",
    "Logprob": "bifolio.api.outputs",
    "BeamSearchParams": "bifolio.beam_params",
    "PoolingParams": "bifolio.pooling_params",
    "RequestOutput": "bifolio.api.outputs",
    "CompletionOutput": "bifolio.api.outputs",
    "LanguageModel": "bifolio.api.language_model",
    "write_delta": "bifolio.api.weight_delta",
    "ModelConfig": "bifolio.config",
    "SpeculativeConfig": "bifolio.config",
    "InferenceEngine": "bifolio.engine.engine",
    "ContinuousBatcher": "bifolio.schedule.batcher",
    "KVCacheBlockManager": "bifolio.cache.block_manager",
    "load_model": "bifolio.model.loader",
    "BifolioError": "bifolio.errors",
}
__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from bifolio.api.async_llm import AsyncLLM as AsyncLLM
    from bifolio.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from bifolio.api.branch import AsyncBranch as AsyncBranch
    from bifolio.api.branch import Branch as Branch
    from bifolio.api.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from bifolio.api.engine_args import EngineArgs as EngineArgs
    from bifolio.api.language_model import LanguageModel as LanguageModel
    from bifolio.api.llm import LLM as LLM
    from bifolio.api.lora import LoRARequest as LoRARequest
    from bifolio.api.outputs import CompletionOutput as CompletionOutput
    from bifolio.api.outputs import Logprob as Logprob
    from bifolio.api.outputs import RequestOutput as RequestOutput
    from bifolio.api.outputs import Score as Score
    from bifolio.api.weight_delta import write_delta as write_delta
    from bifolio.beam_params import BeamSearchParams as BeamSearchParams
    from bifolio.cache.block_manager import KVCacheBlockManager as KVCacheBlockManager
    from bifolio.config import ModelConfig as ModelConfig
    from bifolio.config import SpeculativeConfig as SpeculativeConfig
    from bifolio.engine.engine import InferenceEngine as InferenceEngine
    from bifolio.errors import BifolioError as BifolioError
    from bifolio.model.loader import load_model as load_model
    from bifolio.pooling_params import PoolingParams as PoolingParams
    from bifolio.prompts import TextPrompt as TextPrompt
    from bifolio.prompts import TokensPrompt as TokensPrompt
    from bifolio.sampling.grammar import Grammar as Grammar
    from bifolio.sampling_params import RequestOutputKind as RequestOutputKind
    from bifolio.sampling_params import SamplingParams as SamplingParams
    from bifolio.schedule.batcher import ContinuousBatcher as ContinuousBatcher
    from bifolio.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
    from bifolio.structured_outputs import StructuredOutputsParams as StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bifolio' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
