"""The victim law with images: a bomb gets a named error, and requests of others are answered meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from image_bombs import BOMBS
from law_server import ATTACKER, LawServer, too_slow

from vision.vision_models import gemma3_model

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing() -> Iterator[LawServer]:
    server = LawServer(gemma3_model().folder)
    yield server
    server.close()


@pytest.mark.full
def test_bombs_get_named_errors_and_the_victim_its_answers(seeing: LawServer) -> None:
    stored = seeing.store()
    for name, bomb in BOMBS.items():
        status, body = seeing._exchange(PATH, bomb.content(), ATTACKER)
        answer = json.loads(body)
        if status == 200:
            assert bomb.may_be_read or not bomb.said, (name, answer)
            assert answer["choices"][0]["finish_reason"] in ("length", "stop"), name
            continue
        assert status == 400, (name, status, body)
        assert bomb.said, (name, answer)
        assert re.search(bomb.said, answer["error"]["message"]), (name, answer)
        assert "Traceback" not in answer["error"]["message"]
    seeing.times_of_victim(stored, 1)
    assert seeing.is_alive


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_the_victim_law_with_images(seeing: LawServer, name: str) -> None:
    stored = seeing.store()
    before = seeing.times_of_victim(stored, 6)
    answers, healths, statuses = seeing.attack(PATH, BOMBS[name].content(), 3, 10.0)
    after = seeing.times_of_victim(stored, 6)
    assert set(statuses) <= {0, 200, 400, 413, 429}, statuses
    assert too_slow(answers, before["short"] + after["short"], 2.0) is None
    assert too_slow(healths, before["health"] + after["health"], 0.5) is None
