"""The tokenizer that `LLM.get_tokenizer` returns, with the methods that callers of transformers know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.model.loaded import TextModel
from bifolio.text.chat_template import Message, render_chat


class ChatTokenizer:
    """Text to token ids and back, and conversations to text."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._tokenizer = model.require_tokenizer()
        self.chat_template = model.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`{"input_ids": ...}` of one text or several."""
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(each, add_special_tokens) for each in text]}

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """The text of a conversation, or its token ids."""
        text = render_chat(
            chat_template or self.chat_template,
            conversation,
            special_tokens=self._model.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def convert_ids_to_tokens(self, token_ids: int | Sequence[int]) -> Any:
        if isinstance(token_ids, int):
            return self._tokenizer.token(token_ids)
        return [self._tokenizer.token(token_id) for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        found: dict[str, int] = self._tokenizer.backend.get_vocab()
        return found

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self._model.config.eos_token_ids), None)

    @property
    def bos_token_id(self) -> int | None:
        return self._model.config.bos_token_id

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self._tokenizer.token(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self._tokenizer.token(self.bos_token_id)
