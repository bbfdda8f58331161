"""The tokens that end a text, by the metadata of a GGUF file."""

from __future__ import annotations

import numpy as np

from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import StringArray

# Tokens that end a turn or a text; many files declare only one of them as end of text.
MESSAGE_END = "<|end|>"
END_TOKENS = frozenset(
    (MESSAGE_END, "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
     "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<|calls|>",
     "<|flush|>", "<end_of_utterance>", "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
     "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|fim_repo|>", "<reponame>", "<|file_sep|>")
)  # fmt: skip
# With both of one pair an answer has several messages: the end of a message does not end it.
SEVERAL_MESSAGES = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|calls|>", "<|flush|>")))
END_NAMES = ("eos", "eot", "eom")  # end of text, of turn, of message: a file may declare one of each
_CONTROL = 3  # token type


def end_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """End-of-text ids: those declared by the file, and control tokens with a known end-of-text name."""
    named = [metadata.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in END_NAMES]
    tokens, types = metadata.strings("tokenizer.ggml.tokens"), metadata.array("tokenizer.ggml.token_type")
    found = [token_id for token_id in named if token_id is not None]
    if isinstance(tokens, StringArray) and types is not None and len(types) == len(tokens):
        known = {text.encode(): text for text in END_TOKENS}
        controls = np.flatnonzero(types[:vocab_size] == _CONTROL).tolist()
        ends = {known[raw]: index for index in controls if (raw := tokens.raw(index)) in known}
        if any(pair <= ends.keys() for pair in SEVERAL_MESSAGES):
            ends.pop(MESSAGE_END, None)
        found += ends.values()
    return tuple(dict.fromkeys(found))
