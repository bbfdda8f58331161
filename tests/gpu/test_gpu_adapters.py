"""Low-rank adapters on a GPU: the products of merged weights, in captured steps, beside other adapters and none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_files import adapter_folder, adapter_tensors, peft_adapter
from bifolio import LLM, SamplingParams
from bifolio.kernels.interface import Adapter, AdapterUse, LowRank, ProductShape
from bifolio.model.huggingface.hf_loader import load_folder
from helpers import random_prompt, tiny_folder, tiny_model

NewEngine = Callable[..., Any]
VOCAB = 61
SIZES: dict[str, Any] = {"num_blocks": 400, "max_num_seqs": 16, "token_budget": 64, "chunk_size": 32}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=9, logprobs=2, ignore_eos=True)
TOLERANCE = {"f32": 1e-3, "bf16": 0.25}  # of logprobs


@pytest.fixture(scope="module")
def base() -> Path:
    return tiny_folder()


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Path]:
    """Of many ranks, and of large changes: a missing one is seen in every logprob."""
    return [adapter_folder(base, rank=1 + seed * 3 % 40, seed=seed) for seed in range(16)]


def prompt_of(number: int) -> list[int]:
    return random_prompt(3 + number, seed=number, vocab_size=VOCAB)


def run(engine: Any, wanted: list[tuple[list[int], Any]], params: SamplingParams = PARAMS) -> list[Any]:
    """Tokens and logprobs of requests that run together."""
    requests = [
        engine.add_request(str(number), prompt, params, adapter=own) for number, (prompt, own) in enumerate(wanted)
    ]
    while engine.has_work:
        engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return [essence(request) for request in requests]


def essence(request: Any) -> Any:
    return [(s.output_token_ids, [entry.logprob for entry in s.logprobs]) for s in request.sequences]


def assert_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    """The logprobs of the same tokens; behind a token that differs by a near tie nothing is compared."""
    compared = 0
    for ours, theirs in zip(found, expected, strict=True):
        for (tokens, scores), (others, wanted) in zip(ours, theirs, strict=True):
            differ = (place for place, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1])
            same = next(differ, len(tokens))
            assert scores[:same] == pytest.approx(wanted[:same], abs=tolerance)
            compared += same
    assert compared >= (0.8 if tolerance < 0.01 else 0.4) * sum(len(tokens) for each in expected for tokens, _ in each)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logprobs_equal_those_of_merged_weights(dtype: str, new_engine: NewEngine, base: Path, tmp_path: Path) -> None:
    """An engine with adapters beside one engine of the merged folder for each of them."""
    from bifolio.model.adapters.adapter import read_adapter
    from bifolio.model.adapters.merge import merged

    greedy = SamplingParams(temperature=0, max_tokens=9, logprobs=1, ignore_eos=True)
    size = 0.3 if dtype == "f32" else 0.2
    folders = [adapter_folder(base, tensors=adapter_tensors(base, 4, seed, size), rank=4) for seed in range(3)]
    engine = new_engine(dtype, model=load_folder(base), **SIZES)
    loaded = [engine.adapters.load(folder.name, folder) for folder in folders]
    together = [(prompt_of(number), loaded[number % 3] if number % 4 else None) for number in range(12)]
    found = run(engine, together, greedy)
    plain = run(engine, [(prompt, None) for prompt, _ in together], greedy)
    for number, (ours, others) in enumerate(zip(found, plain, strict=True)):
        first, other = ours[0][1][0], others[0][1][0]
        assert (first == pytest.approx(other, abs=TOLERANCE[dtype] / 5)) is (number % 4 == 0), number
    for place, folder in enumerate(folders):
        model = load_folder(base)
        whole = new_engine(dtype, model=merged(model, read_adapter(folder, model.config)), **SIZES)
        own = [number for number, (_, adapter) in enumerate(together) if adapter is loaded[place]]
        expected = run(whole, [(together[number][0], None) for number in own], greedy)
        assert_close([found[number] for number in own], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_prompt_logprobs_equal_those_of_peft(architecture: str, new_engine: NewEngine) -> None:
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    reference, folder = tiny_model(architecture)
    adapted, path = peft_adapter(reference, target_modules="all-linear", use_rslora=True)
    engine = new_engine("f32", model=load_folder(folder), **SIZES)
    loaded = engine.adapters.load("a", path)
    tokens = random_prompt(20, seed=1, vocab_size=engine.model.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    request = engine.add_request("a", tokens, params, adapter=loaded)
    while engine.has_work:
        engine.step()
    with torch.no_grad():
        wanted = torch.log_softmax(adapted(torch.tensor([tokens])).logits[0].float(), dim=-1).numpy()
    found = [entry.logprob for entry in request.prompt_logprobs if entry is not None]
    assert found == pytest.approx([wanted[n, token] for n, token in enumerate(tokens[1:])], abs=2e-3)


@pytest.mark.usefixtures("own_kernels", "compiled")
def test_sixteen_adapters_in_one_batch_have_their_solo_bits(
    new_engine: NewEngine, base: Path, adapters: list[Path]
) -> None:
    """In deterministic mode: other adapters, chunks, graph sizes and cached prefixes change no bit."""
    engine = new_engine("bf16", deterministic=True, model=load_folder(base), **SIZES)
    loaded = [engine.adapters.load(str(number), path) for number, path in enumerate(adapters)]
    wanted = [(prompt_of(number), loaded[number] if number % 5 else None) for number in range(16)]
    together = run(engine, wanted)
    assert len({str(each) for each in together}) == 16
    engine.blocks.drop_cached()
    for number, each in enumerate(wanted):
        if number % 3 == 0:
            assert run(engine, [each]) == together[number : number + 1], number
    other = new_engine("bf16", deterministic=True, model=load_folder(base), **{**SIZES, "chunk_size": 5})
    again = [other.adapters.load(str(number), path) for number, path in enumerate(adapters)]
    wanted = [(prompt, again[number] if number % 5 else None) for number, (prompt, _) in enumerate(wanted)]
    assert run(other, wanted[::-1]) == together[::-1]
    assert run(other, wanted) == together


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("seed", range(4))
def test_loads_and_unloads_in_flight_change_no_bit(
    seed: int, new_engine: NewEngine, base: Path, adapters: list[Path]
) -> None:
    """Names are loaded, replaced and unloaded between steps; two adapters stay on the device."""
    from bifolio.config import AdapterConfig

    rng = np.random.default_rng(seed)
    engine = new_engine(
        "bf16", deterministic=True, model=load_folder(base), adapters=AdapterConfig(max_loras=2),
        **{**SIZES, "num_blocks": 60, "max_num_seqs": 5},
    )  # fmt: skip
    store, versions, requests = engine.adapters, dict[str, int](), []
    for number in range(60):
        name, value = f"a{rng.integers(4)}", int(rng.integers(6))
        action = rng.choice(["add", "add", "step", "step", "load", "unload"])
        if action == "load":
            store.load(name, adapters[value], in_place=True)
            versions[name] = value
        elif action == "unload" and name in versions:
            store.unload(name)
            del versions[name]
        elif action == "add":
            own = store.get(name) if name in versions else None
            request = engine.add_request(str(number), prompt_of(value), PARAMS, adapter=own)
            requests.append((request, versions.get(name), value))
        else:
            for _ in range(value):
                engine.step()
    while engine.has_work:
        engine.step()
    alone: dict[tuple[int | None, int], Any] = {}
    for request, version, value in requests:
        assert request.error is None
        if (version, value) not in alone:
            engine.blocks.drop_cached()
            own = None if version is None else store.load(f"solo {version}", adapters[version])
            alone[version, value] = run(engine, [(prompt_of(value), own)])[0]
        assert essence(request) == alone[version, value]
    assert engine.blocks.num_used_blocks == 0


@pytest.mark.usefixtures("own_kernels")
def test_an_engine_without_active_adapters_captures_nothing_for_them(
    new_engine: NewEngine, base: Path, adapters: list[Path]
) -> None:
    from bifolio.kernels.triton.step.decodes import StepKey

    engine = new_engine("bf16", model=load_folder(base), **SIZES)
    loaded = engine.adapters.load("a", adapters[1])
    run(engine, [(prompt_of(3), None)] * 3)
    assert all(key.adapts is None for key in engine.slots.device.graphs.keys(StepKey))
    run(engine, [(prompt_of(3), None), (prompt_of(4), loaded)])
    assert any(key.adapts is not None for key in engine.slots.device.graphs.keys(StepKey))


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64, 700])
def test_grouped_products_of_real_sizes(rows: int, fixed: bool, gpu_kernels: Any, device: str) -> None:
    """Against float64; of parts that some adapters leave alone. A row has the bits that it has alone."""
    import torch

    from bifolio.kernels.triton.adapter_changes import NO_BIAS
    from bifolio.kernels.triton.adapter_slots import AdapterSlots

    rng, widths, depth = np.random.default_rng(rows), (4096, 1024, 1024), 4096
    kernels = gpu_kernels("bf16", deterministic=fixed)
    slots = AdapterSlots(
        {0: ProductShape(widths, depth)}, device, kernels.dtype, most_in_batch=64, most_idle=16, fixed=fixed
    )

    def change(column: int, outputs: int, rank: int) -> LowRank:
        down = rng.standard_normal((rank, depth)).astype(np.float32) * depth**-0.5
        up = rng.standard_normal((outputs, rank)).astype(np.float32)
        rounded = [torch.tensor(each).bfloat16().float().numpy() for each in (down, up)]
        return LowRank(column, *rounded, rng.standard_normal(outputs).astype(np.float32) if rank == 24 else None)

    loaded = [
        slots.prepare(Adapter({0: tuple(change(sum(widths[:part]), widths[part], rank) for part in parts)}))
        for rank, parts in ((16, (0, 1, 2)), (24, (0, 2)), (1, (1,)), (64, (0,)))
    ]
    sources = {}
    x = torch.randn(rows, depth, device=device).bfloat16()
    y = torch.randn(rows, sum(widths), device=device).bfloat16()
    numbers = rng.integers(-1, 4, rows).astype(np.int32)
    use = slots.stage(AdapterUse(tuple(loaded), numbers))
    found = kernels.adapt(y, x, 0, use).float().cpu().numpy()
    for number, adapter in enumerate(loaded):
        own = np.flatnonzero(numbers == number)
        sources[number] = expected = y[own].double().cpu().numpy()
        for entry, column, outputs in zip(adapter.prepared.entries, np.cumsum([0, *widths])[:-1], widths, strict=True):
            down, up, bias, rank = entry.tolist()
            if rank:
                values = adapter.prepared.values.double()
                thin = values[down : down + rank * depth].view(rank, depth).numpy()
                wide = values[up : up + rank * outputs].view(outputs, rank).numpy()
                expected[:, column : column + outputs] += x[own].double().cpu().numpy() @ thin.T @ wide.T
                if bias != NO_BIAS:
                    expected[:, column : column + outputs] += values[bias : bias + outputs].numpy()
        np.testing.assert_allclose(found[own], expected, atol=0.1, rtol=0.02)  # of thin values in bf16
    assert (found[numbers < 0] == y[torch.tensor(numbers < 0, device=device)].float().cpu().numpy()).all()
    if fixed:
        for row in range(0, rows, 13):
            one = slots.stage(AdapterUse(tuple(loaded), numbers[row : row + 1]))
            alone = kernels.adapt(y[row : row + 1], x[row : row + 1], 0, one).float().cpu().numpy()
            assert (alone == found[row : row + 1]).all()


PRODUCTS = {0: ((4096, 1024, 1024), 4096), 1: ((6144, 6144), 4096), 2: ((4096,), 6144)}  # widths and depth of a site


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 100])
def test_products_with_changes_of_real_sizes(rows: int, gpu_kernels: Any, device: str) -> None:
    """Queries, keys and values behind a norm, an activated gate, and a product that is added to the residual: against
    float64. The kernels add the changes of adapters, of several ranks and of some parts, to their own sums."""
    import torch

    from bifolio.kernels.interface import Linear, Norm
    from bifolio.kernels.triton.adapter_slots import AdapterSlots
    from bifolio.quant.tensor import QuantizedTensor

    rng, kernels = np.random.default_rng(rows), gpu_kernels("bf16")

    def narrow(*size: int, scale: float = 1.0) -> np.ndarray:
        found: np.ndarray = torch.tensor(rng.standard_normal(size) * scale).bfloat16().float().numpy()
        return found

    weights = {site: narrow(sum(widths), depth, scale=depth**-0.5) for site, (widths, depth) in PRODUCTS.items()}

    def adapter(rank: int, *, first_parts: bool) -> Adapter:
        changes = {}
        for site, (widths, depth) in PRODUCTS.items():
            column = 0 if first_parts else sum(widths[:-1])
            outputs = sum(widths) if first_parts else widths[-1]
            bias = narrow(outputs) if rank == 24 else None
            changes[site] = (
                LowRank(column, narrow(rank, depth, scale=depth**-0.5), narrow(outputs, rank, scale=rank**-0.5), bias),
            )
        return Adapter(changes)

    adapters = [adapter(rank, first_parts=rank != 24) for rank in (16, 24, 1, 64, *[5] * 15)]
    slots = AdapterSlots(
        {site: ProductShape(*each) for site, each in PRODUCTS.items()}, device, kernels.dtype, most_in_batch=64,
        most_idle=16, fixed=False,
    )  # fmt: skip
    loaded = tuple(slots.prepare(each) for each in adapters)
    linears = {}
    for site, each in weights.items():
        matrices = tuple(QuantizedTensor.from_array(part) for part in np.split(each, 2 if site == 1 else 1))
        linears[site] = kernels.prepare_linear(Linear(matrices, (None,) * len(matrices), site=site))
    stream, hidden, residual = narrow(rows, 4096), narrow(rows, 6144), narrow(rows, 4096)
    norm, eps = narrow(4096), 1e-5
    normed = (
        stream.astype(np.float64) * norm / np.sqrt((stream.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps)
    )
    for numbers in (
        [[n] for n in range(-1, 5)] if rows == 1 else [rng.integers(-1, len(adapters), rows), np.full(rows, 1)]
    ):
        use = slots.stage(AdapterUse(loaded, np.asarray(numbers, np.int32)))
        x = kernels.norm(torch.tensor(stream, device=device), kernels.prepare_norm(Norm(norm, None, eps)))
        inputs = {0: x, 1: x, 2: torch.tensor(hidden, device=device).bfloat16()}
        outputs = {
            site: kernels.adapt(kernels.linear(inputs[site], each), inputs[site], site, use)
            for site, each in linears.items()
        }
        found = (
            kernels.to_host(outputs[0]),
            kernels.to_host(kernels.act_mul(outputs[1], "silu")),
            kernels.to_host(kernels.add(torch.tensor(residual, device=device), outputs[2])),
        )
        plain, wanted = {}, {}
        for site, each in weights.items():
            own = hidden.astype(np.float64) if site == 2 else normed
            plain[site] = own @ each.T.astype(np.float64)
            wanted[site] = plain[site].copy()
            for row, number in enumerate(numbers):
                if number >= 0:
                    (part,) = adapters[number].products[site]
                    columns = slice(part.column, part.column + len(part.up))
                    wanted[site][row, columns] += part.up.astype(np.float64) @ (part.down.astype(np.float64) @ own[row])
                    wanted[site][row, columns] += 0.0 if part.bias is None else part.bias
        gate, up = np.split(wanted[1], 2, axis=1)
        expected = wanted[0], gate / (1 + np.exp(-gate)) * up, wanted[2] + residual
        for site, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for row, number in enumerate(numbers):
                error = np.linalg.norm(ours[row] - theirs[row]) / np.linalg.norm(theirs[row])
                assert error < 0.01, (site, row, number, error)


@pytest.mark.full
def test_an_llm_with_adapters_from_its_start(base: Path, adapters: list[Path], device: str) -> None:
    """Through the front door, warm-up included, with requests of both kinds."""
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "deterministic": True}
    options |= {"num_blocks": 200} if device == "cpu" else {"gpu_memory_utilization": 0.2}
    modules = {"a": adapters[1], "both": [(adapters[1], 0.5), (adapters[2], 0.5)]}
    llm = LLM(base, device=device, lora_modules=modules, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [prompt_of(5)] * 3
    outputs = llm.generate(prompts, params, lora_request=[None, "a", "both"])
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(found)) == 3
    for name, expected in ((None, found[0]), ("a", found[1])):
        assert tuple(llm.generate(prompts[:1], params, lora_request=name)[0].outputs[0].token_ids) == expected
