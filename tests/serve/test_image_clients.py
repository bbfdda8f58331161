"""Images through the official clients: every one gives the model the prompt of the library, whole and streamed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import RunningServer, running_server

from bifolio import LLM, SamplingParams
from vision.vision_models import gemma3_model, picture

pytestmark = pytest.mark.full
SENTENCE = "this model reads text only: remove the image"
TEXT, LENGTH = "What is it?", 5


@pytest.fixture(scope="module")
def data() -> bytes:
    found = io.BytesIO()
    picture(70, 30, 4).save(found, "PNG")
    return found.getvalue()


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    engine = {"model": str(gemma3_model().folder), "kernels": "native", "max_model_len": 256, "num_blocks": 200}
    with running_server(engine=engine) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> str:
    """The answer of the library."""
    content = [{"type": "image", "image": picture(70, 30, 4)}, {"type": "text", "text": TEXT}]
    with LLM(gemma3_model().folder, max_model_len=256, num_blocks=100) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        return llm.chat([{"role": "user", "content": content}], params)[0].outputs[0].text.strip()


def openai_chat(server: RunningServer, data: bytes, stream: bool) -> str:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    answer: Any = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=LENGTH, stream=stream
    )
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def openai_responses(server: RunningServer, data: bytes, stream: bool) -> str:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content: Any = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": TEXT}]
    answer: Any = server.client().responses.create(
        model="tiny", input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=LENGTH,
        stream=stream,
    )  # fmt: skip
    if not stream:
        return str(answer.output_text)
    return "".join(event.delta for event in answer if event.type == "response.output_text.delta")


def anthropic_messages(server: RunningServer, data: bytes, stream: bool) -> str:
    client = pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": LENGTH,
                    "extra_body": {"temperature": 0.0}}  # fmt: skip
    if not stream:
        return "".join(block.text for block in client.messages.create(**options).content)
    with client.messages.stream(**options) as found:
        return "".join(found.text_stream)


def ollama_chat(server: RunningServer, data: bytes, stream: bool) -> str:
    client = pytest.importorskip("ollama").Client(host=server.url)
    messages = [{"role": "user", "content": TEXT, "images": [data]}]
    answer = client.chat("tiny", messages, stream=stream, options={"temperature": 0, "num_predict": LENGTH})
    return "".join(part.message.content or "" for part in (answer if stream else [answer]))


def ollama_generate(server: RunningServer, data: bytes, stream: bool) -> str:
    client = pytest.importorskip("ollama").Client(host=server.url)
    options = {"temperature": 0, "num_predict": LENGTH}
    answer = client.generate("tiny", TEXT, images=[data], stream=stream, options=options)
    return "".join(part.response for part in (answer if stream else [answer]))


CLIENTS: list[Callable[[RunningServer, bytes, bool], str]] = [
    openai_chat, openai_responses, anthropic_messages, ollama_chat, ollama_generate,
]  # fmt: skip


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_client_gets_the_answer_of_the_library(
    ask: Callable[[RunningServer, bytes, bool], str], seeing: RunningServer, data: bytes, expected: str
) -> None:
    assert ask(seeing, data, False).strip() == expected
    assert ask(seeing, data, True).strip() == expected
    seeing.wait_idle()


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_client_of_a_text_model_reads_the_sentence(
    ask: Callable[[RunningServer, bytes, bool], str], server: RunningServer, data: bytes
) -> None:
    for stream in (False, True):
        with pytest.raises(Exception, match=SENTENCE):
            ask(server, data, stream)
