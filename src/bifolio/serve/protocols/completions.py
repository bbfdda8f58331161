"""`/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sized
from dataclasses import dataclass, field

import msgspec

from bifolio.errors import RequestError
from bifolio.logprob_records import TokenLogprob
from bifolio.serve.http.auth import Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.events import Event, TextEvents
from bifolio.serve.http.generation import Job, News, Piece, Run, Scores
from bifolio.serve.http.sampling import ending_at, engine_params, resolve_strings
from bifolio.serve.http.token_text import TokenTexts
from bifolio.serve.http.whole_answers import Answer, Whole
from bifolio.serve.protocols.openai_answers import Completion, CompletionChoice, CompletionLogprobs, Usage
from bifolio.serve.protocols.openai_types import CompletionRequest
from bifolio.serve.views.steps import watched_steps

LOWEST = -9999.0  # JSON has no infinity
Prompts = list[tuple[str | None, list[int]]]


@dataclass(slots=True)
class CompletionCall:
    """One request, and the shapes of its answer."""

    context: ServerContext
    request: CompletionRequest
    prompts: Prompts
    job: Job
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _offsets: dict[int, int] = field(default_factory=dict)  # choice → characters of its text so far

    # -- whole -------------------------------------------------------------------------------------------------------
    def whole(self, whole: Whole, usage: Usage) -> Completion:
        choices = []
        for index, answer in whole.choices():
            number = index // self.job.num_choices
            choices.append(self._choice(index, number, answer, whole.prompt_logprobs[number]))
        return self._completion(choices, usage)

    def _choice(
        self, index: int, number: int, answer: Answer, prompt_logprobs: list[TokenLogprob | None] | None
    ) -> CompletionChoice:
        request = self.request
        prefix = self._prompt_text(number) if request.echo else ""
        scored = list(answer.logprobs)
        if request.echo and prompt_logprobs is not None:
            scored = [*self._prompt_scores(number, prompt_logprobs), *scored]
        choice = CompletionChoice(
            index,
            prefix + answer.text,
            self._logprobs(scored, 0) if request.logprobs is not None else None,
            answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        if request.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = answer.token_ids, self.prompts[number][1]
        if request.beam_search is not None:
            choice.beam = answer.beam()
        return choice

    def _completion(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(self.id, "text_completion", self.created, self.job.model, choices, usage)

    # -- in pieces -----------------------------------------------------------------------------------------------------
    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        """Chunks for a stream, all that are ready at a time; the usage comes last where it was asked for."""
        wants_usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        usage: msgspec.UnsetType | None = None if wants_usage else msgspec.UNSET
        template = TextEvents(self._completion([CompletionChoice(0, "")], usage), b'"text":""')
        while batch := await run.next():
            events: list[Event] = []
            for news in batch:
                update, first = news.update, news.number * self.job.num_choices
                steps = watched_steps(update, first, self.context.texts)
                if steps is not None:
                    events.append(msgspec.structs.replace(self._completion([], usage), steps=steps))
                if news.prompt_logprobs is not None or (self.request.echo and update.num_cached_tokens is not None):
                    echoed = self._echoed(news)
                    events += [self._completion([chunk], usage) for chunk in echoed]
                for piece in news.pieces:
                    index = first + piece.index
                    if index == 0 and self._is_plain(piece):
                        events.append(template.event(piece.text))
                    else:
                        events.append(self._completion([self._chunk(index, piece)], usage))
            yield events
        if wants_usage:
            yield [self._completion([], run.usage())]

    def _is_plain(self, piece: Piece) -> bool:
        """Whether a chunk has text alone."""
        request = self.request
        is_text = piece.finish_reason is None and request.logprobs is None and not request.return_token_ids
        return is_text and not self.job.params.drop_output

    def _chunk(self, index: int, piece: Piece) -> CompletionChoice:
        answer = Answer()
        answer.add(piece)
        if self.job.params.drop_output:
            answer = Answer(finish_reason="length")
        chunk = CompletionChoice(index, answer.text, None, answer.finish_reason)
        if answer.finish_reason is not None:
            chunk.stop_reason = answer.stop_reason
        if self.request.logprobs is not None:
            chunk.logprobs = self._logprobs(answer.logprobs, self._offsets.get(index, 0))
            self._offsets[index] = self._offsets.get(index, 0) + sum(map(len, chunk.logprobs.tokens))
        if self.request.return_token_ids:
            chunk.token_ids = answer.token_ids
        if self.request.beam_search is not None and answer.finish_reason is not None:
            chunk.beam = answer.beam()
        return chunk

    def _echoed(self, news: News) -> list[CompletionChoice]:
        if not self.request.echo:
            return []
        number, prompt_logprobs, chunks = news.number, news.prompt_logprobs, []
        found = [piece.index for piece in news.pieces]  # all texts of a beam search, which may be fewer than n
        for offset in found if self.job.params.is_beam_search else range(self.job.num_choices):
            index = number * self.job.num_choices + offset
            chunk = CompletionChoice(index, self._prompt_text(number))
            if self.request.logprobs is not None and prompt_logprobs is not None:
                chunk.logprobs = self._logprobs(self._prompt_scores(number, prompt_logprobs), 0)
                self._offsets[index] = sum(map(len, chunk.logprobs.tokens))
            chunks.append(chunk)
        return chunks

    # -- details -------------------------------------------------------------------------------------------------------
    def _prompt_text(self, number: int) -> str:
        text, tokens = self.prompts[number]
        if text is not None:
            return text
        tokenizer = self.context.model.tokenizer
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)

    def _prompt_scores(self, number: int, scores: list[TokenLogprob | None]) -> Scores:
        """The first token of a prompt has no logprob (NaN here), but it is a token all the same."""
        tokens = self.prompts[number][1]
        return [
            TokenLogprob(token, float("nan"), 0) if score is None else score
            for token, score in zip(tokens, scores, strict=True)
        ]

    def _logprobs(self, scored: Scores, offset: int) -> CompletionLogprobs:
        return completion_logprobs(scored, offset, self.context.texts, wants_top=bool(self.request.logprobs))


def completion_logprobs(scored: Scores, offset: int, texts: TokenTexts, wants_top: bool) -> CompletionLogprobs:
    """OpenAI's four lists; `offset` is where the first token begins in the text."""
    result = CompletionLogprobs([], [], [] if wants_top else None, [])
    for item in scored:
        logprob, text = item.logprob, texts.text(item.token_id)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(text)
        unknown = logprob != logprob
        result.token_logprobs.append(None if unknown else max(logprob, LOWEST))
        if result.top_logprobs is not None:
            result.top_logprobs.append(None if unknown else _top(item, texts))
    return result


