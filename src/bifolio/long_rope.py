"""LongRoPE: a model with two sets of rotation frequencies, one for short and one for long sequences.

A sequence is rotated by one set from its first token on, so the set is chosen before its first pass, from the request
alone: its number of prompt tokens and the most tokens that it may generate. Keys of the two sets differ, so the choice
is part of the digest of cached blocks. In a batch the choice travels with the positions:

    position          |<-------- index of the token -------->|            rotated by the short set
    position          |<-- index of the token + LONG_ROPE -->|            rotated by the long set
"""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig

LONG_ROPE = 1 << 28  # added to positions that the second set rotates; larger than any position
RESERVED_PART = 4  # a request without max_tokens reserves this fraction (1/4) of the short context for its output


def short_context(config: ModelConfig) -> int | None:
    """The most tokens of a sequence that the short set rotates; None: the model has one set."""
    contexts = [rope.original_max_position for rope in config.ropes if rope.has_two_sets]
    return min(contexts) if contexts else None


def rope_of_length(config: ModelConfig, num_tokens: int) -> int | None:
    """0 or `LONG_ROPE`: the set for a sequence of at most `num_tokens`; None: the model has one set."""
    context = short_context(config)
    return None if context is None else LONG_ROPE * (num_tokens > context)


def rope_of_request(config: ModelConfig, num_prompt: int, max_tokens: int | None) -> int | None:
    """The set of a request, whatever the engine's `max_model_len` is."""
    return chosen_rope(short_context(config), num_prompt, max_tokens)


def chosen_rope(context: int | None, num_prompt: int, max_tokens: int | None) -> int | None:
    """The set of a request to a model with this short context.

    Without `max_tokens` it is the short set as long as a quarter of the short context is left for the output.
    """
    if context is None:
        return None
    num_output = context // RESERVED_PART if max_tokens is None else max_tokens
    return LONG_ROPE * (num_prompt + num_output > context)


def longest_output(config: ModelConfig, num_prompt: int, max_tokens: int | None) -> int | None:
    """The most tokens that a request generates by its set: one without `max_tokens` ends with the short context."""
    context = short_context(config)
    if max_tokens is not None or context is None or rope_of_request(config, num_prompt, None):
        return max_tokens
    return context - num_prompt


def set_of(frequencies: Any, positions: Any) -> Any:
    """The frequencies of each token, [t, half]; [half] of a model with one set."""
    return frequencies[positions // LONG_ROPE] if frequencies.ndim == 2 else frequencies


def salt_of_rope(rope: int | None, salt: bytes) -> bytes:
    """The salt of block digests; it differs for the two sets, and no salt of one is a salt of the other."""
    return salt if rope is None else bytes([rope == LONG_ROPE]) + salt


def rope_of_salt(salt: bytes) -> tuple[int, bytes]:
    """The reverse of `salt_of_rope`, for a model with two sets."""
    return LONG_ROPE * (salt[:1] == b"\1"), salt[1:]
