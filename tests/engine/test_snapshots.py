"""Snapshots: a saved text goes on bit for bit in another process; all else is refused by name."""

from __future__ import annotations

import json
import random
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bifolio import LLM, Grammar, SamplingParams
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.tiers import snapshots
from bifolio.engine.tiers.snapshots import Snapshot, capture, is_snapshot, read_snapshot, restore, write_snapshot
from bifolio.errors import SnapshotError
from bifolio.model import digests
from helpers import cpu_kernel_names, drain, make_engine, make_kernels, random_prompt, scratch, tiny_folder, tiny_loaded
from hybrid_models import VOCABULARY, tiny_hybrid

BLOCK = 4
OPTIONS: dict[str, Any] = {"block_size": BLOCK, "chunk_size": 8, "max_model_len": 128, "num_blocks": 64}
LLM_OPTIONS: dict[str, Any] = {"num_blocks": 64, "block_size": BLOCK, "max_model_len": 128, "kernels": "native"}
SAMPLED = SamplingParams(max_tokens=9, temperature=0.9, seed=7, repetition_penalty=1.2, logprobs=2, ignore_eos=True)


def engine_of(kind: str = "plain", **options: Any) -> InferenceEngine:
    model = tiny_loaded() if kind == "plain" else tiny_hybrid(kind)
    hybrid = {} if kind == "plain" else {"checkpoint_tokens": 16}
    return make_engine(model, kernels=make_kernels(cpu_kernel_names()[0]), **{**OPTIONS, **hybrid, **options})


def run(engine: InferenceEngine, prompt: list[int], params: SamplingParams = SAMPLED, salt: bytes = b"") -> Any:
    request = engine.add_request(f"r{engine.stats().num_steps}", prompt, params, salt=salt)
    drain(engine)
    sequence = request.sequences[0]
    scores = [(one.logprob, tuple(one.top)) for one in sequence.logprobs]
    return (list(sequence.output_token_ids), scores), request.metrics.num_cached_tokens


def prompt_of(length: int) -> list[int]:
    return random_prompt(length, seed=length, vocab_size=VOCABULARY)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "conv", "delta", "lightning", "mamba"])
@pytest.mark.parametrize("length", [3, 41, 90])
def test_a_text_goes_on_in_another_engine(tmp_path: Path, kind: str, length: int) -> None:
    first = engine_of(kind)
    (tokens, _), _ = run(first, prompt_of(length))
    text = [*prompt_of(length), *tokens]
    write_snapshot(tmp_path / "text", capture(first, text))
    expected, _ = run(engine_of(kind), [*text, *prompt_of(5)])
    second = engine_of(kind)
    restored = restore(second, read_snapshot(tmp_path / "text"))
    found, num_cached = run(second, [*text, *prompt_of(5)])
    assert found == expected
    assert num_cached == restored >= length // BLOCK * BLOCK
    second.blocks.check_invariants()
    assert second.blocks.num_used_blocks == 0


@pytest.mark.full
def test_an_answer_with_a_grammar_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Sampling noise, penalties and the grammar continue in the middle of an answer, in another process' LLM."""
    folder = tiny_folder(tokenizer=True)
    plain = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, ignore_eos=True)
    for params in (plain, replace(plain, grammar=Grammar.regex("[a-z ]{60,80}"))):
        with LLM(folder, **LLM_OPTIONS) as llm:
            whole = llm.open("the fox")
            whole.generate(replace(params, max_tokens=24))
            expected = whole.token_ids
            part = llm.open("the fox")
            part.generate(replace(params, max_tokens=11))
            llm.save(part, tmp_path / "text")
            part.generate(replace(params, max_tokens=13))
            assert part.token_ids == expected  # the branch itself
        with LLM(folder, **LLM_OPTIONS) as llm, llm.load(tmp_path / "text") as branch:
            assert branch.answer_token_ids == expected[-24:-13]
            output = branch.generate(replace(params, max_tokens=13))
            assert branch.token_ids == expected
            assert output.num_cached_tokens > 0


@pytest.mark.full
def test_outputs_and_tokens_are_saved_as_well(tmp_path: Path) -> None:
    with LLM(tiny_folder(), **LLM_OPTIONS) as llm:
        [output] = llm.generate({"prompt_token_ids": prompt_of(30)}, replace(SAMPLED, logprobs=None))
        size = llm.save(output, tmp_path / "output", notes={"title": "a fox"})
        assert size == (tmp_path / "output").stat().st_size
        assert stat.S_IMODE((tmp_path / "output").stat().st_mode) == 0o600
        llm.save(prompt_of(30), tmp_path / "tokens")
        loaded = llm.load(tmp_path / "output")
        assert loaded.token_ids == [*prompt_of(30), *output.outputs[0].token_ids]
        assert loaded.answer_token_ids == list(output.outputs[0].token_ids)
        assert llm.load(tmp_path / "tokens").answer_token_ids == []
    assert read_snapshot(tmp_path / "output").notes == {"title": "a fox"}
    assert is_snapshot(tmp_path / "output")
    assert not is_snapshot(Path(__file__))


