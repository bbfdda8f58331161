"""Text files → arrays of token ids on the training device, from which random sequences are cut.

    |EOT| document |EOT| document |EOT| ... |EOT|      training and held-out tokens are two such arrays

The start of a sequence is a function of (seed, step), so a run can be resumed at any step and divided among any number
of processes with the same result.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bifolio.errors import ConfigError, ModelFileError
from bifolio.text.tokenizer import Tokenizer
from bifolio.text.utf8 import decoded

END_OF_TEXT = "<|endoftext|>"
MIN_DOCUMENTS_TO_SPLIT = 20  # with fewer, the end of the text is held out instead of whole documents
DOCUMENTS_PER_CALL = 2048  # tokenized at a time, to bound memory
TEXT_SUFFIXES = (".txt", ".txt.xz", ".md", ".xz", ".text")

Tokens = npt.NDArray[np.int32]


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The text files among files and folders, in a fixed order."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(TEXT_SUFFIXES))
        elif path.is_file():
            found.append(path)
        else:
            raise ModelFileError(f"{path} does not exist: pass text files, .xz files or folders of them")
    if not found:
        raise ConfigError(f"no text files in {', '.join(map(str, paths)) or 'the data'}: pass .txt or .txt.xz files")
    return found


def read_documents(paths: Sequence[str | Path]) -> list[str]:
    """Every document of the files; documents end at `<|endoftext|>` or at the end of a file."""
    documents: list[str] = []
    for path in find_files(paths):
        documents += [document for document in _read_text(path).split(END_OF_TEXT) if document.strip()]
    if not documents:
        raise ConfigError(f"the files {', '.join(map(str, paths))} hold no text")
    return documents


def _read_text(path: Path) -> str:
    try:
        data = lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()  # noqa: SIM115
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    return decoded(data, str(path)).replace("\r\n", "\n")


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """The corpus as tokens."""

    train: Tokens  # i32[n]
    held_out: Tokens  # i32[m]
    num_documents: int
    num_characters: int

    @property
    def digest(self) -> str:
        """Digest that identifies these tokens in a checkpoint."""
        hasher = hashlib.sha256(self.train.tobytes())
        hasher.update(self.held_out.tobytes())
        return hasher.hexdigest()[:16]


def tokenize(documents: Sequence[str], tokenizer: Tokenizer, eval_fraction: float, seed: int) -> TokenData:
    """Split into training and held-out text and tokenize both."""
    characters = sum(map(len, documents))
    if len(documents) < MIN_DOCUMENTS_TO_SPLIT:
        tokens = encode_documents(documents, tokenizer)
        cut = len(tokens) - max(int(len(tokens) * eval_fraction), 2)
        return TokenData(tokens[:cut], tokens[cut:], len(documents), characters)
    held_out = held_out_documents(documents, eval_fraction, seed)
    train = encode_documents((d for i, d in enumerate(documents) if i not in held_out), tokenizer)
    rest = encode_documents((documents[i] for i in sorted(held_out)), tokenizer)
    return TokenData(train, rest, len(documents), characters)


def held_out_documents(documents: Sequence[str], fraction: float, seed: int) -> set[int]:
    """Select random documents with the given fraction of all characters; each side keeps at least one document."""
    order = np.random.default_rng(seed).permutation(len(documents))
    sizes = np.cumsum([len(documents[i]) for i in order])
    count = int(np.searchsorted(sizes, fraction * sizes[-1])) + 1
    return {int(i) for i in order[: min(count, len(documents) - 1)]}


def encode_documents(documents: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """i32[n]: the documents, an end-of-text token before each and after the last, if the tokenizer has one."""
    end = tokenizer.token_id(END_OF_TEXT)
    separator = np.asarray([] if end is None else [end], np.int32)
    backend = tokenizer.backend
    encode = getattr(backend, "encode_batch_fast", backend.encode_batch)  # faster: computes no offsets
    pieces: list[Tokens] = []
    for batch in _batches(documents, DOCUMENTS_PER_CALL):
        for encoding in encode(batch, add_special_tokens=False):
            pieces += [separator, np.asarray(encoding.ids, np.int32)]
    return np.concatenate([*pieces, separator]).astype(np.int32)


def _batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class SequenceSource:
    """Random training sequences from tokens on the device."""

    def __init__(self, tokens: Tokens, length: int, seed: int, device: str) -> None:
        if len(tokens) <= length + 1:
            raise ConfigError(
                f"the training text has {len(tokens)} tokens and a sequence {length}: add text or shorten the context"
            )
        self.tokens = torch.from_numpy(tokens).to(device)
        self.length, self.seed = length, seed
        self._span = torch.arange(length + 1, device=device)

    def batch(self, step: int, num_sequences: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets i64[b, length] of the sequences `rows` of a step."""
        generator = np.random.default_rng((self.seed, step))
        starts = generator.integers(0, len(self.tokens) - self.length, size=num_sequences)[rows]
        places = torch.from_numpy(starts).to(self._span.device, non_blocking=True)[:, None] + self._span
        sequences = self.tokens[places].long()
        return sequences[:, :-1], sequences[:, 1:]


def evaluation_sequences(tokens: Tokens, length: int, max_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Evenly spaced, non-overlapping held-out sequences: inputs and targets i64[n, length], equal for every run."""
    length = min(length, len(tokens) - 1)
    count = (len(tokens) - 1) // length
    chosen = np.unique(np.linspace(0, count - 1, min(count, max_sequences)).astype(np.int64))
    rows = np.stack([tokens[i * length : i * length + length + 1] for i in chosen]).astype(np.int64)
    sequences = torch.from_numpy(rows)
    return sequences[:, :-1], sequences[:, 1:]
