"""Every error that bifolio raises on purpose.

    BifolioError
    ├── ConfigError            a setting that cannot work (says which would)
    ├── ModelFileError         a file of a model is missing, truncated or inconsistent
    │   └── UnsupportedModelError   the file is fine; bifolio does not run this kind
    ├── RequestError           a request that cannot be served
    │   ├── EmptyPromptError
    │   ├── PromptTooLongError
    │   ├── TokenIdError       a token id outside the vocabulary
    │   ├── ChatTemplateError  the template is missing, broken or too expensive
    │   └── GrammarError       a schema, regular expression or grammar that is wrong or too expensive
    ├── CacheError             a misuse of the KV cache
    │   ├── OutOfBlocksError   the pool cannot supply the blocks asked for; nothing was changed
    │   └── UnknownSequenceError
    ├── PhaseError             decode before the prompt is complete, and other wrong transitions
    ├── ModelOutputError       the network gave no number that can be used
    ├── KernelArgumentError    a kernel was handed an array or a number that does not fit
    ├── EngineDeadError        the engine stopped; requests that ran in it are lost
    └── MissingDependencyError an optional package is needed for this and is not installed

A message says what is wrong and what to do about it, in one or two sentences.
"""

from __future__ import annotations


class BifolioError(Exception):
    """Base of all errors raised on purpose; catch it to catch them all."""


class ConfigError(BifolioError, ValueError):
    """A setting that cannot work."""


class ModelFileError(BifolioError, ValueError):
    """A file of a model is missing, truncated or inconsistent."""


class UnsupportedModelError(ModelFileError):
    """The file is fine, but bifolio does not run this kind of model."""


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
    """The pool cannot supply the blocks asked for; nothing was changed."""


class UnknownSequenceError(CacheError, KeyError):
    """No row is held under this sequence id."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message in quotes


class PhaseError(BifolioError, RuntimeError):
    """A sequence was asked for something that its phase does not allow."""


NO_FINITE_LOGIT = "the model gave no finite logit for the next position: its weights may be damaged"


class ModelOutputError(BifolioError, ArithmeticError):
    """The network gave no finite logit: its weights are damaged, or its numbers overflow. No client caused it."""


class KernelArgumentError(BifolioError, ValueError):
    """A compiled kernel was handed an array or a number that does not fit; no memory was read or written.

    The message names the argument, the size it has and the size it must have.
    """


class EngineDeadError(BifolioError, RuntimeError):
    """The engine stopped, by an error of its own or because it was closed; what ran in it is lost."""


class MissingDependencyError(BifolioError, ImportError):
    """An optional package is needed for this and is not installed."""
