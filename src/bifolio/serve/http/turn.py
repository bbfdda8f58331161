"""One turn of a conversation, by any protocol: from a chat request to a job, and the reader of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bifolio.api.messages import Thinking
from bifolio.images import PromptImage
from bifolio.serve.helpers.helper_messages import KILLED, Failed, Render
from bifolio.serve.http.auth import Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.generation import Job
from bifolio.serve.http.images import image_urls, read_pictures, with_places, with_texts
from bifolio.serve.http.sampling import engine_params, resolve_strings
from bifolio.serve.http.tools import ToolPlan, marker_ids, plan_tools
from bifolio.serve.protocols.openai_types import ChatRequest, Message
from bifolio.text.reasoning import PlainReader, ReasoningFormat, ReasoningReader, reasoning_format
from bifolio.text.roles import Placeholders
from bifolio.text.strict_json import strict_text
from bifolio.text.tools.events import AnswerReader

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "template", "special_tokens"})
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
HARMONY_MARKS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")
HARMONY_FORCED = "<|end|><|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class History:
    """An earlier turn of the conversation, whose tokens are continued if the prompt begins with its text."""

    text: str
    token_ids: list[int]
    request_id: str  # of the engine, whose blocks may be kept


@dataclass(slots=True)
class Turn:
    """A prepared chat request."""

    context: ServerContext
    request: ChatRequest
    tools: ToolPlan
    job: Job
    reasoning: ReasoningFormat | None = None  # None: the answer has no marked reasoning
    is_open: bool = False  # the prompt ends inside the reasoning
    rendered: str = ""  # the prompt

    def reader(self) -> AnswerReader:
        """A new reader of one answer."""
        inner = self.tools.reader() or PlainReader()
        if self.reasoning is None or not self.request.separate_reasoning:
            return inner
        return ReasoningReader(self.reasoning, self.is_open, inner)

    def num_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Tokens of an answer up to the end of its reasoning, marks included; 0 if it has none."""
        marks = HARMONY_MARKS if self.tools.has_channels else self.reasoning
        if marks is None:
            return 0
        tokenizer = self.context.tokenizers.tokenizer
        opening, closing = (tokenizer.encode(text, add_special_tokens=False) for text in (marks.opening, marks.closing))
        if not self.is_open and token_ids[: len(opening)] != opening:
            return 0
        for start in range(len(token_ids) - len(closing) + 1):
            if token_ids[start : start + len(closing)] == closing:
                return start + len(closing)
        return len(token_ids)


async def prepare(context: ServerContext, request: ChatRequest, tenant: Tenant, history: History | None = None) -> Turn:
    """Check a request and turn it into a job."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    tools = plan_tools(request, context.model)
    pictures = await read_pictures(context, image_urls(request.messages), tenant)
    rendered = with_texts(context, await render(context, request, tools, tenant), pictures)
    prompt = await _prompt_tokens(context, rendered, history)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = engine_params(
        request,
        context.model.sampling_defaults,
        max_tokens=limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    if tools.grammar is not None:
        if params.grammar is not None:
            raise bad_request("a tool call and a response_format cannot both be enforced", "tool_choice")
        params = replace(params, grammar=("tools", tools.grammar))
    drawn = request.beam_search.width if request.beam_search else request.n
    params = await resolve_strings(context, params)
    if params.grammar is not None:
        await context.grammars.require(*params.grammar, tenant.share)
    context.check_scored([prompt], drawn, params)
    job = Job.of(context, request, tenant, [prompt], params, drawn)
    job.images = with_places(context, prompt, pictures)
    job.parent = "" if history is None else history.request_id
    tail = rendered[-1][0] if rendered else ""
    turn = Turn(context, request, tools, job, rendered="".join(text for text, _ in rendered))
    return _with_reasoning(turn, tail)


async def _prompt_tokens(
    context: ServerContext, rendered: list[tuple[str, bool]], history: History | None
) -> list[int]:
    """Token ids of a rendered conversation; those of an earlier turn are taken over where its text is the beginning."""
    known: list[int] = []
    if history is not None and "".join(text for text, _ in rendered).startswith(history.text):
        known, rendered = history.token_ids, _behind(rendered, len(history.text))
    return [*known, *await context.tokenizers.encode_parts(rendered, context.max_model_len)]


def _behind(parts: list[tuple[str, bool]], start: int) -> list[tuple[str, bool]]:
    """The parts after the first `start` characters. A literal that is cut in the middle stays plain text."""
    found = []
    for text, is_literal in parts:
        if start < len(text):
            found.append((text[start:], is_literal))
        start = max(start - len(text), 0)
    return found


def _with_reasoning(turn: Turn, tail: str) -> Turn:
    """Add the marks of reasoning in the answer to a prompt with this end, and its limit for the engine."""
    context, request, job = turn.context, turn.request, turn.job
    is_harmony = turn.tools.has_channels
    known = HARMONY_MARKS if is_harmony else reasoning_format(context.model.chat_template)
    markers = () if turn.tools.format is None else turn.tools.format.markers
    if known is not None and not is_harmony:
        turn.reasoning, turn.is_open = known, known.is_open(tail)
        markers = (*markers, *known.markers)
    job.kept_tokens = frozenset(marker_ids(context.model, markers).values())
    if known is None:
        if request.thinking_budget is not None:
            raise bad_request(
                "the chat template of this model has no reasoning to limit: leave thinking_budget out",
                "thinking_budget",
            )
        return turn
    has_grammar = job.params.grammar is not None
    is_closed = tail.rstrip().endswith(known.closing)
    if is_harmony and has_grammar:
        if request.thinking_budget is not None:
            raise bad_request("this model takes either a thinking_budget or an enforced format", "thinking_budget")
    elif not is_closed and (has_grammar or request.thinking_budget is not None):
        tokenizer = context.tokenizers.tokenizer
        opening, closing, forced = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in ("" if turn.is_open else known.opening, known.closing,
                         HARMONY_FORCED if is_harmony else f"{known.closing}\n\n")
        )  # fmt: skip
        job.thinking = Thinking(opening, closing, forced, request.thinking_budget)
    return turn


async def chat_tokens(context: ServerContext, request: ChatRequest, tools: ToolPlan, tenant: Tenant) -> list[int]:
    """Token ids of the conversation in the model's own form."""
    return (await chat_prompt(context, request, tools, tenant))[0]


