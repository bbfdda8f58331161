"""LiteLLM, LangChain and LlamaIndex against one server; each is skipped where it is not installed."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from serving import RunningServer

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it fetches a list of prices at its import
USER: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "How is it there?",
                                                         "parameters": SCHEMA}}  # fmt: skip
FORCED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.full
def test_litellm(server: RunningServer) -> None:
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # newer versions import it when a request has tools
    base: dict[str, Any] = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "none",
                            "max_tokens": 8, "temperature": 0, "timeout": 60}  # fmt: skip
    whole = litellm.completion(messages=USER, **base)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens <= 8
    chunks = list(litellm.completion(messages=USER, stream=True, **base))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    for extra in ({"top_p": 0.9}, {"seed": 5, "temperature": 1}, {"stop": ["zz"]}, {"n": 2}, {"logprobs": True},
                  {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"user": "me"}):  # fmt: skip
        answer = litellm.completion(messages=USER, **{**base, **extra})
        assert len(answer.choices) == extra.get("n", 1)
    called = litellm.completion(messages=USER, tools=[TOOL], tool_choice=FORCED, **{**base, "max_tokens": 100})
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    pieces = list(
        litellm.completion(messages=USER, tools=[TOOL], tool_choice=FORCED, stream=True, **{**base, "max_tokens": 100})
    )
    rebuilt = litellm.stream_chunk_builder(pieces, messages=USER)
    assert rebuilt.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    answer = litellm.completion(messages=USER, response_format=form, **{**base, "max_tokens": 60})
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")
    assert asyncio.run(litellm.acompletion(messages=USER, **base)).choices[0].message.content == text
    completed = litellm.text_completion(prompt="Once", **{**base, "model": "text-completion-openai/tiny"})
    assert completed.choices[0].text
    options = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "none"}
    assert len(litellm.embedding(input=["a", "b"], encoding_format="float", **options).data) == 2
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=USER, **{**base, "model": "openai/other"})
    local = {**base, "model": "anthropic/tiny", "api_base": server.url}
    assert litellm.completion(messages=USER, **local).choices[0].message.content == text


@pytest.mark.full
def test_langchain(server: RunningServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    options: dict[str, Any] = {"model": "tiny", "base_url": server.url + "/v1", "api_key": "none", "temperature": 0,
                               "max_tokens": 8}  # fmt: skip
    model = langchain.ChatOpenAI(**options)
    text = model.invoke("Hello").content
    assert text
    assert "".join(chunk.content for chunk in model.stream("Hello")) == text
    assert [answer.content for answer in model.batch(["Hello", "Hello"])] == [text, text]
    assert asyncio.run(model.ainvoke("Hello")).content == text
    for messages in ([("system", "Be kind."), ("user", "Hello")], [("user", "a"), ("assistant", "b"), ("user", "c")]):
        assert model.invoke(messages).usage_metadata["output_tokens"] <= 8
    for extra in ({"stop": ["zz"]}, {"seed": 3}, {"top_p": 0.9}, {"logprobs": True}):
        assert model.bind(**extra).invoke("Hello").response_metadata["model_name"] == "tiny"
    roomy = langchain.ChatOpenAI(**{**options, "max_tokens": 100})
    bound = roomy.bind_tools([TOOL], tool_choice="weather")
    (call,) = bound.invoke("Hello").tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")
    gathered = None
    for chunk in bound.stream("Hello"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert gathered.tool_calls[0]["args"] == call["args"]
    structured = roomy.with_structured_output({"title": "City", **SCHEMA}, method="json_schema")
    assert structured.invoke("Hello")["city"] in ("Rome", "Oslo")
    assert langchain.OpenAI(**options).invoke("Once")
    vectors = langchain.OpenAIEmbeddings(
        model="tiny", base_url=server.url + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert len(vectors.embed_documents(["a", "b"])) == 2
    assert langchain.ChatOpenAI(**options, use_responses_api=True).invoke("Hello").text


@pytest.mark.full
def test_llama_index(server: RunningServer) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    options: dict[str, Any] = {"model": "tiny", "api_base": server.url + "/v1", "api_key": "none", "temperature": 0.0,
                               "max_tokens": 8, "context_window": 512}  # fmt: skip
    chat = like.OpenAILike(**options, is_chat_model=True, is_function_calling_model=True)
    plain = like.OpenAILike(**options, is_chat_model=False)
    messages = [ChatMessage(role="user", content="Hello")]
    text = chat.chat(messages).message.content
    assert text
    assert "".join(part.delta for part in chat.stream_chat(messages)) == text
    assert asyncio.run(chat.achat(messages)).message.content == text
    once = plain.complete("Once").text
    assert once
    assert "".join(part.delta for part in plain.stream_complete("Once")) == once
    assert asyncio.run(plain.acomplete("Once")).text == once
    for history in (
        [ChatMessage(role="system", content="Be kind."), *messages],
        [*messages, ChatMessage(role="assistant", content="Hi."), *messages],
    ):
        assert chat.chat(history).message.content
    for extra in ({"top_p": 0.9}, {"seed": 4}, {"stop": ["zz"]}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}):
        assert chat.chat(messages, **extra).message.content

    def weather(city: str) -> str:
        """How is it there?"""
        return city

    tool = FunctionTool.from_defaults(fn=weather)
    roomy = like.OpenAILike(**{**options, "max_tokens": 120}, is_chat_model=True, is_function_calling_model=True)
    shown = roomy.chat_with_tools([tool], user_msg="Hello")
    assert shown.message is not None
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    answer = roomy.chat(messages, response_format=form)
    assert json.loads(answer.message.content)["city"] in ("Rome", "Oslo")
