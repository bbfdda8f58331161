"""Requests: validation against the model and the configuration, and creation of their sequences.

Whether a request can be served depends on the request, the model and the configuration, not on other requests (except
for its id, which must be unused). So an invalid request is rejected here, before any state changes.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from dataclasses import replace
from itertools import count
from typing import Unpack

from bifolio.beam_params import BeamSearchParams
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.sharing import BeamSearchBlockSharing, BlockShareManager
from bifolio.config import EngineConfig
from bifolio.engine.beam.search import BeamSearch
from bifolio.engine.pooling import pooled_result
from bifolio.errors import EmptyPromptError, PromptTooLongError, RequestError, TokenIdError
from bifolio.images import ONE_PROCESS, TEXT_ONLY, VECTORS_OF_TEXT
from bifolio.long_rope import longest_output, rope_of_request
from bifolio.model.loaded import TextModel
from bifolio.pooling_params import PoolingParams
from bifolio.sampling.weights import child_seed
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import LogprobRecords, Request, RequestOptions, Sequence
from bifolio.text.reader import TextReader
from bifolio.text.stopping import StopChecker, TokenStops

NO_OUTPUT = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)  # of requests for vectors and scores


class RequestFactory:
    """Creates the requests of one engine and numbers them in order of arrival."""

    def __init__(
        self,
        model: TextModel,
        config: EngineConfig,
        blocks: KVCacheBlockManager,
        running: Mapping[str, Request],  # the engine's unfinished requests, read for their ids
        reads_images: bool = False,
    ) -> None:
        self._model = model
        self._config = config
        self._blocks = blocks
        self._running = running
        self._reads_images = reads_images
        self._numbers = count()  # order of arrival

    def new_request(
        self,
        request_id: str,
        prompt_token_ids: Sequences[int],
        own: SamplingParams | BeamSearchParams | PoolingParams,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A valid request with its sequences; raises a `RequestError` that says why it cannot be served."""
        known = as_token_ids(prompt_token_ids)
        if isinstance(own, PoolingParams):
            return self._pooled_request(request_id, known, own, options)
        params = own.sampling if isinstance(own, BeamSearchParams) else own
        self._model.check_generates()
        self._check(request_id, known, params)
        if options.get("images") and not self._reads_images:
            raise RequestError(TEXT_ONLY if self._model.vision is None else ONE_PROCESS)
        given = _checked_given(options.get("num_given", 0), known, own)
        room, count = self._config.max_model_len - len(known), len(known)
        most = longest_output(self._model.config, count, params.max_tokens)
        new_tokens, rope = room if most is None else min(room, most), params.max_tokens
        if given and params.max_tokens is not None:
            params = replace(params, max_tokens=params.max_tokens + given)  # stop conditions count all of the output
        request = Request(
            request_id=request_id,
            number=next(self._numbers),
            prompt_token_ids=known[: count - given],
            params=self._resolved(params),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            rope=rope_of_request(self._model.config, count, rope),
            max_tokens=new_tokens + given,
            **options,
        )
        if isinstance(own, BeamSearchParams):
            self._add_beams(request, own)
        else:
            self._add_sequences(request, own.num_sequences, known[count - given :])
        return request

    def _pooled_request(
        self, request_id: str, prompt_ids: list[int], params: PoolingParams, options: RequestOptions
    ) -> Request:
        """A request for a vector or scores: one sequence without output."""
        pooled, longest = pooled_result(params, self._model.pooling, self._model.config), self._config.max_model_len
        if len(prompt_ids) > longest:
            raise PromptTooLongError(
                f"the text has {len(prompt_ids)} tokens and {longest} fit (max_model_len={longest}): shorten it, or "
                "truncate it (truncate_prompt_tokens=-1)"
            )
        if options.get("images"):
            raise RequestError(VECTORS_OF_TEXT)
        if options.get("second_start") and self._model.config.token_types < 2:
            raise RequestError("this model does not tell two texts apart: leave second_start out")
        self._check(request_id, prompt_ids, NO_OUTPUT)
        request = Request(
            request_id=request_id,
            number=next(self._numbers),
            prompt_token_ids=prompt_ids,
            params=NO_OUTPUT,
            seed=0,
            rope=rope_of_request(self._model.config, len(prompt_ids), 0),
            pooling=pooled,
            **options,
        )
        self._add_sequences(request, 1)
        return request

    def _add_beams(self, request: Request, params: BeamSearchParams) -> None:
        """Add a beam search and its sequences, which have no parent: the search decides on forks."""
        self._check_beams(request, params)
        self._add_sequences(request, params.beam_width)
        eos = self._model.config.eos_token_ids
        sharing = BeamSearchBlockSharing(BlockShareManager(self._blocks), params.beam_width)
        request.search = BeamSearch(request, params, eos, lambda: self._new_reader(request), sharing)
        for sequence in request.sequences:
            sequence.group, sequence.parent = request.search, None

    def _add_sequences(self, request: Request, num_sequences: int, given: Sequences[int] = ()) -> None:
        """Add one sequence per completion; the later ones fork from the first."""
        for index in range(num_sequences):
            request.sequences.append(self._new_sequence(request, index, given))

    def _new_sequence(self, request: Request, index: int, given: Sequences[int]) -> Sequence:
        num_top, reader = request.params.logprobs or 0, self._new_reader(request)
        unknown = bytes(len(given) * LogprobRecords(num_top).num_bytes) if request.wants_logprobs else b""
        checks_text = bool(request.params.stop)
        if checks_text and reader is not None:
            for token in given:  # the engine reads the text token by token
                reader.check(token)
        return Sequence(
            id=self._blocks.fresh_sequence_id(),
            request=request,
            index=index,
            token_ids=[*request.prompt_token_ids, *given],
            num_prompt=len(request.prompt_token_ids),
            seed=child_seed(request.seed, index),
            output_token_ids=list(given),
            parent=request.sequences[0] if index else None,
            logprobs=LogprobRecords(num_top, unknown),
            stops=self._stops(request),
            reader=reader,
            checks_text=checks_text,
        )

    def _stops(self, request: Request) -> TokenStops:
        if request.sequences:
            stops: TokenStops = request.sequences[0].stops
            return stops
        num_prompt = len(request.prompt_token_ids)
        return TokenStops(request.params, self._model.config.eos_token_ids, num_prompt, num_prompt + request.max_tokens)

    def _new_reader(self, request: Request) -> TextReader | None:
        if not request.params.detokenize or self._model.tokenizer is None:
            return None
        tokenizer, params, prompt = self._model.tokenizer, request.params, request.prompt_token_ids
        eos, length = self._model.config.eos_token_ids, len(prompt) + request.max_tokens

        def new_checker() -> StopChecker:
            detokenizer = tokenizer.new_detokenizer(prompt, params.skip_special_tokens)
            return StopChecker(params, eos, len(prompt), length, detokenizer)

        return TextReader(new_checker)

    def _check(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        if request_id in self._running:
            raise RequestError(f"a request {request_id!r} is running already: choose another id")
        if not prompt_ids:
            raise EmptyPromptError("the prompt is empty: pass at least one token")
        vocab = self._model.config.vocab_size
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < vocab:
                raise TokenIdError(
                    f"the token id {token} is outside the vocabulary of {vocab} tokens: pass ids from 0 to {vocab - 1}"
                )
        limit = self._config.max_model_len - (0 if params.max_tokens == 0 else 1)
        if len(prompt_ids) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens and {limit} fit (max_model_len="
                f"{self._config.max_model_len}, at least one is generated): shorten it or raise max_model_len"
            )
        params.validate_for(vocab)
        if params.stop and self._model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def _check_beams(self, request: Request, params: BeamSearchParams) -> None:
        """Check that the worst case fits: the prompt's blocks once, and every beam's own tokens.

        Preempted beams of a model with recurrent layers share only the tokens before a checkpoint, if there is one.
        """
        shared = 0 if self._blocks.has_states else len(request.prompt_token_ids) // self._config.cache.block_size
        longest = self._blocks.blocks_for(len(request.prompt_token_ids) + request.max_tokens)
        needed = shared + params.beam_width * (longest - shared + 1)
        available = self._blocks.num_blocks - 1
        if needed > available:
            raise RequestError(
                f"{params.beam_width} beams of {request.max_tokens} tokens may need {needed} blocks and the cache has "
                f"{available}: request fewer beams or tokens, or give the cache more memory"
            )

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Parameters with strings as tokens and the grammar compiled for this model's vocabulary."""
        if params.structured_outputs is not None:
            from bifolio.sampling.grammar import structured_grammar

            grammar = structured_grammar(params.structured_outputs)
            params = replace(params, grammar=grammar, structured_outputs=None, guided_decoding=None)
        if params.grammar is not None:
            from bifolio.sampling.grammar import with_grammar

            params = with_grammar(params, self._model)
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            return params.resolve_strings(_no_tokens)
        return params.resolve_strings(lambda text: tokenizer.encode(text, add_special_tokens=False))


def _checked_given(count: int, known: list[int], own: SamplingParams | BeamSearchParams) -> int:
    """Check the number of output tokens that are known before a request."""
    if not 0 <= count < max(len(known), 1):
        raise RequestError(
            f"num_given is {count} and there are {len(known)} tokens: at least one belongs to the prompt"
        )
    if count and (isinstance(own, BeamSearchParams) or own.prompt_logprobs is not None):
        raise RequestError("output cannot be given to a beam search or with prompt_logprobs: pass it as the prompt")
    return count


def _no_tokens(text: str) -> list[int]:
    raise RequestError(
        f"the model has no tokenizer that turns {text!r} into tokens: pass bad_words_token_ids in place of bad_words, "
        "and token ids as dry_sequence_breakers, or () for none"
    )


def as_token_ids(prompt: Sequences[int]) -> list[int]:
    """Integers of any type (numpy's too) as a list of ints."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise TokenIdError(f"a prompt must be a list of token ids, which are whole numbers: {error}") from error
