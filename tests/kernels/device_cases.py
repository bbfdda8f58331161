"""Cases of a set's attributes, of its arrays and memory, and of whole steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from attention_cases import DECODE, attend, shape_of
from case_table import Outputs, activations, case, new_context, normal, protocol_members
from network_cases import new_linear, new_norm

from bifolio.config import CacheConfig
from bifolio.engine.executor import ModelRunner
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.engine.speculative.head_runner import HeadRun, HeadRunner
from bifolio.kernels.interface import (
    Adapter,
    AdapterUse,
    AttentionPhase,
    DeviceMemory,
    DeviceSlots,
    KernelSet,
    Linear,
    LowRank,
    SlotSizes,
)
from bifolio.kernels.logit_edits import MASK_ALONE, LogitEdits
from bifolio.kernels.select import CANDIDATES
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.model.adapters.sites import product_shapes
from bifolio.model.draft_head import prepare_head
from bifolio.model.eagle import load_eagle
from bifolio.quant.formats import QuantFormat
from bifolio.quant.fp8 import DenseToFp8
from bifolio.quant.tensor import QuantizedTensor
from bifolio.sampling_params import SamplingParams
from draft_heads import eagle_folder
from helpers import log_softmax, make_runner, random_prompt, tiny_loaded

VOCAB, BLOCK_SIZE = 61, 4
TABLES = np.array([[1, 5, 2, 0], [3, 4, 6, 0]], np.int32)  # of two sequences, at most 12 tokens each
PROMPTS = [random_prompt(6, seed=1, vocab_size=VOCAB), random_prompt(3, seed=2, vocab_size=VOCAB)]


# -- attributes --------------------------------------------------------------------------------------------------------
@case("name")
def name(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    assert kernels.name in CANDIDATES
    return ()


@case("array_backend")
def array_backend(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Arrays are of the kind that it names."""
    array = kernels.from_host(np.zeros(3, np.float32))
    if kernels.array_backend == "numpy":
        assert isinstance(array, np.ndarray)
    else:
        import torch

        assert kernels.array_backend == "torch"
        assert isinstance(array, torch.Tensor)
    return ()


