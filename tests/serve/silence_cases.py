"""Requests in which fields are probed: several for each path, because some fields mean something only beside others."""

from __future__ import annotations

from typing import Any

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"schema": CITY}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": "", "reasoning_content": "Ask.",
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    {"role": "user", "content": "Now?"},
]  # fmt: skip
ANTHROPIC_MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Ask.", "signature": "s"},
                                      {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "x"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1",
                                  "content": [{"type": "text", "text": "Rain."}]}]},
    {"role": "user", "content": "Now?"},
]  # fmt: skip
ANTHROPIC_TOOL = {"name": "weather", "description": "The weather.", "input_schema": CITY}
OLLAMA_MESSAGES = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "thinking": "Ask.",
     "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "x"}}}]},
    {"role": "tool", "content": "Rain.", "tool_name": "weather"},
    {"role": "user", "content": "Now?"},
]  # fmt: skip
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Ask."}],
     "summary": [{"type": "summary_text", "text": "Asked."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Asked."}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "Rain."}]},
    {"type": "message", "role": "user", "content": "Now?"},
]  # fmt: skip
RESPONSES_TOOL = {"type": "function", "name": "weather", "description": "The weather.", "parameters": CITY}
GREEDY = {"temperature": 0.0, "max_tokens": 2}
OPTIONS = {"options": {"temperature": 0.0, "num_predict": 2}, "stream": False}
CHAT = {"messages": [{"role": "user", "content": "Now?"}], **GREEDY}
CPP = {"n_predict": 2, "temperature": 0.0}
RERANKS: list[dict[str, Any]] = [
    {"query": "Once", "documents": ["Once upon a time", "The fox"]},
    {"query": "Once", "texts": ["Once upon a time", "The fox"]},
    {"query": "Once", "documents": ["Once upon a time " * 400], "truncate": True},
]
SCORES: list[dict[str, Any]] = [{"text_1": "Once", "text_2": "Once upon a time"}]
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Once", **GREEDY},
        {"prompt": "Once", **GREEDY, "stream": True},
        {"prompt": "Once", **GREEDY, "response_format": SCHEMA_FORMAT},
        {"prompt": "Once", "max_tokens": 2, "beam_search": {"width": 2}},
    ],
    "/v1/chat/completions": [
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], **GREEDY},
        {**CHAT, "stream": True},
        {**CHAT, "response_format": SCHEMA_FORMAT},
        {**CHAT, "logprobs": True},
        {**CHAT, "tools": [TOOL], "tool_choice": "required"},
        {"messages": CHAT["messages"], "max_tokens": 2, "beam_search": {"width": 2}},
    ],
    "/v1/embeddings": [{"input": "Once"}, {"input": "Once upon a time"}],
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RERANKS),
    **dict.fromkeys(("/v1/score", "/score"), SCORES),
    "/pooling": [{"input": "Once upon a time"}],
    "/embed": [{"inputs": "Once upon a time"}, {"inputs": "Once upon a time " * 400, "truncate": True}],
    "/api/embeddings": [{"model": "", "prompt": "Once"}],
    "/tokenize": [{"prompt": "Once"}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [0, 70, 80]}],
    "/v1/messages": [
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], **GREEDY},
        {"model": "", "messages": ANTHROPIC_MESSAGES, "tools": [ANTHROPIC_TOOL], **GREEDY},
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], "tools": [ANTHROPIC_TOOL],
         "tool_choice": {"type": "any"}, **GREEDY},
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], "tools": [ANTHROPIC_TOOL],
         "tool_choice": {"type": "tool", "name": "weather"}, **GREEDY},
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], "thinking": {"type": "enabled"}, **GREEDY},
    ],
    "/v1/messages/count_tokens": [
        {"model": "", "messages": ANTHROPIC_MESSAGES, "tools": [ANTHROPIC_TOOL]},
        {"model": "", "messages": [{"role": "user", "content": "Now?"}]},
    ],
    "/v1/responses": [
        {"input": "Now?", "temperature": 0.0, "max_output_tokens": 2},
        {"input": ITEMS, "tools": [RESPONSES_TOOL], "temperature": 0.0, "max_output_tokens": 2},
        {"input": "Now?", "tools": [RESPONSES_TOOL], "tool_choice": "required", "temperature": 0.0,
         "max_output_tokens": 2},
        {"input": "Now?", "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY}},
         "temperature": 0.0, "max_output_tokens": 2},
    ],
    "/api/generate": [
        {"model": "", "prompt": "Once", **OPTIONS},
        {"model": "", "prompt": "Once", "raw": True, **OPTIONS},
        {"model": "", "prompt": "Once", "logprobs": True, **OPTIONS},
    ],
    "/api/chat": [
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], **OPTIONS},
        {"model": "", "messages": OLLAMA_MESSAGES, "tools": [TOOL], **OPTIONS},
        {"model": "", "messages": [{"role": "user", "content": "Now?"}], "logprobs": True, **OPTIONS},
    ],
    "/api/embed": [{"model": "", "input": "Once"}, {"model": "", "input": "Once upon a time " * 400}],
    "/api/show": [{"model": ""}, {}],
    "/api/pull": [{"model": "", "stream": False}, {"stream": False}],
    "/completion": [
        {"prompt": "Once", **CPP},
        {"prompt": "Once", "repeat_penalty": 1.5, "dry_multiplier": 0.5, **CPP},
        {"prompt": "Once", **CPP, "stream": True},
        {"prompt": "Once", **CPP, "lora": [{"id": 0, "scale": 0.25}]},
    ],
    "/infill": [
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "Once"}], **CPP},
        {"input_prefix": "a", "input_suffix": "b", "repeat_penalty": 1.5, "dry_multiplier": 0.5, **CPP},
        {"input_prefix": "a", "input_suffix": "b", **CPP, "stream": True},
        {"input_prefix": "a", "input_suffix": "b", **CPP, "lora": [{"id": 0, "scale": 0.25}]},
    ],
}  # fmt: skip
