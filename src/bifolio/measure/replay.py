"""Run a receipt again, and find the first operation in which two engines differ.

`replay` compares tokens. `compare_operations` runs one pass over the same tokens on both engines, operation by
operation, and compares each result by its bytes: the first that differs has a layer and a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from bifolio.adapter_salt import digest_of_adapter
from bifolio.api.images import required_vision
from bifolio.api.llm import LLM
from bifolio.api.lora import LoRARequest
from bifolio.api.outputs import returned_sequences
from bifolio.api.receipts import Receipt, checked_receipt, params_of
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.errors import ConfigError, RequestError
from bifolio.images import PromptImage
from bifolio.kernels.operation_hook import hooked
from bifolio.long_rope import rope_of_length
from bifolio.model import transformer
from bifolio.model.vision.prompt import placed
from bifolio.sampling.grammar import compile_grammar
from bifolio.sampling.thinking import AfterThinking
from bifolio.sequence import Request

MAX_TRACED = 4096  # tokens of a pass whose operations are compared


class Mismatch(NamedTuple):
    """The first token of a replay that differs."""

    completion: int
    position: int  # among the output tokens
    expected: int | None  # None: the output has ended
    found: int | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay."""

    num_tokens: int
    mismatch: Mismatch | None
    token_ids: list[list[int]]  # of each completion, as they came out now
    logprobs_differ: bool = False  # all tokens are equal, their logprobs are not

    @property
    def is_equal(self) -> bool:
        return self.mismatch is None and not self.logprobs_differ


class Step(NamedTuple):
    """One operation of a traced pass."""

    layer: int  # -1: before the first layer
    operation: str
    number: int  # among the operations of this name in the layer
    checksum: str
    last_row: np.ndarray  # of the last token


class LayerDrift(NamedTuple):
    """Two engines after one layer."""

    layer: int
    operation: str  # the first one that differs in this layer; "": none does
    checksums: tuple[str, str]  # of this operation, or of the last one
    drift: float  # |a - b| / |a| over the last token's row of the layer's last common operation


def check_identity(llm: LLM, receipt: Receipt) -> None:
    """Raise ConfigError unless the engine has the model and the arithmetic of a receipt."""
    own, theirs = llm.identity["digest"], receipt["model"].get("digest")
    if own != theirs:
        raise ConfigError(
            f"the receipt is of another model: its digest is {theirs} and that of {llm.model.path.name} is {own}: pass "
            "the model of the receipt, or compare the two with --against"
        )
    facts, known = llm.numerics, receipt["numerics"]
    other = [name for name in sorted({*facts, *known}) if facts.get(name) != known.get(name)]
    if other:
        shown = "; ".join(f"{name}: {known.get(name)} then, {facts.get(name)} now" for name in other)
        raise ConfigError(
            f"the receipt was made by other arithmetic ({shown}): use the same, or compare the two with --against"
        )


def replay(
    llm: LLM,
    receipt: Receipt,
    *,
    is_foreign: bool = False,
    lora_request: LoRARequest | str | None = None,
    images: Sequence[Any] = (),
) -> Replay:
    """Run a receipt again; one of another model or other arithmetic is refused unless it `is_foreign`.

    The adapter and the images of the answer, which a receipt names by their digests, are passed again.
    """
    receipt = checked_receipt(receipt)
    if not is_foreign:
        check_identity(llm, receipt)
    facts = receipt["request"]
    adapter = same_adapter(llm, facts, lora_request)
    own = same_images(llm, facts, images)
    params: Any = params_of(facts, llm.model.config.vocab_size)
    if isinstance(getattr(params, "grammar", None), AfterThinking) and params.grammar.grammar is not None:
        inner = compile_grammar(params.grammar.grammar, llm.model)
        params = replace(params, grammar=replace(params.grammar, grammar=inner))
    [request] = llm.run_requests(
        [
            lambda engine, name: engine.add_request(
                name, facts["prompt_token_ids"], params, num_given=facts["num_given"], adapter=adapter, images=own
            )
        ]
    )
    if request.error is not None:
        raise RequestError(f"the receipt cannot be replayed: {request.error}")
    return _outcome(request, receipt["answer"])


def same_adapter(llm: LLM, facts: Mapping[str, Any], lora_request: LoRARequest | str | None) -> LoadedAdapter | None:
    """The adapter that the facts of a request name; an error if it is another one, or is missing."""
    [adapter] = llm.adapters_for(lora_request, 1)
    known, own = facts.get("adapter", ""), digest_of_adapter(adapter).hex()
    if known == own:
        return adapter
    if not known:
        raise ConfigError("the receipt is of an answer of the model itself: leave --lora (lora_request) out")
    if not own:
        raise ConfigError("the receipt is of an answer with an adapter: pass it with --lora (lora_request)")
    raise ConfigError(
        f"the receipt is of an adapter with the digest {known}, and that of --lora (lora_request) is {own}: pass the "
        "same version, with the same factor"
    )


def same_images(llm: LLM, facts: Mapping[str, Any], images: Sequence[Any]) -> tuple[PromptImage, ...]:
    """The images that the facts of a request name, at their places; an error if others are passed."""
    known = list(facts.get("images", ()))
    if not known:
        if images:
            raise ConfigError("the receipt is of an answer without images: leave --image out")
        return ()
    if not images:
        raise ConfigError("the receipt is of an answer about images: pass them with --image, in their order")
    vision = required_vision(llm.model)
    found = placed(facts["prompt_token_ids"], vision, [vision.read(image) for image in images])
    if [image.digest.hex() for image in found] != known:
        raise ConfigError("the images are not those of the receipt: pass the same files with --image, in their order")
    return found


