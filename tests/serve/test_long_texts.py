"""Long texts in the front end: token ids take little memory, and none that stays."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from array import array
from operator import methodcaller
from pathlib import Path
from types import FrameType, SimpleNamespace

import msgspec
import pytest
from serving import running_server

from bifolio.serve.http.encoding import JsonList, encode_json
from bifolio.text.tokenizer import Tokenizer


@pytest.mark.parametrize("pieces", [[], [[]], [[1, 2], [3]], [["a", 'b"'], [], ["\ud83d", "ü"]]])
def test_a_list_in_pieces_is_the_list(pieces: list[list[object]]) -> None:
    found = JsonList()
    for piece in pieces:
        found.extend(piece)
    whole = [item for piece in pieces for item in piece]
    written = encode_json({"items": found.raw()})
    assert msgspec.json.decode(written) == msgspec.json.decode(encode_json({"items": whole}))


class Encoding(array):  # type: ignore[type-arg]
    """As the library's: its ids are made in C, a list of new objects each time."""

    ids = property(methodcaller("tolist"))


@pytest.mark.full
def test_no_thread_allocates_between_the_objects_of_token_ids() -> None:
    """Small objects between them would keep their pages with the process; another thread sees none of them.

    In a process of its own: with Python 3.12 filelock, which transformers imports, adds an audit hook, and threads
    switch wherever one runs.
    """
    code = "import test_long_texts; test_long_texts.watch_token_ids()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def watch_token_ids() -> None:
    """Fail if another thread sees the objects of a text's token ids."""
    encoding = Encoding("i", range(1000, 201_000))
    backend = SimpleNamespace(get_vocab_size=lambda with_added_tokens: 0, encode_batch=lambda *_, **__: [encoding])
    tokenizer, stop, seen = Tokenizer(backend), threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            seen[0] = max(seen[0], sys.getallocatedblocks())

    before = sys.getallocatedblocks()
    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(8):
            assert len(tokenizer.encode_packed("")) == len(encoding)
    finally:
        stop.set()
        thread.join()
    assert before <= seen[0] < before + len(encoding) // 2


@pytest.mark.full
def test_a_refused_text_is_freed_with_its_answer() -> None:
    """Not by the collector, which may run minutes later."""
    with running_server() as server, server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert http.post("/v1/completions", json={"prompt": "a b " * 20_000}).status_code == 400
            server.on_loop(lambda: None)  # the handler of the last one has ended
            kept = [found.f_code.co_name for found in gc.get_objects() if isinstance(found, FrameType)]
        finally:
            gc.enable()
    assert "_check_fits" not in kept
