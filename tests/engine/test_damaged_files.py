"""A thousand damaged, foreign and old files of tiers and snapshots: each is a miss or a named error."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from test_cache_tiers import end, engine_on, expected, prompt_of, run
from test_cache_tiers import tier_files as files_of
from test_snapshots import engine_of, saved

from bifolio.engine.tiers import files, snapshots
from bifolio.engine.tiers.files import FileTier
from bifolio.engine.tiers.snapshots import read_header, read_snapshot, restore
from bifolio.engine.tiers.tier import Key
from bifolio.errors import SnapshotError
from helpers import scratch

pytestmark = pytest.mark.full
COUNT = 500  # of each kind
Damage = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def flipped_in_the_header(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(min(len(data), files.HEADER.size))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.choice([0, 1, 8, 15, 16, draw.randrange(len(data)), len(data) - 1])]


def extended(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randint(1, 600))


def with_a_hole(data: bytes, draw: random.Random) -> bytes:
    """Zeros in place of a part, as after a crash of the machine."""
    at, size = draw.randrange(len(data)), draw.choice([1, 64, 512, 4096])
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def of_an_old_version(data: bytes, draw: random.Random) -> bytes:
    return data[:7] + bytes([data[7] - draw.randint(1, 9)]) + data[8:]


DAMAGES: list[Damage] = [flipped, flipped_in_the_header, cut, extended, with_a_hole, of_an_old_version]


@cache
def written(kind: str) -> tuple[bytes, dict[Path, bytes]]:
    """(Namespace, files by their names in its folder) of one prompt."""
    folder = scratch() / f"written-{kind}"
    engine = engine_on(folder, kind)
    run(engine, prompt_of(50))
    end(engine)
    [place] = folder.iterdir()
    return bytes.fromhex(place.name), {path.relative_to(place): path.read_bytes() for path in files_of(place)}


def test_damaged_blocks_and_states_are_misses(tmp_path: Path) -> None:
    for number in range(COUNT):
        draw = random.Random(number)
        namespace, found = written(draw.choice(["plain", "delta"]))
        name, other = draw.sample(sorted(found), 2)
        way = draw.choice([*DAMAGES, "of another prefix", "of another model", "of another key"])
        root = found[name][files.HEADER.size - 32 : files.HEADER.size - 16]
        key = Key(bytes.fromhex(name.stem), name.suffix == ".state")
        if callable(way):
            data = way(found[name], draw)
        else:
            data = found[other] if way == "of another prefix" else found[name]
            namespace = draw.randbytes(16) if way == "of another model" else namespace
            root = draw.randbytes(16) if way == "of another key" else root
        path = tmp_path / str(number) / namespace.hex() / name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        tier = FileTier(tmp_path / str(number), namespace, 1 << 30)
        content = tier.get(key, root)
        if data == found[name] and callable(way):
            assert content is not None
            continue
        assert content is None, (number, way)
        assert tier.num_damaged == 1
        assert not path.exists()
        assert tier.num_bytes == len(tier) == 0
        tier.put(key, root, np.zeros(8, np.uint8))  # written again
        assert tier.get(key, root) is not None


@pytest.mark.parametrize("kind", ["plain", "delta"])
def test_an_engine_computes_a_prompt_whose_files_are_damaged(tmp_path: Path, kind: str) -> None:
    namespace, found = written(kind)
    for number in range(12):
        draw, folder = random.Random(number), tmp_path / str(number)
        for name, data in found.items():
            path = folder / namespace.hex() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draw.choice(DAMAGES)(data, draw) if draw.random() < 0.2 else data)
        engine = engine_on(folder, kind)
        assert run(engine, prompt_of(50))[0] == expected(50, kind)
        end(engine)


def test_damaged_snapshots_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for number in range(COUNT):
        draw = random.Random(number)
        whole = saved(draw.choice(["plain", "delta"]))
        data = draw.choice(DAMAGES)(whole, draw)
        path.write_bytes(data)
        if data == whole:
            continue
        with pytest.raises(SnapshotError, match="no whole snapshot"):
            read_snapshot(path)
        with contextlib.suppress(SnapshotError):  # the list of a server reads headers alone
            read_header(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "sampled-0"}, "another model"),
        ({"numerics": "0"}, "another arithmetic"),
        ({"root": "00"}, "another key"),
        ({"token_ids": [1, 2, 1 << 40], "num_prompt": 1}, "outside the vocabulary"),
        ({"token_ids": [True], "num_prompt": 1}, "outside the vocabulary"),
        ({"token_ids": [1.5], "num_prompt": 1}, "outside the vocabulary"),
        ({"token_ids": [5, 6, 7], "num_prompt": 1}, "another size"),
    ],
)
def test_foreign_snapshots_are_refused_by_name(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    """Their checksums are right."""
    data = saved("plain")
    _, length = snapshots.START.unpack(data[: snapshots.START.size])
    start = snapshots.START.size
    body = json.dumps({**json.loads(data[start : start + length]), **changes}).encode()
    forged = snapshots.START.pack(snapshots.MAGIC, len(body)) + body + data[start + length : -snapshots.CHECKSUM_BYTES]
    check = snapshots.blake2b(forged, digest_size=snapshots.CHECKSUM_BYTES).digest()
    (tmp_path / "forged").write_bytes(forged + check)
    with pytest.raises(SnapshotError, match=sentence):
        restore(engine_of(), read_snapshot(tmp_path / "forged"))
