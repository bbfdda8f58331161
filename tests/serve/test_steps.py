"""`stream_options.include_steps`: drafts and beams as they happen agree with the texts that come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import RunningServer, running_server, sse_events

pytestmark = pytest.mark.full
PROMPT = [5, 6, 7, 8] * 10


@pytest.fixture(scope="module")
def guessing() -> Iterator[RunningServer]:
    speculative = {"method": "ngram", "length": 4, "adaptive": False}
    with running_server(engine={"speculative": speculative}) as server:
        yield server


def stream(server: RunningServer, **options: Any) -> list[Any]:
    body = {"prompt": PROMPT, "stream": True, "return_token_ids": True, "ignore_eos": True, **options}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [event for event in sse_events(answer.text) if event != "[DONE]"]


def test_accepted_drafts_are_the_output_tokens(guessing: RunningServer) -> None:
    events = stream(guessing, max_tokens=40, temperature=0, logprobs=0, stream_options={"include_steps": True})
    texts = [token for event in events for choice in event["choices"] for token in choice["logprobs"]["tokens"]]
    drafts = [draft for event in events if "steps" in event for draft in event["steps"]["drafts"]]
    assert len(texts) == 40
    assert sum(draft["accepted"] for draft in drafts) > 0
    for draft in drafts:
        right, wrong = draft["tokens"][: draft["accepted"]], draft["tokens"][draft["accepted"] :]
        at = draft["position"]
        assert texts[at : at + len(right)] == right[: len(texts) - at]
        if wrong and at + len(right) < len(texts):
            assert texts[at + len(right)] != wrong[0]


def test_without_the_option_there_are_no_steps(guessing: RunningServer) -> None:
    assert all("steps" not in event for event in stream(guessing, max_tokens=10, temperature=0))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_returned_beams_are_paths_of_the_watched_tree(server: RunningServer, groups: int) -> None:
    search = {"width": 4, "num_groups": groups, "diversity_penalty": 0.5 * (groups - 1)}
    events = stream(server, max_tokens=8, n=4, beam_search=search, stream_options={"include_steps": True})
    steps = [step for event in events if "steps" in event for step in event["steps"]["beams"]]
    assert [step["position"] for step in steps] == list(range(8))
    running: list[list[int]] = [[]] * groups
    finished = []
    for step in steps:
        rows = [(running[beam["parent"]] + [beam["token_id"]], beam["finished"]) for beam in step["beams"]]
        running = [path for path, has_ended in rows if not has_ended]
        finished += [path for path, has_ended in rows if has_ended]
    returned = [choice["token_ids"] for event in events for choice in event["choices"]]
    assert len(returned) == 4
    assert all(path in finished for path in returned)


def test_the_model_card_tells_the_defaults(server: RunningServer) -> None:
    with server.http() as http:
        card = http.get("/v1/models").json()["data"][0]
    assert card["has_chat_template"]
    assert card["sampling_defaults"]["repetition_penalty"] == 1.0
    assert card["sampling_defaults"].keys() >= {"temperature", "top_p", "top_k", "min_p", "typical_p", "min_tokens"}
