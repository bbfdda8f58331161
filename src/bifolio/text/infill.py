"""Fill-in-the-middle: prompts of a text with a gap, for models whose vocabulary marks its parts.

    [PREFIX] text before the gap [SUFFIX] text after it [MIDDLE] -> the model writes the gap

The marks are those that the model's files declare, else those that its vocabulary spells (`SPELLINGS`). Some models
want the suffix first. Context of other files comes before, each after the mark of a file where the vocabulary has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bifolio.text.roles import Placeholders
from bifolio.text.tokenizer import Tokenizer

DECLARED = {"prefix": "prefix_token", "suffix": "suffix_token", "middle": "middle_token"}  # in `special_tokens`
DECLARED_ENDS = ("fim_pad_token", "eot_token")
REPOSITORY, FILE = "fim_rep_token", "fim_sep_token"
PROJECT, FILE_NAME = "myproject", "filename"  # as llama.cpp names a repository and a file whose names are not known
SNIPPET = "\n\n--- snippet ---\n\n"  # between files of a vocabulary without a mark for them, as in llama.cpp
SPACE, NEUTRAL = "▁", "☺"  # SentencePiece's space, and a character that merges with no other


class Spelling(NamedTuple):
    """The marks of a family of models."""

    prefix: str
    suffix: str
    middle: str | None
    repository: tuple[str, ...] = ()  # before the name of a repository: the first that the vocabulary has
    file: tuple[str, ...] = ()  # before the name of a file
    ends: tuple[str, ...] = ()  # also end the middle
    is_suffix_first: bool = False


SPELLINGS = (  # the first is that of Qwen2.5-Coder, CodeGemma and Granite 4
    Spelling("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|repo_name|>", "<|fim_repo|>", "<|reponame|>"),
             ("<|file_sep|>", "<|filename|>"), ("<|fim_pad|>", "<|file_separator|>", "<|endoftext|>", "<|cursor|>")),
    Spelling("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<repo_name>", "<reponame>"),
             ("<file_sep>", "<filename>"), ("<fim_pad>", "<|endoftext|>")),  # StarCoder, Granite
    Spelling("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    Spelling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),  # DeepSeek
    Spelling("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # CodeLlama
    Spelling("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    Spelling("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),  # GLM
    Spelling("<|prefix|>", "<|suffix|>", "<|middle|>", ends=("<|endoftext|>",)),  # Falcon-H1
    Spelling("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),  # Seed-Coder
    Spelling("[PREFIX]", "[SUFFIX]", None, is_suffix_first=True),  # Codestral
)  # fmt: skip


class ContextFile(NamedTuple):
    """A file, or a part of one, that is shown before the gap."""

    name: str
    text: str


class InfillPrompt(NamedTuple):
    """The tokens of a prompt with a gap and its context."""

    token_ids: list[int]
    is_cut: bool  # the text around the gap or its context was longer than the room for it


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The marks of a vocabulary."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None
    ends: tuple[int, ...]  # end the middle
    names: frozenset[str]  # spellings of all of them
    is_suffix_first: bool

    def prompt(
        self, tokenizer: Tokenizer, prefix: str | Sequence[int], suffix: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt of one gap, with the tokens that the tokenizer puts before every text."""
        text = _Encoder(tokenizer, self.names)
        before = text.first(prefix) if isinstance(prefix, str) else list(prefix)
        return [*(text.opening if add_special_tokens else ()), *self._marked(before, text.inner(suffix))]

    def prompt_with_context(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, files: Iterable[ContextFile], room: int
    ) -> InfillPrompt:
        """The prompt of one gap after other files of the repository, in at most `room` tokens.

        Where it is longer, the beginning of the context is left out, then the parts of prefix and suffix that are
        farthest from the gap: the prefix keeps three quarters of the room.
        """
        text = _Encoder(tokenizer, self.names)
        context, before, after = self._context(text, files), text.first(prefix), text.inner(suffix)
        room = max(room - len(text.opening) - len(self._marked([], [])), 0)
        num_before = min(len(before), max(room - room // 4, room - len(after)))
        num_after = min(len(after), room - num_before)
        num_context = min(len(context), room - num_before - num_after)
        is_cut = num_before + num_after + num_context < len(before) + len(after) + len(context)
        around = self._marked(before[len(before) - num_before :], after[:num_after])
        return InfillPrompt([*text.opening, *context[len(context) - num_context :], *around], is_cut)

    def _marked(self, before: list[int], after: list[int]) -> list[int]:
        parts = ([self.suffix, *after], [self.prefix, *before])
        first, second = parts if self.is_suffix_first else parts[::-1]
        return [*first, *second, *([] if self.middle is None else [self.middle])]

    def _context(self, text: _Encoder, files: Iterable[ContextFile]) -> list[int]:
        """The repository and its files; a vocabulary with marks for them has them even if no other file is shown."""
        found = [] if self.repository is None else [self.repository, *text.inner(f"{PROJECT}\n")]
        for file in files:
            found += self._file_head(text, file.name) if self.file is not None else text.inner(SNIPPET)
            found += text.inner(file.text)
        return found if self.file is None else [*found, *self._file_head(text, FILE_NAME)]

    def _file_head(self, text: _Encoder, name: str) -> list[int]:
        return [] if self.file is None else [self.file, *text.inner(f"{name}\n")]


class _Encoder:
    """Encodes the texts of a prompt. Spellings of special tokens in them are plain text."""

    def __init__(self, tokenizer: Tokenizer, names: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._names = tokenizer.special_tokens | names
        plain, framed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
        starts = (at for at in range(len(framed)) if framed[at : at + len(plain)] == plain)
        self.opening = framed[: next(starts, 0)]  # begin-of-text tokens
        self._adds_space = tokenizer.token(plain[0]).startswith(SPACE)

    def first(self, text: str) -> list[int]:
        """Tokens of a text at the start of a prompt."""
        placeholders = Placeholders(self._names)
        return self._tokenizer.encode_parts(placeholders.parts(placeholders.protect(text)))

    def inner(self, text: str) -> list[int]:
        """Tokens of a text after others: a tokenizer that puts a space before a text leaves it out."""
        if not self._adds_space:
            return self.first(text)
        mark, tokens = self.first(NEUTRAL), self.first(NEUTRAL + text)
        return tokens[len(mark) :] if tokens[: len(mark)] == mark else self.first(text)


def infill_tokens(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> InfillTokens | None:
    """The marks of a vocabulary: those that the files declare, else the first that it spells; None without any."""
    declared = {part: special_tokens[name] for part, name in DECLARED.items() if name in special_tokens}
    if "prefix" in declared and "suffix" in declared:
        known = next((each for each in SPELLINGS if each.prefix == declared["prefix"]), None)
        spelling = known or Spelling(declared["prefix"], declared["suffix"], declared.get("middle"))
    else:
        spelling = next((each for each in SPELLINGS if _has(tokenizer, each)), SPELLINGS[0])
    ends = (*(special_tokens[name] for name in DECLARED_ENDS if name in special_tokens), *spelling.ends)
    repository = (special_tokens.get(REPOSITORY, ""), *spelling.repository)
    file = (special_tokens.get(FILE, ""), *spelling.file)
    marks = (spelling.prefix, spelling.suffix, spelling.middle or "")
    ids = {name: tokenizer.token_id(name) for name in (*marks, *repository, *file, *ends) if name}
    found = {name: number for name, number in ids.items() if number is not None}
    if any(mark and mark not in found for mark in marks):
        return None
    return InfillTokens(
        found[spelling.prefix],
        found[spelling.suffix],
        found[spelling.middle] if spelling.middle else None,
        next((found[name] for name in repository if name in found), None),
        next((found[name] for name in file if name in found), None),
        tuple(dict.fromkeys(found.values())),
        frozenset(found),
        spelling.is_suffix_first,
    )


def _has(tokenizer: Tokenizer, spelling: Spelling) -> bool:
    marks = (spelling.prefix, spelling.suffix, spelling.middle)
    return all(tokenizer.token_id(mark) is not None for mark in marks if mark is not None)
