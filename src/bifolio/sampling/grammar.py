"""Structured output: a grammar says after every token which tokens may follow.

    Grammar.json_schema({...})   Grammar.regex("[a-z]+")   Grammar.choice(["yes", "no"])   Grammar.lark("start: ...")

Grammars come from strangers, so everything about them is bounded: the size and depth of their text, the work of
compiling and of each step, the states of the automaton, and the number and memory of compiled ones that are kept.
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from bifolio.errors import BifolioError, GrammarError, MissingDependencyError
from bifolio.model.loaded import TextModel
from bifolio.sampling.grammar_bounds import check_text
from bifolio.sampling.grammar_mask import MAX_MASK_SECONDS, GrammarMask
from bifolio.sampling.thinking import AfterThinking
from bifolio.sampling_params import SamplingParams
from bifolio.structured_outputs import StructuredOutputsParams
from bifolio.text.structural_tags import read_structural_tags

Kind = Literal["json_schema", "regex", "choice", "lark", "tools", "structural_tag"]
MAX_CACHED = 32  # compiled grammars that are kept
MAX_CACHED_BYTES = 256 << 20  # of them together
MAX_GRAMMAR_BYTES = 64 << 20  # of one
PROBED_TOKENS = 24
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 400_000,  # about 10 ms of work
    "step_lexer_fuel": 100_000,  # about 10 ms, for each token
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,  # one or two kilobytes each
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole text of an output."""

    kind: Kind
    text: str  # JSON of a schema, of choices, of tags or of `text.tools.format`; a regular expression; a Lark grammar

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise GrammarError(f"a grammar is one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise GrammarError(f"the text of a grammar is a string, not {type(self.text).__name__}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that follows a schema; text is taken as JSON."""
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is not JSON: {error}") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in Lark's notation; `start` is its root."""
        return cls("lark", text)

    @classmethod
    def structural_tag(cls, tags: Mapping[str, Any] | str) -> Grammar:
        """Free text in which triggers begin parts with schemas (`text.structural_tags`); text is taken as JSON."""
        try:
            return cls("structural_tag", tags if isinstance(tags, str) else json.dumps(tags))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError(f"the structural tag is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar for one tokenizer, ready to be followed any number of times."""

    grammar: Grammar
    num_bytes: int  # memory that compiling took
    num_words: int  # of a mask: 32 tokens each
    _pristine: Any = field(repr=False, compare=False)  # an llguidance.LLMatcher that no token was fed to

    def follow(self, output_token_ids: list[int]) -> GrammarMask:
        """A mask for a sequence whose output is this very list, which the engine appends to."""
        return GrammarMask(self._pristine.deep_copy(), output_token_ids, self.num_words)


# -- compiling ----------------------------------------------------------------------------------------------------


class _Compiler:
    """Compiles for one model; keeps the latest."""

    def __init__(self, model: TextModel) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        with _refusing("llguidance of this version cannot be used: install a newer one"):
            self._limits = _llguidance().LLParserLimits(**LIMITS)
        self._tokenizer = self._make_tokenizer(model)
        self._token_ids = _added_tokens(model)

    def _make_tokenizer(self, model: TextModel) -> Any:
        tokenizer, ends = model.require_tokenizer(), list(model.config.eos_token_ids)
        if not ends:
            raise GrammarError(
                "this model has no end-of-text token, so a text with a grammar could not end: leave the grammar out"
            )
        with _refusing("structured output is not available with this model, whose tokenizer llguidance cannot read"):
            return _llguidance().LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=max(model.config.vocab_size, tokenizer.vocab_size), eos_token=ends
            )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                return found
        before = _resident_bytes()
        with _refusing(f"the {_NAMES[grammar.kind]} cannot be used"):
            matcher = _llguidance().LLMatcher(
                self._tokenizer, _source(grammar, self._token_ids), log_level=0, limits=self._limits
            )
            _check_matcher(matcher)
            probe = matcher.deep_copy()
            probe.compute_bitmask()  # the first step is the most expensive: an error in it refuses the grammar
            _check_matcher(probe)
        num_bytes = max(_resident_bytes() - before, len(grammar.text))
        compiled = CompiledGrammar(grammar, num_bytes, -(-self._tokenizer.vocab_size // 32), matcher)
        with self._lock:
            self._cache[grammar] = compiled
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED or sum(c.num_bytes for c in self._cache.values()) > MAX_CACHED_BYTES
            ):
                self._cache.popitem(last=False)
        return compiled


_compilers_lock = threading.Lock()
_COMPILER = "_grammar_compiler"
_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "choice", "lark": "grammar",
          "tools": "grammar of the tools", "structural_tag": "structural_tag"}  # fmt: skip


def prepare_compiler(model: TextModel) -> _Compiler:
    """Read the vocabulary: seconds for a large one, so a server does it before it is ready.

    A tokenizer that llguidance cannot read is a `GrammarError`, found once and raised for every grammar.
    """
    with _compilers_lock:
        known = vars(model)  # lives as long as the model, like its tokenizer
        if _COMPILER not in known:
            try:
                known[_COMPILER] = _Compiler(model)
            except GrammarError as error:
                known[_COMPILER] = str(error)
        compiler: _Compiler | str = known[_COMPILER]
        if isinstance(compiler, str):
            raise GrammarError(compiler)
        return compiler


def compile_grammar(grammar: object, model: TextModel) -> CompiledGrammar | AfterThinking:
    """Compile within bounds; raises `GrammarError`. May be called from any thread; other threads go on meanwhile."""
    if isinstance(grammar, CompiledGrammar | AfterThinking):
        return grammar
    if isinstance(grammar, Mapping | bool):
        grammar = Grammar.json_schema(grammar)
    if not isinstance(grammar, Grammar):
        raise GrammarError(
            "grammar must be made by Grammar.json_schema, regex, choice, lark or structural_tag, "
            f"not {type(grammar).__name__}"
        )
    check_bounds(grammar)
    return prepare_compiler(model).compile(grammar)


def read_schema(path: Path) -> Grammar:
    """A JSON schema from a file."""
    try:
        grammar = Grammar.json_schema(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise GrammarError(f"the schema {path} cannot be read: {error}") from error
    check_bounds(grammar)
    return grammar


def structured_grammar(outputs: StructuredOutputsParams) -> Grammar:
    """The grammar behind vLLM's parameters of structured output."""
    if outputs.json is not None:
        return Grammar.json_schema(outputs.json)
    if outputs.regex is not None:
        return Grammar.regex(outputs.regex)
    if outputs.choice is not None:
        return Grammar.choice(outputs.choice)
    if outputs.grammar is not None:
        return Grammar.lark(outputs.grammar)
    if outputs.structural_tag is not None:
        return Grammar.structural_tag(outputs.structural_tag)
    return Grammar.json_object()


def with_grammar(params: SamplingParams, model: TextModel) -> SamplingParams:
    """The same parameters with a compiled grammar. The end-of-text token ends the text, whatever was asked for."""
    if params.grammar is None:
        return params
    return replace(params, grammar=compile_grammar(params.grammar, model), ignore_eos=False)


def check_bounds(grammar: Grammar) -> None:
    """Refuse by size and shape a grammar that would take long only to be read."""
    check_text(grammar.kind, _NAMES[grammar.kind], grammar.text)


def probe_grammar(grammar: Grammar, model: TextModel) -> None:
    """Compile a grammar and follow it for some tokens; refuse it if a mask or the whole costs too much.

    Meant for a process with limits of its own: the compiler cannot be stopped.
    """
    check_bounds(grammar)
    before = _resident_bytes()
    mask = prepare_compiler(model).compile(grammar).follow(output := [])
    rng = np.random.default_rng(0)
    for _ in range(PROBED_TOKENS):
        began = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(mask.allowed([]), bitorder="little"))
        if time.thread_time() - began > MAX_MASK_SECONDS / 4:
            raise GrammarError(f"the {_NAMES[grammar.kind]} takes too long for each token: make it simpler")
        open_ended = allowed[(allowed < model.config.vocab_size) & ~np.isin(allowed, model.config.eos_token_ids)]
        if not len(open_ended):
            break
        output.append(int(rng.choice(open_ended)))
    if _resident_bytes() - before > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the {_NAMES[grammar.kind]} takes more than {MAX_GRAMMAR_BYTES >> 20} MiB: make it simpler")


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


def _added_tokens(model: TextModel) -> dict[str, int]:
    """The tokens that stand for their own spelling, by it."""
    tokenizer = model.require_tokenizer()
    return {str(tokenizer.backend.id_to_token(token)): token for token in tokenizer.added_ids}


def _source(grammar: Grammar, token_ids: Mapping[str, int]) -> str:
    """In llguidance's own terms."""
    matcher = _llguidance().LLMatcher
    if grammar.kind == "json_schema":
        # No whitespace between the parts: a model that has lost its way could go on with it for ever.
        return str(matcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_flexible": False}))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(_without_anchors(grammar.text)))
    if grammar.kind == "choice":
        return "start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in json.loads(grammar.text))
    if grammar.kind in ("tools", "structural_tag"):
        text = grammar.text
        if grammar.kind == "structural_tag":
            text = read_structural_tags(json.loads(text)).source(token_ids)
        parts = json.loads(text)
        schemas = [f"schema_{number}: %json {json.dumps(schema)}" for number, schema in enumerate(parts["schemas"])]
        return str(matcher.grammar_from_lark("\n".join([parts["rules"], *schemas])))
    return str(matcher.grammar_from_lark(grammar.text))


def _check_matcher(matcher: Any) -> None:
    if matcher.is_error():
        raise ValueError(matcher.get_error())


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Turn any failure of llguidance into a `GrammarError`. A panic of its Rust code is a BaseException."""
    try:
        yield
    except BifolioError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise GrammarError(f"{problem}: {_first_line(str(error))}") from error


def _without_anchors(pattern: str) -> str:
    """The whole text is matched anyway."""
    body = pattern.removesuffix("$")
    is_escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return (pattern if is_escaped else body).removeprefix("^")


def _first_line(text: str) -> str:
    if text.startswith("NoExtension"):
        return "no text can ever match it"
    return text.replace("<non-verbose/>", "").strip().partition("\n")[0][:300]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("grammars need llguidance: pip install 'bifolio[serve]'") from error
    return llguidance
