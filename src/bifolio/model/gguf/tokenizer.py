"""The tokenizer of a GGUF file: native code that reads the vocabulary in the file, and an equal `tokenizers` object.

The native one takes a fortieth of the time to open and a twentieth of the memory. The `tokenizers` object is built on
first use, and for vocabularies that the native code does not take: repeated tokens, unigrams, a whole `tokenizer.json`.

Two families: byte-level BPE ("gpt2": the file lists merges, `tokenizer.ggml.pre` names the pre-tokenizer) and
SentencePiece ("llama": the adjacent pair that forms the token with the best score is merged first; "t5": unigram).
Encoders have WordPiece vocabularies as well ("bert", `word_pieces`), which the library alone reads.
Files of RWKV have tokens of bytes, of which the longest is taken (`model.world_tokens`). Files of Gemma 4 list the
merges of a SentencePiece vocabulary (`SPACED_BPE`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bifolio.errors import MissingDependencyError, ModelFileError, UnsupportedModelError
from bifolio.kernels.cpu import join_pairs, new_codec
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import FileTokenizer, TokenType, Vocabulary
from bifolio.model.gguf.pretokenizers import PRE_TOKENIZERS, SPACED_BPE
from bifolio.model.gguf.reader import GgufFile, StringArray
from bifolio.model.gguf.word_pieces import around_texts, is_encoder, pair_processor, with_pieces, word_pieces
from bifolio.model.world_tokens import WORLD, world_from_gguf
from bifolio.text.tokenizer import Tokenizer

SPACE = "▁"  # SentencePiece's symbol for a space
SPECIAL_NAMES = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
    "prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid", "fim_pad": "fim_pad", "fim_rep": "fim_rep",
    "fim_sep": "fim_sep",
}  # fmt: skip
OLD_NAMES = {"prefix": "prefix", "suffix": "suffix", "middle": "middle"}  # of files that do not use the names above
TOKENIZER_JSON = "tokenizer.huggingface.json"  # a complete tokenizer.json, if the other entries cannot describe it


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer of an open file."""
    return tokenizer_from_metadata(Metadata(file.metadata, file.path))


def has_tokenizer(metadata: Metadata) -> bool:
    return metadata.has(TOKENIZER_JSON) or bool(metadata.strings("tokenizer.ggml.tokens"))


