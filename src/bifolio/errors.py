"""Every error that bifolio raises on purpose.

    BifolioError
    ├── ConfigError            a setting that cannot work (says which would)
    ├── ModelFileError         a model file is missing, truncated or inconsistent
    │   └── UnsupportedModelError   the file is valid, but bifolio does not support this kind of model
    ├── RequestError           a request that cannot be served
    │   ├── EmptyPromptError
    │   ├── PromptTooLongError
    │   ├── TokenIdError       a token id outside the vocabulary
    │   ├── ChatTemplateError  the template is missing, broken or too expensive
    │   └── GrammarError       a schema, regular expression or grammar that is wrong or too expensive
    ├── CacheError             a misuse of the KV cache
    │   ├── OutOfBlocksError   the pool has too few free blocks; nothing was changed
    │   └── UnknownSequenceError
    ├── PhaseError             decode before the prompt is complete, and other wrong transitions
    ├── ModelOutputError       the network gave no finite numbers
    ├── KernelArgumentError    an array or a number that does not fit the kernel
    ├── KernelCompileError     a kernel cannot be compiled or launched on this machine
    ├── DeviceMemoryError      memory of a device cannot be reserved, mapped or copied to the host
    ├── EngineDeadError        the engine stopped; its running requests are lost
    │   └── RankLostError      a process of a tensor-parallel engine ended
    ├── RankError              a process of a tensor-parallel engine failed in a pass; the others continue
    ├── SnapshotError          a saved text that is damaged, or of another model, key or arithmetic
    ├── TransferError          blocks of the cache could not be taken over from another engine
    ├── EngineFaultError       an engine client cannot serve a request; its `kind` says why
    └── MissingDependencyError a required optional package is not installed

A message names the problem and its remedy, in one or two sentences.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar


class FaultKind(StrEnum):
    """The reason why an engine ended or refused a request; the same in every process and on every host."""

    INVALID_REQUEST = "invalid_request"  # the client's fault, as are the next six
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOKEN_ID = "token_id"
    GRAMMAR = "grammar"
    UNKNOWN_BRANCH = "unknown_branch"  # it was closed, or belongs to another client
    UNKNOWN_SNAPSHOT = "unknown_snapshot"  # it was removed, or belongs to another key
    SLOW_READER = "slow_reader"  # the client does not read its output
    QUEUE_FULL = "queue_full"  # too many requests wait; as all retryable faults, it passes
    KEY_LIMIT = "key_limit"  # too many requests of one API key
    UNAVAILABLE = "unavailable"  # no engine is ready
    LOST = "lost"  # the engine ended while the request ran
    STEP_FAILED = "step_failed"  # the computation of the request failed
    NO_FINITE_LOGIT = "no_finite_logit"  # the network gave no finite logit
    ENGINE_ERROR = "engine_error"  # any other failure of the engine

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self in (FaultKind.QUEUE_FULL, FaultKind.KEY_LIMIT, FaultKind.UNAVAILABLE, FaultKind.LOST)

    @property
    def is_of_engine(self) -> bool:
        """Whether the computation failed; no client caused it."""
        return self in (FaultKind.STEP_FAILED, FaultKind.NO_FINITE_LOGIT, FaultKind.ENGINE_ERROR)


class BifolioError(Exception):
    """Base class of all errors that bifolio raises on purpose."""

    fault: ClassVar[FaultKind] = FaultKind.ENGINE_ERROR  # the kind of a request that ends with this error


class ConfigError(BifolioError, ValueError):
    """A setting that cannot work."""


class ModelFileError(BifolioError, ValueError):
    """A model file is missing, truncated or inconsistent."""


class UnsupportedModelError(ModelFileError):
    """The file is valid, but bifolio does not support this kind of model."""


class RequestError(BifolioError, ValueError):
    """A request that cannot be served; other requests are not affected."""

    fault = FaultKind.INVALID_REQUEST


class EmptyPromptError(RequestError):
    """A prompt without a single token."""

    fault = FaultKind.EMPTY_PROMPT


class PromptTooLongError(RequestError):
    """The prompt does not fit into the model's context or into the cache."""

    fault = FaultKind.PROMPT_TOO_LONG


class TokenIdError(RequestError):
    """A token id outside the vocabulary."""

    fault = FaultKind.TOKEN_ID


class ChatTemplateError(RequestError):
    """The chat template is missing, broken, or takes too much time or space."""


class GrammarError(RequestError):
    """A schema, regular expression or grammar that is wrong, or takes too much time or space."""

    fault = FaultKind.GRAMMAR


class SnapshotError(BifolioError, ValueError):
    """A saved text that cannot be written or used."""

    fault = FaultKind.INVALID_REQUEST


class CacheError(BifolioError, RuntimeError):
    """A misuse of the KV cache."""


class OutOfBlocksError(CacheError):
    """The pool has too few free blocks; nothing was changed."""


class UnknownSequenceError(CacheError, KeyError):
    """No block table exists for this sequence id."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would quote the message


class PhaseError(BifolioError, RuntimeError):
    """An operation that the phase of the sequence does not allow."""


NO_FINITE_LOGIT = "the model gave no finite logit for the next position: its weights may be damaged"

NO_FINITE_STATE = "the model gave hidden states that are not finite: its weights may be damaged"


class ModelOutputError(BifolioError, ArithmeticError):
    """The network gave no finite numbers: its weights are damaged, or its numbers overflow. No client caused it."""

    fault = FaultKind.NO_FINITE_LOGIT


class KernelArgumentError(BifolioError, ValueError):
    """A compiled kernel was handed an array or a number that does not fit; no memory was read or written.

    The message names the argument, the size it has and the size it must have.
    """


class KernelCompileError(BifolioError):
    """A kernel that is compiled at run time could not be compiled, loaded or launched on this machine."""


class DeviceMemoryError(BifolioError, RuntimeError):
    """Memory of a device, or pinned memory of the host beside it, could not be reserved, mapped or copied."""


class EngineDeadError(BifolioError, RuntimeError):
    """The engine failed or was closed; its running requests are lost."""


class RankLostError(EngineDeadError):
    """A process of a tensor-parallel engine ended: its part of the weights and of the cache is lost."""


class RankError(BifolioError, RuntimeError):
    """A process of a tensor-parallel engine failed in a pass. The pass is discarded on all ranks."""


class TransferError(BifolioError, RuntimeError):
    """Blocks of the cache could not be taken over from another engine; they are computed instead."""


class EngineFaultError(BifolioError, RuntimeError):
    """An engine client cannot serve a request, or the engine ended it; `kind` says why."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class MissingDependencyError(BifolioError, ImportError):
    """A required optional package is not installed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ": did you mean 'temperature'?" for a name close to a known one, else ""."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""