@pytest.mark.full
def test_other_models_keys_and_arithmetic_are_refused(tmp_path: Path) -> None:
    first = engine_of()
    run(first, prompt_of(40), salt=b"a")
    snapshot = capture(first, prompt_of(40), salt=b"a")
    with pytest.raises(SnapshotError, match="another model"):
        restore(engine_of("delta"), snapshot, salt=b"a")
    with pytest.raises(SnapshotError, match="another key"):
        restore(engine_of(), snapshot, salt=b"b")
    other = engine_of(cache_dtype="f16")
    with pytest.raises(SnapshotError, match=r"pass recompute=True"):
        restore(other, snapshot, salt=b"a")
    assert restore(other, snapshot, salt=b"a", recompute=True) == 0
    assert restore(engine_of(block_size=8), snapshot, salt=b"a") == 0  # the same bits, computed again
    with pytest.raises(SnapshotError, match="vocabulary"):
        restore(engine_of(), replace(snapshot, token_ids=[9999]), salt=b"a")
    with pytest.raises(SnapshotError, match="another size"):
        restore(engine_of(), replace(snapshot, blocks=[block[:-1] for block in snapshot.blocks]), salt=b"a")
    with pytest.raises(SnapshotError, match="cannot be written"):
        write_snapshot(tmp_path / "no" / "folder", snapshot)
    assert restore(engine_of(), snapshot, salt=b"a") == 36


@pytest.mark.full
def test_snapshots_know_the_weights_that_are_exchanged(tmp_path: Path) -> None:
    old, new = tiny_folder(seed=0), tiny_folder(seed=1)
    with LLM(old, **LLM_OPTIONS) as llm:
        llm.save(prompt_of(30), tmp_path / "old")
        llm.load_weights(new)
        llm.save(prompt_of(30), tmp_path / "new")
        with pytest.raises(SnapshotError, match="another model"):
            llm.load(tmp_path / "old")
        llm.load(tmp_path / "new").close()
        llm.load_weights(old)
        llm.load(tmp_path / "old").close()


@pytest.mark.full
def test_the_weights_are_read_once_for_all_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server saves hundreds of stored responses in the seconds of its end."""
    reads = []
    monkeypatch.setattr(digests, "model_digest", lambda model: reads.append(model) or "digest")
    engine = engine_of()
    for length in range(10, 20):
        restore(engine, capture(engine, prompt_of(length)))
    assert len(reads) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_a_small_cache_takes_the_blocks_that_fit(kind: str) -> None:
    first = engine_of(kind)
    run(first, prompt_of(110))
    snapshot = capture(first, prompt_of(110))
    small = engine_of(kind, num_blocks=34, max_model_len=128)
    held = small.blocks.fresh_sequence_id()
    small.blocks.open_table(held)
    small.blocks.append(held, 60)
    assert restore(small, snapshot) <= 72
    small.blocks.release(held)
    assert run(small, prompt_of(110))[0] == run(engine_of(kind), prompt_of(110))[0]
    small.blocks.check_invariants()


def saved(kind: str) -> bytes:
    path = scratch() / f"snapshot-{kind}"
    if not path.exists():
        engine = engine_of(kind)
        run(engine, prompt_of(40))
        write_snapshot(path, capture(engine, prompt_of(40)))
    return path.read_bytes()


@pytest.mark.full
@settings(max_examples=300, deadline=None, derandomize=True, phases=(Phase.generate,),
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(kind=st.sampled_from(["plain", "delta"]), seed=st.integers(0, 2**32), way=st.integers(0, 3))
def test_a_damaged_snapshot_is_refused(kind: str, seed: int, way: int) -> None:
    generator, data = random.Random(seed), bytearray(saved(kind))
    at = generator.randrange(len(data))
    if way == 0:
        data[at] ^= 1 << generator.randrange(8)
    elif way == 1:
        del data[at:]
    elif way == 2:
        data += generator.randbytes(1 + at % 40)
    else:
        data[at : at + 8] = generator.randbytes(8) if bytes(data[at : at + 8]) else b"\0"
    path = scratch() / "damaged-snapshot"
    path.write_bytes(data)
    if bytes(data) != saved(kind):
        with pytest.raises(SnapshotError, match="no whole snapshot"):
            read_snapshot(path)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": "many"},
        {"blocks": [-5]},
        {"token_ids": 7},
        {"notes": 3},
        {"state": 1 << 70},
        {"blocks": [1 << 62]},
        {"num_prompt": -1},
        {"num_prompt": 41},
        {"token_ids": [], "num_prompt": 0},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The checksum is right, as of a file that was made on purpose."""
    data = saved("plain")
    _, length = snapshots.START.unpack(data[: snapshots.START.size])
    start = snapshots.START.size
    header = {**json.loads(data[start : start + length]), **changes}
    body = json.dumps(header).encode()
    rest = data[start + length : -snapshots.CHECKSUM_BYTES]
    forged = snapshots.START.pack(snapshots.MAGIC, len(body)) + body + rest
    check = snapshots.blake2b(forged, digest_size=snapshots.CHECKSUM_BYTES).digest()
    (tmp_path / "forged").write_bytes(forged + check)
    with pytest.raises(SnapshotError):
        restore(engine_of(), read_snapshot(tmp_path / "forged"))


CHILD = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_snapshots import engine_of, prompt_of, run
from bifolio.engine.tiers.snapshots import read_snapshot, restore
engine = engine_of({kind!r})
restore(engine, read_snapshot(Path({path!r})))
print(run(engine, prompt_of(70)))
"""


@pytest.mark.full
def test_another_process_computes_the_same_bits(tmp_path: Path) -> None:
    first = engine_of("delta")
    run(first, prompt_of(70))
    write_snapshot(tmp_path / "text", capture(first, prompt_of(70)))
    here = Path(__file__).parent
    code = CHILD.format(paths=[str(here), str(here.parent)], kind="delta", path=str(tmp_path / "text"))
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str((run(engine_of("delta"), prompt_of(70))[0], 68))


def test_a_snapshot_has_the_values_that_it_was_written_with(tmp_path: Path) -> None:
    snapshot = Snapshot([1, 2, 3], 2, "m", "n", "r", 4, [], None, {"a": ["b"]})
    write_snapshot(tmp_path / "text", snapshot)
    assert read_snapshot(tmp_path / "text") == snapshot
