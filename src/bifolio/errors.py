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
    ├── ModelOutputError       the network gave no finite logit
    ├── KernelArgumentError    an array or a number that does not fit the kernel
    ├── EngineDeadError        the engine stopped; its running requests are lost
    │   └── RankLostError      a process of a tensor-parallel engine ended
    ├── RankError              a process of a tensor-parallel engine failed in a pass; the others continue
    ├── TransferError          blocks of the cache could not be taken over from another engine
    └── MissingDependencyError a required optional package is not installed

A message names the problem and its remedy, in one or two sentences.
"""

from __future__ import annotations

from collections.abc import Iterable


class BifolioError(Exception):
    """Base class of all errors that bifolio raises on purpose."""


class ConfigError(BifolioError, ValueError):
    """A setting that cannot work."""


class ModelFileError(BifolioError, ValueError):
    """A model file is missing, truncated or inconsistent."""


class UnsupportedModelError(ModelFileError):
    """The file is valid, but bifolio does not support this kind of model."""


class RequestError(BifolioError, ValueError):
    """A request that cannot be served; other requests are not affected."""


class EmptyPromptError(RequestError):
    """A prompt without a single token."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the model's context or into the cache."""


class TokenIdError(RequestError):
    """A token id outside the vocabulary."""


class ChatTemplateError(RequestError):
    """The chat template is missing, broken, or takes too much time or space."""


class GrammarError(RequestError):
    """A schema, regular expression or grammar that is wrong, or takes too much time or space."""


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


class ModelOutputError(BifolioError, ArithmeticError):
    """The network gave no finite logit: its weights are damaged, or its numbers overflow. No client caused it."""


class KernelArgumentError(BifolioError, ValueError):
    """A compiled kernel was handed an array or a number that does not fit; no memory was read or written.

    The message names the argument, the size it has and the size it must have.
    """


class EngineDeadError(BifolioError, RuntimeError):
    """The engine failed or was closed; its running requests are lost."""


class RankLostError(EngineDeadError):
    """A process of a tensor-parallel engine ended: its part of the weights and of the cache is lost."""


class RankError(BifolioError, RuntimeError):
    """A process of a tensor-parallel engine failed in a pass. The pass is discarded on all ranks."""


class TransferError(BifolioError, RuntimeError):
    """Blocks of the cache could not be taken over from another engine; they are computed instead."""


class MissingDependencyError(BifolioError, ImportError):
    """A required optional package is not installed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ ": did you mean 'temperature'?" for a name close to a known one, else ""."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""
