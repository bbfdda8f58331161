"""Images over HTTP: every protocol gives the model the same prompt, and text models refuse with one sentence."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, running_server

from bifolio import LLM, SamplingParams
from bifolio.api.messages import SnapshotSettings
from vision.gguf_pairs import KEYS, write_text, write_tower
from vision.vision_models import gemma3_model, picture

SENTENCE = "this model reads text only: remove the image"
LENGTH = 5


def encoded(image: Any, kind: str = "PNG") -> str:
    data = io.BytesIO()
    image.save(data, kind)
    return base64.b64encode(data.getvalue()).decode()


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


def requests_of(data: str, text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """(Path, body) of the same question about an image in every protocol."""
    url = f"data:image/png;base64,{data}"
    chat = user({"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text})
    source = {"type": "base64", "media_type": "image/png", "data": data}
    item = {"type": "message", **user({"type": "input_image", "image_url": url, "detail": "auto"},
                                      {"type": "input_text", "text": text})["messages"][0]}  # fmt: skip
    ollama = {"model": "tiny", "stream": False, "options": {"temperature": 0, "num_predict": LENGTH}}
    return {
        "chat": ("/v1/chat/completions", {**chat, "temperature": 0, "max_tokens": LENGTH}),
        "responses": ("/v1/responses", {"input": [item], "temperature": 0, "max_output_tokens": LENGTH}),
        "anthropic": ("/v1/messages", {**user({"type": "image", "source": source}, {"type": "text", "text": text}),
                                       "model": "tiny", "temperature": 0, "max_tokens": LENGTH}),
        "ollama chat": ("/api/chat", {**ollama, "messages": [{"role": "user", "content": text, "images": [data]}]}),
        "ollama generate": ("/api/generate", {**ollama, "prompt": text, "images": [data]}),
        "llama.cpp": ("/completion", {"prompt": {"prompt_string": f"<user><__media__>{text};<assistant>",
                                                 "multimodal_data": [data]}, "n_predict": LENGTH, "temperature": 0}),
    }  # fmt: skip


def answer_of(name: str, body: dict[str, Any]) -> str:
    """The text of an answer."""
    if name == "chat":
        return str(body["choices"][0]["message"]["content"])
    if name == "responses":
        return "".join(part["text"] for item in body["output"] for part in item.get("content", []))
    if name == "anthropic":
        return "".join(block["text"] for block in body["content"])
    if name == "llama.cpp":
        return str(body["content"])
    return str(body["message"]["content"] if name == "ollama chat" else body["response"])


def said_by(body: dict[str, Any]) -> str:
    """The message of an error in any protocol."""
    error = body["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.full
def test_a_text_model_refuses_images_in_every_protocol(server: RunningServer) -> None:
    with server.http() as client:
        for name, (path, body) in requests_of(encoded(picture(8, 8)), "What is it?").items():
            reply = client.post(path, json=body)
            assert reply.status_code == 400, (name, reply.text)
            assert said_by(reply.json()).endswith(SENTENCE), (name, reply.text)


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    engine = {"model": str(gemma3_model().folder), "kernels": "native", "max_model_len": 256, "num_blocks": 200}
    with running_server(engine=engine) as running:
        yield running


@pytest.mark.full
def test_every_protocol_gives_the_answer_of_the_library(seeing: RunningServer) -> None:
    image, text = picture(70, 30, 4), "What is it?"
    content = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    with LLM(gemma3_model().folder, max_model_len=256, num_blocks=100) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        (output,) = llm.chat([{"role": "user", "content": content}], params)
    expected, length = output.outputs[0].text, len(output.prompt_token_ids)
    with seeing.http() as client:
        for name, (path, body) in requests_of(encoded(image), text).items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, (name, reply.text)
            assert answer_of(name, reply.json()).strip() == expected.strip(), name
            if name == "chat":
                assert reply.json()["usage"]["prompt_tokens"] == length
    seeing.wait_idle()


@pytest.mark.full
def test_a_branch_of_a_conversation_keeps_its_image(seeing: RunningServer) -> None:
    texts = set()
    with seeing.http() as client:
        for number in (3, 4):
            path, body = requests_of(encoded(picture(70, 30, number)), "What is it?")["chat"]
            expected = answer_of("chat", client.post(path, json=body).json()).strip()
            branch = client.post("/v1/branches", json={"messages": body["messages"]}).json()["id"]
            fork = client.post(f"/v1/branches/{branch}/fork", json={}).json()["data"][0]["id"]
            for name in (branch, fork):
                asked = {"temperature": 0, "max_tokens": LENGTH}
                reply = client.post(f"/v1/branches/{name}/generate", json={**asked, "receipt": True}).json()
                assert reply["choices"][0]["text"].strip() == expected
                assert len(reply["receipt"]["request"]["images"]) == 1
            scored = client.post(f"/v1/branches/{fork}/score", json={"continuations": ["a fox"]}).json()["data"][0]
            texts.add((expected, scored["total"]))
            for name in (branch, fork):
                client.delete(f"/v1/branches/{name}")
    assert len(texts) == 2
    seeing.wait_idle()


@pytest.mark.full
def test_conversations_with_images_survive_a_restart(tmp_path: Path) -> None:
    engine = {"model": str(gemma3_model().folder), "kernels": "native", "max_model_len": 256, "num_blocks": 200}
    place, asked = SnapshotSettings(str(tmp_path), 1 << 30), {"temperature": 0, "max_tokens": LENGTH}
    path, body = requests_of(encoded(picture(70, 30, 4)), "What is it?")["chat"]
    body |= {"session_id": "look", "pin": True}
    chat = path, body
    with running_server(engine=engine, snapshots=place) as server, server.http() as client:
        first = client.post(path, json=body).json()
        branch = client.post("/v1/branches", json={"messages": body["messages"]}).json()["id"]
        assert client.post("/v1/snapshots", json={"branch": branch, "id": "seen"}).status_code == 200
        path, body = requests_of(encoded(picture(70, 30, 3)), "And here?")["responses"]
        stored = client.post(path, json=body).json()["id"]
        follow = {"input": "More?", "previous_response_id": stored, "temperature": 0, "max_output_tokens": LENGTH}
        answer = answer_of("responses", client.post(path, json=follow).json())
        path, body = chat
        expected = client.post(f"/v1/branches/{branch}/generate", json=asked).json()["choices"][0]["text"]
    with running_server(engine=engine, snapshots=place) as server, server.http() as client:
        again = client.post(path, json=body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        assert answer_of("chat", again) == answer_of("chat", first)
    with running_server(engine=engine, snapshots=place) as server, server.http() as client:
        branch = client.post("/v1/snapshots/seen/restore", json={}).json()["id"]
        again = client.post("/v1/responses", json=follow).json()
        assert answer_of("responses", again) == answer
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= 32
        restored = client.post(f"/v1/branches/{branch}/generate", json=asked).json()
        assert restored["choices"][0]["text"] == expected
        assert restored["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.full
def test_a_tower_in_a_file_of_its_own(tmp_path: Path) -> None:
    """`mmproj` reaches the engine, the front ends, and the helper that decodes images."""
    model, image = gemma3_model(), encoded(picture(70, 30, 4))
    write_text(model, tmp_path / "text.gguf")
    (tmp_path / "towers").mkdir()
    write_tower(model, tmp_path / "towers" / "own.gguf", "gemma3", **{KEYS.Projector.SCALE_FACTOR: 2})
    engine = {"model": str(tmp_path / "text.gguf"), "kernels": "native", "max_model_len": 256, "num_blocks": 200}
    path, body = requests_of(image, "What is it?")["chat"]
    with LLM(model.folder, max_model_len=256, num_blocks=100) as llm:
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
                   {"type": "text", "text": "What is it?"}]  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        expected = llm.chat([{"role": "user", "content": content}], params)[0].outputs[0].text
    own = {**engine, "mmproj": str(tmp_path / "towers" / "own.gguf")}
    with running_server(engine=own, front_ends=2) as running, running.http() as client:
        for _ in range(4):
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            assert answer_of("chat", reply.json()).strip() == expected.strip()


@pytest.mark.full
def test_bad_images_get_named_errors(seeing: RunningServer) -> None:
    import PIL.Image

    png = base64.b64decode(encoded(picture(30, 30)))
    huge = bytearray(png)
    huge[16:24] = (50_000).to_bytes(4, "big") * 2  # the size in the header, and its checksum
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    svg = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()
    tiff = encoded(PIL.Image.new("RGB", (4, 4)), "TIFF")
    cases = {
        "truncated": (base64.b64encode(png[: len(png) // 2]).decode(), "the image is damaged"),
        "a bomb": (base64.b64encode(bytes(huge)).decode(), "50000 x 50000 pixels|is too large"),
        "SVG": (svg, "none of PNG, JPEG, WEBP, GIF"),
        "TIFF": (tiff, "none of PNG, JPEG, WEBP, GIF"),
        "no base64": ("!!!!", "is not base64"),
    }
    with seeing.http() as client:
        for name, (data, said) in cases.items():
            path, body = requests_of(data, "x")["chat"]
            reply = client.post(path, json=body)
            assert reply.status_code == 400, (name, reply.text)
            assert any(part in said_by(reply.json()) for part in said.split("|")), (name, reply.text)
        for url in ("http://127.0.0.1:1/cat.png", "file:///etc/passwd", "data:text/html;base64,AAAA"):
            reply = client.post("/v1/chat/completions", json=user({"type": "image_url", "image_url": url}))
            assert reply.status_code == 400
            assert "pass the image itself" in said_by(reply.json())
        mark = user({"type": "text", "text": "<start_of_image>"})  # spelled by a client: no place for an image
        assert client.post("/v1/chat/completions", json={**mark, "max_tokens": 1}).status_code == 200
    seeing.wait_idle()


def results_of(data: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """(Path, body) of conversations in which a tool answers with a text and an image."""
    source = {"type": "base64", "media_type": "image/png", "data": data}
    calls = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}, {"type": "tool_use", "id": "b", "name": "f",
                                                                          "input": {}}]  # fmt: skip
    image = {"type": "image", "source": source}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, image]},
        {"type": "tool_result", "tool_use_id": "b", "content": "nothing"},
        {"type": "text", "text": "What is it?"},
    ]
    anthropic = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": calls},
                 {"role": "user", "content": results}]  # fmt: skip
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    url = f"data:image/png;base64,{data}"
    items = [
        {"type": "message", "role": "user", "content": "Look"}, {**call, "call_id": "a"}, {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": [
            {"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": url, "detail": "auto"}]},
        {"type": "function_call_output", "call_id": "b", "output": "nothing"},
        {"type": "message", "role": "user", "content": "What is it?"},
    ]  # fmt: skip
    return {
        "anthropic": ("/v1/messages", {"messages": anthropic, "model": "tiny", "temperature": 0, "max_tokens": LENGTH}),
        "responses": ("/v1/responses", {"input": items, "temperature": 0, "max_output_tokens": LENGTH}),
    }


@pytest.mark.full
def test_images_in_results_of_tools_are_shown_by_the_user(seeing: RunningServer, server: RunningServer) -> None:
    """Behind all results, in front of the text of the user; a text model refuses them."""
    image = picture(70, 30, 4)
    data = encoded(image)
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "seen"},
        {"role": "tool", "content": "nothing"},
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]},
    ]
    with LLM(gemma3_model().folder, max_model_len=256, num_blocks=100) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        (output,) = llm.chat(messages, params)
    with seeing.http() as client, server.http() as blind:
        for name, (path, body) in results_of(data).items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, (name, reply.text)
            assert answer_of(name, reply.json()).strip() == output.outputs[0].text.strip(), name
            usage = reply.json()["usage"]
            assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == len(output.prompt_token_ids)
            reply = blind.post(path, json=body)
            assert reply.status_code == 400, (name, reply.text)
            assert said_by(reply.json()).endswith(SENTENCE), (name, reply.text)
        path, body = results_of(data)["responses"]
        last = client.post(path, json={**body, "input": body["input"][:-1]})  # the results are the end
        assert last.status_code == 200, last.text
    seeing.wait_idle()


@pytest.mark.full
def test_a_model_says_that_it_reads_images(seeing: RunningServer, server: RunningServer) -> None:
    for running, reads in ((seeing, True), (server, False)):
        with running.http() as client:
            assert ("vision" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]) is reads
            props = client.get("/props").json()
            assert (props["modalities"]["vision"], props["media_marker"]) == (reads, "<__media__>")
            assert client.get("/v1/models").json()["data"][0]["reads_images"] is reads


@pytest.mark.full
def test_places_of_media_are_counted(seeing: RunningServer) -> None:
    data = encoded(picture(8, 8))
    with seeing.http() as client:
        for text, count in (("no place", 0), ("<__media__> and <__media__>", 2)):
            prompt = {"prompt_string": text, "multimodal_data": [data]}
            reply = client.post("/completion", json={"prompt": prompt, "n_predict": 1})
            assert reply.status_code == 400
            said = f"the prompt has {count} places for images and 1 were passed: write '<__media__>' once"
            assert said in said_by(reply.json())
