"""Long texts in the front end: token ids take little memory, and none that stays."""

from __future__ import annotations

import gc
import sys
import threading
from array import array
from operator import methodcaller
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
    """Small objects between them would keep their pages with the process; another thread sees none of them."""
    encoding = Encoding("i", range(1000, 201_000))
    backend = SimpleNamespace(get_vocab_size=lambda with_added_tokens: 0, encode_batch=lambda *_, **__: [encoding])
    tokenizer, stop, seen, rounds = Tokenizer(backend), threading.Event(), [0], []

    def work() -> None:
        while not stop.is_set():
            seen[0] = max(seen[0], sys.getallocatedblocks())

    before, interval = sys.getallocatedblocks(), sys.getswitchinterval()
    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(8):
            seen[0] = 0
            assert len(tokenizer.encode_packed("")) == len(encoding)
            rounds.append(seen[0])
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert before <= max(rounds)
    assert sum(most > before + len(encoding) // 2 for most in rounds) <= 1  # of a signal, or the collector


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