def tokenizer_from_metadata(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that the metadata describes."""
    if metadata.text("tokenizer.ggml.model", "") == WORLD and not metadata.has(TOKENIZER_JSON):
        return _world_tokenizer(metadata)
    return _native_tokenizer(metadata) or Tokenizer(_backend(metadata))


def _world_tokenizer(metadata: Metadata) -> Tokenizer:
    strings = metadata.strings("tokenizer.ggml.tokens")
    if not strings:
        raise metadata.fail("the file has no tokens")
    tokens = strings.texts() if isinstance(strings, StringArray) else list(strings)
    return world_from_gguf(metadata, tokens, _types_and_scores(metadata, len(tokens))[0])


def _backend(metadata: Metadata) -> Any:
    """The `tokenizers` object."""
    try:
        return _build(metadata)
    except (ModelFileError, MemoryError):
        raise
    except Exception as error:  # the library raises plain Exception for every kind of bad vocabulary
        raise ModelFileError(f"{metadata.path}: the tokenizer cannot be built: {error}") from error


def _native_tokenizer(metadata: Metadata) -> Tokenizer | None:
    """The tokenizer with native code, or None if it does not take the vocabulary."""
    kind = metadata.text("tokenizer.ggml.model", "")
    strings, merges = metadata.strings("tokenizer.ggml.tokens"), metadata.strings("tokenizer.ggml.merges")
    if metadata.has(TOKENIZER_JSON) or not isinstance(strings, StringArray) or not strings:
        return None
    pre = PRE_TOKENIZERS.get(metadata.text("tokenizer.ggml.pre", "default"))
    if kind not in ("llama", "gpt2") or (kind == "gpt2" and (pre is None or not isinstance(merges, StringArray))):
        return None
    types, scores = _types_and_scores(metadata, len(strings))
    try:
        codec = new_codec(strings.data, strings.starts, types)
    except MissingDependencyError:
        return None
    if kind == "llama":
        codec.set_order(_best_first(types, scores), metadata.flag("tokenizer.ggml.add_space_prefix", True))
    elif isinstance(merges, StringArray) and pre is not None:
        codec.set_merges(merges.starts, pre.ignore_merges)
    if not codec.is_regular:
        return None
    before, after = _start_and_end(metadata, kind, len(strings))
    split = byte_level_pre_tokenizer(metadata.text("tokenizer.ggml.pre", "default")) if kind == "gpt2" else None
    return FileTokenizer(codec, strings, types, (before, after), split, partial(_backend, metadata))


def special_tokens(metadata: Metadata, vocab_size: int) -> dict[str, str]:
    """Special tokens by their names in chat templates: bos_token, eos_token, ..."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        return {}
    ids = {
        f"{name}_token": metadata.token_id(f"tokenizer.ggml.{key}_token_id", min(vocab_size, len(tokens)))
        for name, key in [*OLD_NAMES.items(), *SPECIAL_NAMES.items()]
        if name not in OLD_NAMES or metadata.has(f"tokenizer.ggml.{key}_token_id")
    }
    return {name: tokens.raw(i).decode(errors="replace") for name, i in ids.items() if i is not None}


def _build(metadata: Metadata) -> Any:
    import tokenizers

    if metadata.has(TOKENIZER_JSON):
        return tokenizers.Tokenizer.from_str(metadata.text(TOKENIZER_JSON))
    builders = {
        "gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram, "bert": word_pieces, SPACED_BPE: _spaced_bpe
    }  # fmt: skip
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in builders:
        raise UnsupportedModelError(
            f"the tokenizer {kind!r} is not supported; supported: {', '.join((*builders, WORLD))}"
        )
    vocabulary = read_vocabulary(metadata)
    vocabulary = with_pieces(vocabulary) if kind == "bert" else vocabulary
    tokenizer = builders[kind](metadata, vocabulary)
    _add_special(tokenizer, vocabulary)
    _add_start_and_end(tokenizer, metadata, vocabulary, kind)
    return tokenizer


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read tokens, types and scores; empty and duplicate tokens are renamed, so that ids stay distinct."""
    strings = metadata.strings("tokenizer.ggml.tokens")
    if not strings:
        raise metadata.fail("the file has no tokens")
    tokens = _distinct(strings.texts() if isinstance(strings, StringArray) else list(strings))
    return Vocabulary(tokens, *_types_and_scores(metadata, len(tokens)))


def _types_and_scores(metadata: Metadata, count: int) -> tuple[np.ndarray, np.ndarray]:
    return (
        _per_token(metadata, "tokenizer.ggml.token_type", count, TokenType.NORMAL, np.int32),
        _per_token(metadata, "tokenizer.ggml.scores", count, 0, np.float32),
    )


def _distinct(spellings: list[str]) -> list[str]:
    if len(different := set(spellings)) == len(spellings) and "" not in different:
        return spellings
    tokens: list[str] = []
    seen = set()
    for index, token in enumerate(spellings):
        if not token or token in seen:
            token = f"[EMPTY_{index}]" if not token else f"[REPEATED_{index}]"
        seen.add(token)
        tokens.append(token)
    return tokens


def _per_token(metadata: Metadata, key: str, count: int, default: float, dtype: Any) -> np.ndarray:
    values = metadata.array(key)
    if values is None:
        return np.full(count, default, dtype)
    if len(values) < count:
        raise metadata.fail(f"{key!r} has {len(values)} entries for {count} tokens")
    return values[:count].astype(dtype)


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models

    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    ids = vocabulary.ids()
    pairs = _listed_merges(metadata, ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=PRE_TOKENIZERS[name].ignore_merges))
    tokenizer.pre_tokenizer = byte_level_pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_pre_tokenizer(name: str) -> Any:
    """Split by the patterns of the pre-tokenizer, then map bytes to printable characters."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _listed_merges(metadata: Metadata, ids: dict[str, int]) -> list[tuple[str, str]]:
    merges = metadata.strings("tokenizer.ggml.merges") or ()
    return _known_merges(merges.texts() if isinstance(merges, StringArray) else merges, ids)


def _known_merges(merges: Iterable[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Read "left right" pairs, skipping those whose parts or result are not tokens."""
    pairs = []
    for merge in merges:
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space > 0 and left in ids and right in ids and left + right in ids:
            pairs.append((left, right))
    return pairs


def sentencepiece_tokenizer(vocabulary: Vocabulary, bos: int) -> Tokenizer:
    """Build a tokenizer from tokens and scores alone, with begin-of-text before every prompt."""
    from tokenizers import processors

    backend = _merging_by_score(vocabulary, add_space=True)
    _add_special(backend, vocabulary)
    start = vocabulary.tokens[bos]
    backend.post_processor = template_processor(processors, [start, "$A"], [(start, bos)])
    return Tokenizer(backend)


def _sentencepiece(metadata: Metadata, vocabulary: Vocabulary) -> Any:
    return _merging_by_score(vocabulary, metadata.flag("tokenizer.ggml.add_space_prefix", True))


def _spaced_bpe(metadata: Metadata, vocabulary: Vocabulary) -> Any:
    add_space = metadata.flag("tokenizer.ggml.add_space_prefix", False)
    return _merging_spaced(vocabulary, _listed_merges(metadata, vocabulary.ids()), add_space)


def _merging_by_score(vocabulary: Vocabulary, add_space: bool) -> Any:
    return _merging_spaced(vocabulary, merges_from_scores(vocabulary), add_space)


def _merging_spaced(vocabulary: Vocabulary, merges: list[tuple[str, str]], add_space: bool) -> Any:
    """BPE over texts whose spaces are replaced; characters without a token are spelled in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.of_type(TokenType.UNKNOWN)
    model = models.BPE(
        vocab=vocabulary.ids(),
        merges=merges,
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
    )
    tokenizer = Tokenizer(model)
    prepend = [normalizers.Prepend(SPACE)] if add_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    replace = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens that merges into a third, sorted by the score of the result.

    SentencePiece merges the adjacent pair that forms the token with the best score, the leftmost of equal ones. A merge
    list is equivalent, except that it must order different splits of the same token: the split with the longest left
    part comes first, which is the leftmost one in tokens that repeat a character.
    """
    order = _best_first(vocabulary.types, vocabulary.scores)
    try:
        return join_pairs(vocabulary.tokens, order)
    except MissingDependencyError:
        return joined_pairs(vocabulary.tokens, order)


def _best_first(types: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """i32[n]: the tokens that pairs merge into, by descending score."""
    ids = np.flatnonzero(np.isin(types, (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)))
    return ids[np.argsort(-scores[ids], kind="stable")].astype(np.int32)


def joined_pairs(tokens: list[str], order: np.ndarray) -> list[tuple[str, str]]:
    """For each token that `order` numbers, every way to cut it into two others, the longest left part first."""
    known = {tokens[index] for index in order}
    pairs = []
    for index in order:
        token = tokens[index]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                pairs.append((left, right))
    return pairs


def _unigram(metadata: Metadata, vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    unknown = metadata.token_id("tokenizer.ggml.unknown_token_id", len(vocabulary.tokens))
    pairs = list(zip(vocabulary.tokens, vocabulary.scores.tolist(), strict=True))
    tokenizer = Tokenizer(models.Unigram(pairs, unknown, bool(vocabulary.of_type(TokenType.BYTE))))
    steps: list[Any] = []
    charsmap = metadata.array("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return tokenizer


def _add_special(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Register control and user-defined tokens, which are matched in the text before normalisation and splitting."""
    from tokenizers import AddedToken

    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = vocabulary.of_type(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])


def _add_start_and_end(tokenizer: Any, metadata: Metadata, vocabulary: Vocabulary, kind: str) -> None:
    """Add begin- and end-of-text tokens around every prompt, if the file asks for them."""
    from tokenizers import processors

    before, after = _start_and_end(metadata, kind, len(vocabulary.tokens))
    if is_encoder(metadata):
        tokenizer.post_processor = pair_processor(vocabulary, before, after)
    elif before or after:
        used = [(vocabulary.tokens[token], token) for token in (*before, *after)]
        parts = [*(vocabulary.tokens[token] for token in before), "$A", *(vocabulary.tokens[token] for token in after)]
        tokenizer.post_processor = template_processor(processors, parts, used)


def _start_and_end(metadata: Metadata, kind: str, count: int) -> tuple[list[int], list[int]]:
    """The tokens that the file wants before and after every text."""
    if is_encoder(metadata):
        return around_texts(metadata, count)
    pre = PRE_TOKENIZERS.get(metadata.text("tokenizer.ggml.pre", "default"))
    defaults = {
        "bos": kind in ("llama", SPACED_BPE) or (kind == "gpt2" and pre is not None and pre.add_bos),
        "eos": kind == "t5",
    }

    def added(name: str) -> list[int]:
        token_id = metadata.token_id(f"tokenizer.ggml.{name}_token_id", count)
        wanted = token_id is not None and metadata.flag(f"tokenizer.ggml.add_{name}_token", defaults[name])
        return [token_id] if wanted and token_id is not None else []

    return added("bos"), added("eos")


def template_processor(processors: Any, parts: Sequence[str], used: Sequence[tuple[str, int]]) -> Any:
    """Special tokens around a text, or around each text of a pair."""
    pair = [*parts, *(part.replace("$A", "$B") + ":1" for part in parts)]
    return processors.TemplateProcessing(single=list(parts), pair=pair, special_tokens=list(dict.fromkeys(used)))