def _top(item: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """By text; of tokens that look the same the most likely counts. The drawn token is always among them."""
    found: dict[str, float] = {}
    for rival, value in [*item.top, (item.token_id, item.logprob)]:
        found.setdefault(texts.text(rival), max(value, LOWEST))
    return found


async def prepare(
    context: ServerContext, request: CompletionRequest, tenant: Tenant, prompt_logprobs: int | None = None
) -> CompletionCall:
    """Check a request and turn it into a job."""
    context.check_model(request.model)
    if request.stream and request.best_of is not None and request.best_of > request.n:
        raise bad_request(
            "best_of chooses among finished texts, so it cannot be streamed: leave out best_of or stream", "best_of"
        )
    if request.suffix and request.echo:
        raise bad_request("echo repeats a prompt that the output follows, which has no suffix: leave one out", "echo")
    if request.beam_search is not None and request.best_of is not None:
        raise bad_request("best_of has no meaning in a beam search: leave it out", "best_of")
    prompts = await read_prompts(context, request.prompt, request.add_special_tokens, request.suffix or None)
    scores_prompt = request.echo and request.logprobs is not None
    params = engine_params(
        request,
        context.model.generation_config,
        max_tokens=request.max_tokens if request.max_tokens is not None else 16,
        logprobs=request.logprobs,
        best_of=request.best_of,
        prompt_logprobs=request.logprobs if scores_prompt else prompt_logprobs,
    )
    if request.suffix:
        params = ending_at(params, context.model.require_infill().ends)
    params = await resolve_strings(context, params)
    if params.grammar is not None:
        await context.grammars.require(*params.grammar, tenant.share)
    drawn = request.beam_search.width if request.beam_search else request.best_of or request.n
    if len(prompts) * drawn > context.limits.max_sequences:
        raise bad_request(
            f"{len(prompts)} prompts × {drawn} completions are too many for one request: send several requests",
            "prompt",
        )
    context.check_scored([tokens for _, tokens in prompts], drawn, params)
    job = Job.of(context, request, tenant, [tokens for _, tokens in prompts], params, drawn)
    return CompletionCall(context, request, prompts, job)


async def read_prompts(
    context: ServerContext,
    prompt: str | list[str | int | list[int]],
    add_special_tokens: bool,
    suffix: str | None = None,
) -> Prompts:
    """A text, token ids, or a list of either → (text, token ids) of each; with a suffix, of a prompt with a gap."""
    parts: list[str | list[int]]
    most = context.limits.max_prompts
    if prompt == []:
        raise bad_request("the prompt has no tokens: pass at least one", "prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        _check_length(context, prompt)
    elif isinstance(prompt, list) and len(prompt) > most:
        raise bad_request(f"{len(prompt)} prompts are too many: send at most {most} in a request", "prompt")
    if isinstance(prompt, str):
        parts = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        parts = [prompt]  # type: ignore[list-item]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        parts = prompt  # type: ignore[assignment]
    else:
        raise bad_request("prompt must be a text, a list of texts, token ids, or a list of lists of them", "prompt")
    vocab = context.model.config.vocab_size
    for part in parts:
        if isinstance(part, list):
            _check_length(context, part)
        if not isinstance(part, str) and part and not 0 <= min(part) <= max(part) < vocab:
            raise bad_request(f"token ids lie between 0 and {vocab - 1}", "prompt", "invalid_token_id")
    if suffix is not None:
        return await _with_gaps(context, parts, suffix, add_special_tokens)
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(await encode(context, texts, add_special_tokens))
    return [(part, next(encoded)) if isinstance(part, str) else (None, part) for part in parts]


async def _with_gaps(
    context: ServerContext, parts: list[str | list[int]], suffix: str, add_special_tokens: bool
) -> Prompts:
    """The prompts as texts with a gap before the suffix."""
    try:
        infill = context.model.require_infill()
    except RequestError as error:
        raise bad_request(str(error), "suffix") from error
    pool, longest = context.tokenizers, context.max_model_len

    def work() -> list[list[int]]:
        for text in (suffix, *(part for part in parts if isinstance(part, str))):
            pool.check_fits(text, longest)
        return [infill.prompt(pool.tokenizer, part, suffix, add_special_tokens=add_special_tokens) for part in parts]

    found = await pool.run(work, sum(len(part) + len(suffix) for part in parts))
    return [(part if isinstance(part, str) else None, ids) for part, ids in zip(parts, found, strict=True)]


def _check_length(context: ServerContext, token_ids: Sized) -> None:
    """Refuse token ids that cannot fit before they are looked at or sent to the engine."""
    if len(token_ids) > context.max_model_len:
        raise ApiError(
            400,
            f"the prompt has {len(token_ids)} tokens and the model takes {context.max_model_len}: shorten it",
            "context_length_exceeded",
            param="prompt",
        )


async def encode(context: ServerContext, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """Token ids of prompts; those that cannot fit into the context are refused before they are tokenised."""
    if not texts:
        return []
    return await context.tokenizers.encode(texts, add_special_tokens, context.max_model_len)