def _outcome(request: Request, expected: list[dict[str, Any]]) -> Replay:
    found = returned_sequences(request)
    tokens = [sequence.new_token_ids for sequence in found]
    mismatch = None
    for number, answer in enumerate(expected):
        mismatch = _first_mismatch(number, answer["token_ids"], tokens[number] if number < len(tokens) else [])
        if mismatch is not None:
            break
    differ = False
    for answer, sequence in zip(expected, found, strict=False):
        if answer.get("logprobs") is not None:
            records = sequence.logprobs.packed(request.num_given)
            differ |= blake2b(records, digest_size=16).hexdigest() != answer["logprobs"]
    return Replay(sum(map(len, tokens)), mismatch, tokens, differ and mismatch is None)


def _first_mismatch(number: int, expected: list[int], found: list[int]) -> Mismatch | None:
    for position in range(max(len(expected), len(found))):
        pair = tuple(ids[position] if position < len(ids) else None for ids in (expected, found))
        if pair[0] != pair[1]:
            return Mismatch(number, position, *pair)
    return None


# -- operations ------------------------------------------------------------------------------------------------------


def compare_operations(
    one: LLM, other: LLM, token_ids: list[int], lora_request: LoRARequest | str | None = None
) -> list[LayerDrift]:
    """Each layer of two engines over the same tokens, with the first operation that differs in it."""
    if one.model.config.num_layers != other.model.config.num_layers:
        raise ConfigError(
            f"{one.model.path.name} has {one.model.config.num_layers} layers and {other.model.path.name} has "
            f"{other.model.config.num_layers}: compare two forms of one model"
        )
    left, right = (traced(llm, token_ids, lora_request) for llm in (one, other))
    known = {(step.layer, step.operation, step.number): step for step in right}
    layers: dict[int, list[tuple[Step, Step]]] = {}
    for step in left:
        match = known.get((step.layer, step.operation, step.number))
        if match is not None:
            layers.setdefault(step.layer, []).append((step, match))
    return [_layer_drift(layer, pairs) for layer, pairs in sorted(layers.items())]


def traced(llm: LLM, token_ids: list[int], lora_request: LoRARequest | str | None = None) -> list[Step]:
    """The operations of one pass over these tokens, without a cache."""
    if len(token_ids) > MAX_TRACED:
        raise ConfigError(f"{len(token_ids)} tokens are too many to trace: {MAX_TRACED} at most")
    runner, steps, layer = llm.engine.runner, list[Step](), -1
    if runner.peers is not None:
        raise ConfigError("operations of several ranks cannot be traced: set tensor_parallel_size to 1")
    layer_of = {id(part): number for number, each in enumerate(runner.weights.layers) for part in _parts(each)}
    counts: dict[tuple[int, str], int] = {}

    def hook(name: str, work: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal layer
        result = work(*arguments, **options)
        layer = next((layer_of[id(one)] for one in arguments if id(one) in layer_of), layer)
        if name == "logits":
            layer = len(runner.weights.layers)
        number = counts[layer, name] = counts.get((layer, name), -1) + 1
        arrays = [np.ascontiguousarray(runner.kernels.to_host(part)) for part in _arrays(result)]
        digest = blake2b(digest_size=8)
        for array in arrays:
            digest.update(array.tobytes())
        last = arrays[-1].reshape(len(arrays[-1]), -1)[-1].astype(np.float64) if arrays else np.zeros(0)
        steps.append(Step(layer, name, number, digest.hexdigest(), last))
        return result

    kernels = hooked(runner.kernels, hook, one_by_one=True)
    rope = rope_of_length(llm.model.config, len(token_ids)) or 0
    [adapter] = llm.adapters_for(lora_request, 1)
    run = Run(0, 0, np.array(token_ids, np.int32), rope, None if adapter is None else adapter.prepared)
    batch = HostBatch.from_runs([], [run], None, 1, [len(token_ids) - 1]).to(runner.kernels)
    transformer.forward(runner.weights, batch, kernels, None)
    return steps


def _layer_drift(layer: int, pairs: list[tuple[Step, Step]]) -> LayerDrift:
    first = next(((a, b) for a, b in pairs if a.checksum != b.checksum), None)
    shown = first or pairs[-1]
    last = next((pair for pair in reversed(pairs) if pair[0].last_row.shape == pair[1].last_row.shape), pairs[-1])
    a, b = last[0].last_row, last[1].last_row
    size = float(np.linalg.norm(a)) or 1.0
    drift = float(np.linalg.norm(a - b)) / size if a.shape == b.shape else float("nan")
    return LayerDrift(layer, first[0].operation if first else "", (shown[0].checksum, shown[1].checksum), drift)


def _parts(value: Any) -> Iterator[Any]:
    """A part of the weights and all parts below it, but for plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        yield value
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)


def _arrays(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple):
        for part in result:
            yield from _arrays(part)
    elif hasattr(result, "shape"):
        yield result


def drift_record(rows: list[LayerDrift]) -> list[Mapping[str, Any]]:
    """The table of layers for JSON."""
    return [{**row._asdict(), "checksums": list(row.checksums)} for row in rows]
