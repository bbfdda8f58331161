"""Pre-tokenizers of GGUF files (`tokenizer.ggml.pre`), which split text into words before BPE merges.

Each is a list of patterns applied in order: a pattern isolates its matches within every piece of the previous split.
"""

from __future__ import annotations

from typing import NamedTuple

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _modern(digits: str) -> str:
    """The pattern of GPT-4 and derived tokenizers, which differ in the grouping of digits."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Letters of scripts with upper and lower case, as listed by the first DeepSeek tokenizers.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_TEKKEN_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """Patterns and defaults of a pre-tokenizer."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is in the vocabulary is not split
    add_bos: bool = False  # unless the file says otherwise


_MARKED = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_KOREAN_WORDS = (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_modern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_modern(r"\p{N}"),))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3))
_GPT4O = _TEKKEN_WORD.replace("%s", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _TEKKEN_REST
_UPPER, _LOWER = (rf"(?:(?!\p{{Han}})[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}])" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = (  # as GPT-4o's, but Chinese characters are words of their own
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPACED_BPE = "gemma4"  # kind of tokenizer: listed merges over texts whose spaces are replaced, bytes as tokens

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "roberta-bpe": _PLAIN_GPT2,
    "modern-bert": _PLAIN_GPT2,
    "jina-v1-en": _PLAIN_GPT2,
    "jina-v2-code": _PLAIN_GPT2,
    "jina-v2-es": _PLAIN_GPT2,
    "jina-v2-de": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "trillion": _PLAIN_GPT2,
    "granite-docling": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "mellum": _PLAIN_GPT2,
    "a.x-4.0": _PLAIN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "dbrx": PreTokenizer(_LLAMA3.patterns),
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "glm4": PreTokenizer(_LLAMA3.patterns),
    "chatglm-bpe": PreTokenizer(_LLAMA3.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "megrez": _QWEN2,
    "hunyuan": _QWEN2,
    "grok-2": _QWEN2,
    "solar-open": _QWEN2,
    "kormo": _QWEN2,
    "qwen35": PreTokenizer((_CONTRACTIONS + _MARKED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _modern(r"\p{N}+")), ignore_merges=True),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _modern(r"\p{N}"))),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "bailingmoe2": PreTokenizer((_BAILING,)),
    "llada-moe": PreTokenizer((_BAILING,)),
    "exaone-moe": PreTokenizer((_CONTRACTIONS + _KOREAN_WORDS,)),
    "seed-coder": PreTokenizer((_modern(r"\p{N}").replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "command-r": _DIGIT_BY_DIGIT,
    "codeshell": _DIGIT_BY_DIGIT,
    "exaone": _DIGIT_BY_DIGIT,
    "minerva-7b": _DIGIT_BY_DIGIT,
    "mellum2": _DIGIT_BY_DIGIT,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(("[\r\n]", rf"\s?[{_CASED}]+", _PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+")),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "tekken": PreTokenizer(
        (_TEKKEN_WORD.replace("%s", "") + r"|\p{N}" + _TEKKEN_REST,), ignore_merges=True, add_bos=True
    ),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "kanana2": PreTokenizer((_GPT4O,)),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