@case("device")
def device(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Arrays lie there, and only a device of its own has memory to plan."""
    kind = kernels.device.split(":")[0]
    assert kind in ("cpu", "cuda")
    assert str(kernels.from_host(np.zeros(3, np.float32)).device).split(":")[0] == kind
    assert (kernels.memory() is None) == (kind == "cpu")
    return ()


@case("formats")
def formats(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The dense formats at least; how the others are taken is a case for each format."""
    assert kernels.formats >= {QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16}
    assert all(isinstance(format, QuantFormat) for format in kernels.formats)
    return ()


@case("kv_dtype")
def kv_dtype(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A cache of this type can be made, and takes what the set writes."""
    storage = kernels.new_storage(CacheLayout(1, 3, BLOCK_SIZE, 2, 32, kernels.kv_dtype))
    keys, values = (activations(kernels, normal(rng, 4, 2, 32)) for _ in range(2))
    storage.write(0, kernels.from_host(np.arange(4, 8)), keys, values)
    return tuple(kernels.to_host(part) for part in storage.gather(0, [1], 4))


@case("deterministic")
def deterministic(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A set that claims it gives a sequence the same bits alone and in company."""
    assert isinstance(kernels.deterministic, bool)
    layer, weights = kernels.prepare_linear(new_linear(rng, (96,), 128)), kernels.prepare_norm(new_norm(rng, 96))
    x, residual = normal(rng, 70, 128), normal(rng, 70, 96)

    def block(rows: slice) -> np.ndarray:
        delta = kernels.linear(activations(kernels, x[rows]), layer)
        return kernels.to_host(kernels.add_norm(activations(kernels, residual[rows]), delta, weights)[1])

    shape, lengths = shape_of("grouped"), [130, 17, 300]
    context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
    query = normal(rng, 3, shape.num_heads, shape.head_dim)
    rows, mixed = block(slice(None)), attend(kernels, query, shape, context, DECODE, [1] * 3, lengths)
    alone = block(slice(69, 70))
    last = context._replace(tables=context.tables[2:])
    mixed_alone = attend(kernels, query[2:], shape, last, DECODE, [1], lengths[2:])
    if kernels.deterministic:
        np.testing.assert_array_equal(alone[0], rows[69])
        np.testing.assert_array_equal(mixed_alone[0], mixed[2])
    return rows, alone, mixed, mixed_alone


@case("build_facts")
def build_facts(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Names and values for people and for digests; the values are each build's own."""
    facts = kernels.build_facts()
    assert facts == kernels.build_facts()
    assert facts
    assert all(isinstance(value, str) and value for value in facts.values())
    return ()


@case("activation_planes")
def activation_planes(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """How often a quantised weight meets an activation as integers; the value is each set's own."""
    assert kernels.activation_planes in (0, 1, 2)
    assert kernels.activation_planes == 0 or any(format.is_quantized for format in kernels.formats)
    return ()


@case("stores_fp8")
def stores_fp8(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A set that stores FP8 takes half of the bytes of bfloat16, and multiplies as the dense matrix."""
    values = np.eye(32, 64, dtype=np.float32)  # exact in FP8
    dense = QuantizedTensor.from_array(values).converted(QuantFormat.BF16)
    linear = kernels.prepare_linear(Linear((DenseToFp8(dense),), (None,)))
    if kernels.stores_fp8:
        assert linear.prepared[0].values.nbytes == values.size
    return (kernels.to_host(kernels.linear(activations(kernels, normal(rng, 3, 64)), linear)),)


@case("launches_ahead")
def launches_ahead(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A set whose passes are queued keeps the slots on its device: the next pass reads tokens that the host lacks."""
    assert isinstance(kernels.launches_ahead, bool)
    if kernels.launches_ahead:
        assert new_slots(kernels, _runner(kernels)) is not None
    return ()


# -- arrays and memory -------------------------------------------------------------------------------------------------
ARRAYS = tuple(np.arange(6, dtype=dtype).reshape(2, 3) for dtype in (np.float32, np.int32, np.int64))


@case("from_host")
def from_host(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    arrays = [kernels.from_host(array) for array in ARRAYS]
    assert [tuple(array.shape) for array in arrays] == [(2, 3)] * 3
    return tuple(kernels.to_host(array[:, 1:]) for array in arrays)


@case("to_host")
def to_host(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Types survive, but for one that numpy lacks."""
    arrays = [kernels.to_host(kernels.from_host(array)) for array in ARRAYS]
    assert [array.dtype for array in arrays] == [array.dtype for array in ARRAYS]
    return *arrays, kernels.to_host(activations(kernels, normal(rng, 3, 4)))


@case("fetch")
def fetch(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Copies that are queued together arrive each with its own values, in any order."""
    waits = [kernels.fetch(kernels.from_host(array)) for array in ARRAYS]
    waits.append(kernels.fetch(activations(kernels, normal(rng, 3, 4))))
    return tuple(wait() for wait in reversed(waits))


@case("new_storage")
def new_storage(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Write, gather, move and poison in every type that all sets keep."""
    found: list[Any] = []
    for dtype in ("f32", "f16", "bf16"):
        storage = kernels.new_storage(CacheLayout(2, 7, BLOCK_SIZE, 2, 16, dtype, poison=True))  # type: ignore[arg-type]
        assert isinstance(storage, KVStorage)
        for layer in range(2):
            keys, values = (kernels.from_host(normal(rng, 9, 2, 16)) for _ in range(2))
            storage.write(layer, kernels.from_host(np.array([0, 4, 5, 6, 7, 12, 13, 14, 15])), keys, values)
        storage.move_blocks([(1, 5), (3, 6)])
        storage.poison_blocks([3])
        storage.move_blocks([])
        _check_packing(storage)
        found += [part for layer in range(2) for part in storage.gather(layer, [1, 5, 6, 3, 2], 18)]
        assert np.isfinite(_as_f32(kernels, storage.keys[0][0])).all()  # padding may read block 0
    return tuple(_as_f32(kernels, part) for part in found)


def _check_packing(storage: KVStorage) -> None:
    """Blocks as one piece over all layers, on a device, have the bytes of `read_block`, and come back to any place."""
    if storage.backend == "numpy":
        return
    import torch

    packed = torch.zeros((3, storage.layout.bytes_per_block), dtype=torch.uint8, device=storage.device)
    expected = [storage.read_block(block_id) for block_id in (5, 1, 6)]
    storage.pack_blocks([5, 1, 6], packed)
    assert [row.tobytes() for row in packed.cpu().numpy()] == [block.tobytes() for block in expected]
    saved = [storage.read_block(block_id) for block_id in range(7)]
    storage.unpack_blocks([2, 4, 1], packed)
    saved[2], saved[4], saved[1] = expected
    assert [storage.read_block(block_id).tobytes() for block_id in range(7)] == [block.tobytes() for block in saved]
    storage.unpack_blocks([1], packed[1:2])
    storage.poison_blocks([2, 4])


def _as_f32(kernels: KernelSet, part: Any) -> np.ndarray:
    """Numbers of a storage; the numpy backend holds bf16 as its bits."""
    array = kernels.to_host(part)
    return array if array.dtype == np.uint16 else array.astype(np.float32)


@case("arena")
def arena(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Nothing sleeps before `use_arena`."""
    assert kernels.arena is None
    return ()


@case("use_arena")
def use_arena(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Weights that slept are as before; a set whose memory is the host's has no arena."""
    values = rng.standard_normal((3, 5)).astype(np.float32)
    weights = [kernels.from_host(values)]
    try:
        kernels.use_arena()
        if kernels.arena is not None:
            kernels.arena.adopt(weights)
            kernels.arena.sleep(keep_weights=True)
            assert kernels.arena.keeps_weights
            kernels.arena.wake(("weights",))
    finally:
        kernels.arena = None
    assert kernels.to_host(weights[0]).tolist() == values.tolist()
    return ()


@case("memory")
def memory(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The peak counts an allocation that is gone; free memory is what the device has."""
    found = kernels.memory()
    if found is None:
        return ()
    assert protocol_members(DeviceMemory) <= set(dir(found))
    assert found.free_bytes() > 0
    found.start_peak()
    size = 1 << 24
    kernels.from_host(np.zeros(size, np.uint8))
    assert size <= found.peak_bytes() < 4 * size
    return ()


@case("release_memory")
def release_memory(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Arrays in use stay."""
    kept = activations(kernels, normal(rng, 64, 64))
    activations(kernels, normal(rng, 64, 64))
    kernels.release_memory()
    return (kernels.to_host(kept),)


@case("expert_calls")
def expert_calls(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Calls of native kernels; other sets have none."""
    calls = kernels.expert_calls()
    assert calls is None or calls.product_rate() > 0
    return ()


@case("on_padding")
def on_padding(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Without experts on the host, results within it are those of other steps."""
    with kernels.on_padding():
        kept = activations(kernels, normal(rng, 64, 64))
    return (kernels.to_host(kept),)


# -- whole steps -------------------------------------------------------------------------------------------------------
def _runner(kernels: KernelSet) -> ModelRunner:
    return make_runner(tiny_loaded(), num_blocks=8, kernels=kernels, poison=True, cache_dtype=kernels.kv_dtype)[0]


def prompt_batch() -> HostBatch:
    """Two prompts, and the logits of their last tokens."""
    runs = [Run(number, 0, prompt) for number, prompt in enumerate(PROMPTS)]
    return HostBatch.from_runs([], runs, TABLES, BLOCK_SIZE, [len(PROMPTS[0]) - 1, sum(map(len, PROMPTS)) - 1])


def decode_batch(step: int, tokens: Any) -> HostBatch:
    runs = [Run(number, len(prompt) + step, [int(tokens[number])]) for number, prompt in enumerate(PROMPTS)]
    return HostBatch.from_runs(runs, [], TABLES, BLOCK_SIZE, [0, 1])


@case("record")
def record(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A recorded pass gives the logits of the verbs one by one: the same bits where the set is deterministic."""
    runners = _runner(kernels), _runner(kernels)
    programs = {phase: kernels.record(runners[1].network, phase) for phase in AttentionPhase}
    found = []
    steps = [(AttentionPhase.PREFILL, prompt_batch())]
    steps += [(AttentionPhase.DECODE, decode_batch(step, [7 + step, 9 + step])) for step in range(3)]
    for phase, host in steps:
        batch = host.to(kernels)
        logits = kernels.to_host(runners[0].run(batch))
        program = programs[phase]
        if program is not None:
            recorded = kernels.to_host(program.run(batch, runners[1].storage))
            np.testing.assert_allclose(recorded, logits, atol=0 if kernels.deterministic else 1e-5, rtol=0)
        found.append(logits)
    return tuple(found)


class Watched:
    """An object, and the names of its methods that were used."""

    def __init__(self, inner: object) -> None:
        self.inner, self.used = inner, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return getattr(self.inner, name)


def new_slots(kernels: KernelSet, runner: ModelRunner) -> DeviceSlots | None:
    sizes = SlotSizes(num_slots=3, max_blocks=TABLES.shape[1], max_model_len=16, vocab_size=VOCAB, max_chunk=16)
    return kernels.device_slots(runner.network, runner.storage, sizes)


@case("device_slots")
def device_slots(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Greedy decode steps of two sequences: by the slots on the device, or verb by verb where the set has none.

    The tiny network's best tokens are clear enough that a set in 16 bits must find the same.
    """
    runner = _runner(kernels)
    runner = replace(runner, weights=runner.weights.tapped((1,)))
    slots = new_slots(kernels, runner)
    batch = runner.with_taps(prompt_batch().to(kernels))
    logits = kernels.to_host(runner.run(batch))
    first = logits.argmax(axis=-1)
    if slots is None:
        return _decode_by_verbs(kernels, runner, first)
    watched = Watched(slots)
    found = _decode_by_slots(kernels, watched, logits, kernels.to_host(batch.taps))
    _check_drafts(kernels, watched, runner)
    _check_adapters(kernels, watched, runner, rng)
    assert watched.used == protocol_members(DeviceSlots)
    return found


def _check_adapters(kernels: KernelSet, slots: Any, runner: ModelRunner, rng: np.random.Generator) -> None:
    """A captured step with an adapter gives the logits of a pass that is launched kernel by kernel."""
    site, shape = next(iter(product_shapes(runner.weights).items()))
    change = LowRank(0, normal(rng, 4, shape.inputs), normal(rng, shape.widths[0], 4))
    adapter, batch = slots.prepare_adapter(Adapter({site: (change,)})), prompt_batch()
    slots.warm_up_adapters()
    use = AdapterUse((adapter,), np.zeros(batch.num_tokens, np.int32))
    staged = replace(batch.to(kernels), adapters=slots.stage_adapters(use))
    expected, plain = (kernels.to_host(runner.run(each)) for each in (staged, batch.to(kernels)))
    captured = slots.prompt_logits(replace(batch.on_host(), adapters=use), np.array([2, 0], np.int32))
    assert np.abs(kernels.to_host(captured) - expected).max() < 0.05 * expected.std()
    assert np.abs(plain - expected).max() > 0.1 * expected.std()


def _decode_by_verbs(kernels: KernelSet, runner: ModelRunner, first: np.ndarray) -> Outputs:
    tokens = [first]
    for step in range(3):
        logits = kernels.to_host(runner.run(decode_batch(step, tokens[-1]).to(kernels)))
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2] > 0.1 * logits.std()).all(), "choose prompts whose best token is clear"
        tokens.append(logits.argmax(axis=-1))
    return np.stack(tokens).astype(np.int64), logits


def _decode_by_slots(kernels: KernelSet, slots: Any, logits: np.ndarray, states: np.ndarray) -> Outputs:
    """Slots 2 and 0 of three hold the sequences."""
    taken, rows = np.array([2, 0], np.int32), np.arange(2)
    greedy = SamplingParams(temperature=0)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tables = np.zeros((3, TABLES.shape[1]), np.int32)
    tables[taken] = TABLES
    slots.warm_up()
    slots.set_states(taken, np.zeros(2, np.int32), np.full(2, -1, np.int32))  # the network has no recurrent layers
    for slot in taken.tolist():
        slots.set_params(slot, greedy, 0, None)
    drafts = slots.draw_drafts(kernels.from_host(logits), np.array([1, 0, 1]), taken[[0, 0, 1]], np.array([4, 5, 4]))
    assert drafts.wait().tolist() == logits.argmax(axis=-1)[[1, 0, 1]].tolist()
    _check_masks(kernels, slots, logits, taken, lengths)
    nothing = np.zeros(0, np.int64)  # edits that count tokens and have a mask, but change no logit of the network
    edits = LogitEdits(nothing, np.zeros(0, np.float32), False, 1.0, 0.0, 1e-30, nothing, 0, has_mask=True)
    assert slots.draws(greedy, edits)
    for slot, prompt in zip(taken.tolist(), PROMPTS, strict=True):
        slots.set_params(slot, greedy, 0, edits)
        slots.set_history(slot, np.array(prompt, np.int32), [])
        slots.set_blocks(slot, 0, tables[slot, : -(-(len(prompt) + 3) // BLOCK_SIZE)].tolist())
    captured = slots.prompt_logits(prompt_batch().on_host(), taken)  # rewrites the keys and values of the prompts
    assert np.abs(kernels.to_host(captured) - logits).max() < 0.05 * logits.std()
    given = kernels.to_host(slots.prompt_states(len(states)))
    assert np.abs(given - states).max() < 0.05 * states.std()
    slots.mask_rows(taken)[:] = -1
    drawn = slots.draw(kernels.from_host(logits[::-1].copy()), rows[::-1], taken, lengths)
    tokens = [drawn.wait()]
    filled = slots.fill_tokens(kernels.from_host(np.array([-1, 5, -1], np.int32)), taken)
    assert kernels.to_host(filled)[:2].tolist() == [tokens[0][0], 5]
    slots.set_progress(taken, lengths, tokens[0])
    pending = [slots.decode(taken, tables, lengths + step) for step in range(2)]  # the second before the first is read
    tokens += [each.wait() for each in pending]
    _check_verification(slots, taken, tables, lengths, tokens)
    assert np.isfinite(kernels.to_host(slots.verified_states(1))).all()
    assert slots.verified_states(1).shape == (1, states.shape[1])
    slots.set_progress(taken, lengths + 2, tokens[-1])
    last = kernels.to_host(slots.decode_logits(taken)).copy()
    return np.stack([*tokens, last.argmax(axis=-1)]).astype(np.int64), last


def _check_verification(
    slots: Any, taken: np.ndarray, tables: np.ndarray, lengths: np.ndarray, tokens: list[np.ndarray]
) -> None:
    """Two right drafts of one slot, a wrong one of the other: both have advanced by the tokens that are kept."""
    for slot in taken.tolist():
        slots.set_params(slot, SamplingParams(temperature=0), 0, None)
    slots.set_progress(taken, lengths, tokens[0])
    assert slots.can_verify(taken, 2)
    right, wrong = [tokens[1][0], tokens[2][0]], [(tokens[1][1] + 1) % VOCAB, -2]
    found = slots.verify(taken, np.array([right, wrong])).wait().tolist()
    assert len(found) == 5
    assert found[:2] == right
    assert found[3] == tokens[1][1]
    assert slots.decode(taken[1:], tables, lengths[1:] + 1).wait().tolist() == [tokens[2][1]]


def _check_masks(kernels: KernelSet, slots: Any, logits: np.ndarray, taken: np.ndarray, lengths: np.ndarray) -> None:
    """A mask leaves one token; switched off it leaves all, and on again the next one counts."""
    assert slots.draws(SamplingParams(temperature=0.0), MASK_ALONE)
    for slot in taken.tolist():
        slots.set_params(slot, SamplingParams(temperature=0.0), 0, MASK_ALONE)
    own, best = kernels.from_host(logits.copy()), logits.argmax(axis=-1).tolist()
    for allowed in (5, None, 40):
        for slot in taken.tolist():
            slots.set_mask(slot, allowed is not None)
        if allowed is not None:
            masks = slots.mask_rows(taken)
            masks[:] = 0
            masks[:, allowed // 32] = 1 << allowed % 32
        found = slots.draw(own, np.arange(len(taken)), taken, lengths).wait().tolist()
        assert found == (best if allowed is None else [allowed] * len(taken))


def _check_drafts(kernels: KernelSet, slots: Any, runner: ModelRunner) -> None:
    """Drafts of a head in one launch are those of its passes one by one, drawn on the host."""
    head = prepare_head(load_eagle(eagle_folder(), tiny_loaded()).weights, kernels, runner.weights)
    own = HeadRunner(head, CacheConfig(8, BLOCK_SIZE, kernels.kv_dtype), kernels)
    tokens, taken = [[5, 7, 9], [8, 2]], np.array([1, 2], np.int32)
    states = kernels.from_host(normal(np.random.default_rng(4), 5, head.states_width))
    runs = [HeadRun(np.array(table), 0, 0, ids) for table, ids in zip(([3, 1], [4, 5]), tokens, strict=True)]
    logits, hidden = own.run(runs, states, AttentionPhase.DECODE, own_states=False)
    first: Any = hidden + 0  # a copy
    wanted, scores, ends = [], [], [3, 2]
    for step in range(3):
        assert head.token_ids is not None
        scores.append(kernels.to_host(logits))
        wanted.append(head.token_ids[scores[-1].argmax(axis=-1)])
        runs = [runs[row]._replace(start=ends[row] + step, tokens=[int(wanted[-1][row])]) for row in range(2)]
        logits, hidden = own.run(runs, hidden, AttentionPhase.DECODE, own_states=True)
    for slot in taken.tolist():
        slots.set_params(slot, SamplingParams(temperature=0), 0, None)
    own.on_device = slots.draft_slots(own.network, own.blocks.storage)
    runs = [runs[row]._replace(start=0, tokens=tokens[row]) for row in range(2)]
    own.blocks.poison_blocks([3])
    own.read(runs[0], states[:3], 1)
    again = runs[0]._replace(start=ends[0], tokens=[int(wanted[0][0])])
    logits, _ = own.run([again], kernels.take(first, [0]), AttentionPhase.DECODE, own_states=True)
    assert np.abs(kernels.to_host(logits)[0] - scores[1][0]).max() < 0.02 * np.abs(scores[1][0]).max()
    found = own.draft(runs, states, taken.tolist(), [4, 3], [3, 3])
    assert found is not None
    for row, drafts in enumerate(found.wait().tolist()):
        for step, draft in enumerate(drafts):
            if draft != wanted[step][row]:  # as likely, up to the rounding of hidden states; later ones differ rightly
                own = scores[step][row]
                below = own.max() - own[head.token_ids == draft]
                tolerance = (2e-2 if kernels.kv_dtype == "bf16" else 1e-5) * np.abs(own).max()
                assert below.size == 1, (row, step, drafts)
                assert below[0] < tolerance, (row, step, drafts, below, tolerance)
                break


@case("top_logprobs")
def top_logprobs(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The likeliest tokens of some rows, best first; where the set has no search, the host's."""
    values = rng.standard_normal((5, VOCAB)).astype(np.float32) * 3
    rows = np.array([4, 0, 2])
    wait = kernels.top_logprobs(kernels.from_host(values), rows, 6)
    if wait is None:
        logprobs = log_softmax(values[rows])
        ids = np.argsort(-logprobs, axis=-1)[:, :6]
        return ids.astype(np.int64), np.take_along_axis(logprobs, ids, axis=-1).astype(np.float32)
    ids, logprobs = wait()
    assert (ids.dtype, logprobs.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
    return ids, logprobs
