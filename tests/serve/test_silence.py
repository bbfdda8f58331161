"""No field of a request is ignored in silence: each changes the work or the answer, is refused, or is listed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from limit_cases import ENDPOINTS
from probes import WORD, Probe, probes
from serving import running_server
from silence_cases import REQUESTS

from adapter_files import adapter_folder
from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.exchange import decode
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.protocols.ignored import ignored_rows, reason_for
from bifolio.serve.protocols.openai_types import ChatRequest
from bifolio.serve.protocols.responses_types import ResponsesRequest
from bifolio.serve.views.openapi import openapi_document
from infill_models import QWEN, infill_folder, infill_tokenizer

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.name }}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_call_id }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}{{ reasoning_effort }}{{ a5 }}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
# Parts of an answer that differ between two equal requests.
VOLATILE = re.compile(r"(^|_)(id|created|created_at|modified_at|duration|timings|ms|cached|cached_tokens|digest)$")
# Of a job: fields that do not come from the body, and options that count only if the answer shows their result.
NOT_COMPARED = {"tenant", "request_id"}
# Parts of images, which a model of text refuses as a whole: tests/serve/test_images.py sends them to another model.
OF_IMAGES = {
    "messages[].content[].image_url.url",
    "messages[].content[].source.type",
    "messages[].content[].content[].source.type",
    "prompt.prompt_string",
    "prompt.multimodal_data",
}
OF_CLASSIFIERS = {"/classify", "/predict"}  # answered by such models alone: tests/encoders/test_encoder_server.py
SHOWN_ONLY = {"logprobs", "prompt_logprobs"}
# Settings that an answer of /v1/responses repeats: they do not count, but for metadata, which is there to be repeated.
REPEATED = {field.name for field in msgspec.structs.fields(ResponsesRequest)} - {"metadata"}


class Seen(NamedTuple):
    """The outcome of a request."""

    status: int
    work: Any  # all that the server resolved and answered
    text: str


Observe = Callable[[str, dict[str, Any]], Seen]


def rich_folder() -> Path:
    """A model that calls tools, reasons and fills in the middle; its tokenizer begins every text with a token."""
    from tokenizers import processors

    folder, backend = infill_folder(chat_template=TEMPLATE), infill_tokenizer(QWEN)
    start = ("<|endoftext|>", 0)
    backend.post_processor = processors.TemplateProcessing(single=[start[0], "$A"], special_tokens=[start])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def observe() -> Iterator[Observe]:
    jobs: list[Job] = []
    known: dict[str, Seen] = {}
    start = Run.start

    def recorded(self: Run) -> None:
        jobs.append(self.job)
        start(self)

    folder = rich_folder()
    engine = {"model": str(folder), "lora_modules": {"a": str(adapter_folder(folder))}}
    with (
        running_server(engine=engine, allow_priority=True) as server,
        pytest.MonkeyPatch.context() as patch,
        server.http() as http,
    ):
        patch.setattr(Run, "start", recorded)

        def look(path: str, body: dict[str, Any]) -> Seen:
            key = path + json.dumps(body)
            if key not in known:
                jobs.clear()
                answer = http.post(path, json=body)
                work = ([resolved(job) for job in jobs], answered(answer, REPEATED if path == "/v1/responses" else ()))
                known[key] = Seen(answer.status_code, work, answer.text)
            return known[key]

        yield look


def resolved(job: Job) -> dict[str, str]:
    found = {field.name: getattr(job, field.name) for field in fields(Job) if field.name not in NOT_COMPARED}
    params = job.params
    found["params"] = (
        {name: value for name, value in params.values.items() if name not in SHOWN_ONLY},
        params.grammar,
        params.is_beam_search,
        params.drop_output,
    )
    return {name: repr(value) for name, value in found.items()}


def answered(answer: httpx.Response, settings: Collection[str]) -> Any:
    """A whole answer without the settings that it repeats; of a stream, the names in its events.

    The number of events, and the text of each, depend on the time between them; the last one has names of its own.
    """
    if answer.headers["content-type"].startswith("application/json"):
        found = answer.json()
        if isinstance(found, list):
            return steady(found)
        return steady({name: value for name, value in found.items() if name not in settings})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    *first, last = [leaves(json.loads(line)) for line in lines if line.startswith("{")]
    return set().union(*first), last


def steady(value: Any) -> Any:
    if isinstance(value, dict):
        if (cached := value.get("cache_read_input_tokens")) is not None:  # Anthropic counts the other tokens alone
            value = {**value, "input_tokens": value["input_tokens"] + cached, "cache_read_input_tokens": 0}
        return {name: steady(item) for name, item in value.items() if not VOLATILE.search(name)}
    if isinstance(value, float):  # the last digits of the reference kernels depend on the other texts of a step
        return round(value, 4)
    return [steady(item) for item in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {leaf for name, item in value.items() for leaf in leaves(item, f"{path}.{name}")}
    if isinstance(value, list):
        return {leaf for item in value for leaf in leaves(item, path)}
    return {path} if value is not None else set()


def verdict(probe: Probe, path: str, observe: Observe) -> str:
    """How the server takes the field: "seen", "refused" by its name or value, or "silent"."""
    found = "silent"
    names = re.compile(rf"\b({re.escape(probe.path[-1])}|{WORD})\b")
    for base in REQUESTS[path]:
        assert observe(path, base).status == 200, (path, base, observe(path, base).text)
        num_accepted = 0
        for without, body in probe.bodies(base):
            plain, seen = observe(path, without), observe(path, body)
            if seen.status == 200 and (plain.status != 200 or seen.work != plain.work):
                return "seen"
            num_accepted += seen.status == 200
            if seen.status != 200 and seen.text != plain.text and names.search(seen.text):
                found = "refused"
        if found == "refused" and not num_accepted:
            break
    return found


def acts_on(path: str, ignored: list[Probe], observe: Observe) -> list[str]:
    """The fields of these that change something: all of them at once first, then one by one."""
    for base in REQUESTS[path]:
        plain = body = base
        for probe in ignored:
            plain = next((without for without, _ in probe.bodies(plain)), plain)
            body = next((probed for _, probed in probe.bodies(body)), body)
        if observe(path, body).work != observe(path, plain).work:
            break
    else:
        return []
    return [probe.name for probe in ignored if verdict(probe, path, observe) == "seen"]


@pytest.mark.sampled(2)
@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in ENDPOINTS if path not in OF_CLASSIFIERS])
def test_no_field_is_ignored_in_silence(path: str, observe: Observe) -> None:
    every = (probe for probe in probes(ENDPOINTS[path][0]) if not probe.is_fixed)
    found = [probe for probe in every if probe.name not in OF_IMAGES]
    ignored = [probe for probe in found if reason_for(probe.owners) is not None]
    others = [probe for probe in found if reason_for(probe.owners) is None]
    silent = [probe.name for probe in others if verdict(probe, path, observe) == "silent"]
    assert not silent, f"{path} ignores {silent}: act on them, refuse them, or list them in IGNORED with the reason"
    seen = acts_on(path, ignored, observe)
    assert not seen, f"{path} acts on {seen}: take them out of IGNORED"


def test_the_documents_list_the_ignored_fields() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    section = text.partition("### Accepted and ignored")[2].partition("\n### ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| protocol")]
    assert listed == [f"| {name} | `{field}` | {reason} |" for name, field, reason in ignored_rows()]
    fields = openapi_document()["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["user"]["description"] == "Ignored: the server keeps no accounts of users."


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    for body, name, nearest in (
        (b'{"messages": [{"role": "user", "content": "a"}], "temprature": 1}', "temprature", "temperature"),
        (b'{"messages": [{"role": "user", "contents": "a"}]}', "messages[0].contents", "content"),
    ):
        with pytest.raises(ApiError, match=f"did you mean '{nearest}'") as error:
            decode(body, ChatRequest)
        assert error.value.param == name