async def chat_prompt(
    context: ServerContext, request: ChatRequest, tools: ToolPlan, tenant: Tenant
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The tokens and images of a conversation; special tokens come from the template alone."""
    pictures = await read_pictures(context, image_urls(request.messages), tenant)
    rendered = with_texts(context, await render(context, request, tools, tenant), pictures)
    tokens = await context.tokenizers.encode_parts(rendered, context.max_model_len)
    return tokens, with_places(context, tokens, pictures)


async def render(
    context: ServerContext, request: ChatRequest, tools: ToolPlan, tenant: Tenant
) -> list[tuple[str, bool]]:
    """The rendered conversation: (text, whether a client spelled a special token) one after the other."""
    variables = _variables(request, tools)
    if RESERVED & variables.keys():
        raise bad_request(f"chat_template_kwargs may not set {sorted(RESERVED)}", "chat_template_kwargs")
    for name in variables:
        if not name.isidentifier():
            raise bad_request(f"chat_template_kwargs has {name!r}: pass a name of a variable", "chat_template_kwargs")
    messages = [as_template_message(message) for message in request.messages]
    if context.model.chat_template is None:
        raise bad_request("this model has no chat template: use /v1/completions", "messages", "chat_template")
    placeholders = Placeholders(context.tokenizers.tokenizer.special_tokens)
    task = Render(
        placeholders.protect(messages),
        placeholders.protect(tools.shown),
        request.add_generation_prompt,
        placeholders.protect(dict(variables)),
    )
    outcome = await context.templates.ask(task, tenant.share)
    if isinstance(outcome, Failed):
        slow = outcome.kind == KILLED
        message = "the chat template takes too much time or memory: send shorter messages" if slow else outcome.message
        raise bad_request(message, "messages", "chat_template")
    return placeholders.parts(outcome.text)


def _variables(request: ChatRequest, tools: ToolPlan) -> Mapping[str, Any]:
    """Variables of the template: those of the client, and the effort under the names that templates know."""
    effort = request.reasoning_effort
    if effort is None:
        return request.chat_template_kwargs or {}
    return {
        "reasoning_effort": HARMONY_EFFORTS.get(effort, effort) if tools.has_channels else effort,
        "enable_thinking": effort != "none",
        "thinking": effort != "none",
        **(request.chat_template_kwargs or {}),
    }


def as_template_message(message: Message) -> dict[str, Any]:
    """As templates expect it: text as one string, arguments of calls as objects."""
    content: str | list[dict[str, Any]] | None
    if not isinstance(message.content, list):
        content = message.content
    elif all(part.type == "text" for part in message.content):
        content = "".join(part.text or "" for part in message.content)
    else:
        content = [
            {"type": "text", "text": part.text or ""} if part.type == "text" else {"type": "image"}
            for part in message.content
        ]
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = result["thinking"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return result


def _arguments(text: str) -> Any:
    try:
        return json.loads(strict_text(text))
    except (ValueError, RecursionError):
        return text
