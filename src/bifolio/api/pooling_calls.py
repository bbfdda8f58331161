"""The methods of `LLM` for vectors and scores: `embed`, `encode`, `classify` and `score`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from bifolio.api.lora import LoRA, adapters_for
from bifolio.api.pooled_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    pooled_output,
)
from bifolio.api.pooled_texts import PooledTexts, paired
from bifolio.api.prompts import Prompt, as_prompts, show_progress
from bifolio.api.shared_engine import SharedEngine
from bifolio.engine.adapters import LoadedAdapter
from bifolio.errors import ModelOutputError, RequestError
from bifolio.garbage import no_garbage_collection
from bifolio.model.loaded import LoadedModel
from bifolio.pooling_params import PoolingParams, PoolingTask
from bifolio.sequence import Request
from bifolio.text.pairs import EncodedText

Output = TypeVar("Output", bound=PoolingOutput)
Item = TypeVar("Item")
AT_ONCE = 512  # texts that are encoded while those before them are computed


class PoolingCalls:
    """Vectors and scores of texts, in the same batches as all other requests."""

    model: LoadedModel
    lora: LoRA  # of calls that name no adapter
    _shared: SharedEngine

    def adapters_for(self, lora_request: LoRA, count: int) -> list[LoadedAdapter | None]:
        """The adapter of each of `count` prompts; one that is not in memory is read."""
        return adapters_for(self.lora if lora_request is None else lora_request, count, self._shared.engine.adapters)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRA = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vector of each text; results have the order of the texts.

        `prompt_name` chooses a prompt of the model's files, which is put before each text ("query").
        """
        params = _params(pooling_params, "embed", truncate_prompt_tokens)
        return self._pooled(as_prompts(prompts), params, EmbeddingOutput, prompt_name, use_tqdm, lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask = "token_embed",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRA = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The result of a task for each text: by default a vector for each of its tokens, f32[tokens, d]."""
        task = pooling_params.task if pooling_params is not None and pooling_params.task is not None else pooling_task
        params = _params(pooling_params, task, truncate_prompt_tokens)
        return self._pooled(as_prompts(prompts), params, PoolingOutput, None, use_tqdm, lora_request)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRA = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The score of each label for each text; `model.pooling.head.labels` names them."""
        params = _params(pooling_params, "classify", truncate_prompt_tokens)
        return self._pooled(as_prompts(prompts), params, ClassificationOutput, None, use_tqdm, lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRA = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The score of each pair of texts: one query with each document, or the pairs of two lists of equal length.

        A reranker reads both texts together; of a model that makes vectors it is the cosine of the two.
        """
        pairs = paired(data_1, data_2)
        if self.model.pooling.head is None:
            own = _params(pooling_params, "embed", truncate_prompt_tokens)
            return self._cosines(pairs, own, use_tqdm, lora_request)
        params = _params(pooling_params, "score", truncate_prompt_tokens)
        texts = self._pooled_texts
        parts = (texts.encode_pairs(part, params.truncate_prompt_tokens) for part in _parts(pairs))
        requests = self._finish_pooled(parts, params, self.adapters_for(lora_request, len(pairs)), use_tqdm)
        at = self.model.pooling.head.score or 0
        return [_scoring(request, request.pooling.value[at]) for request in requests]

    @property
    def _pooled_texts(self) -> PooledTexts:
        return PooledTexts(self.model, self._shared.engine.config.max_model_len)

    def _pooled(
        self,
        prompts: list[Prompt],
        params: PoolingParams,
        kind: type[Output],
        prompt_name: str | None,
        use_tqdm: bool | None,
        lora_request: LoRA,
    ) -> list[PoolingRequestOutput[Output]]:
        texts = self._pooled_texts
        prefix = texts.prompt(prompt_name)
        parts = (texts.encode(part, params.truncate_prompt_tokens, prefix) for part in _parts(prompts))
        adapters = self.adapters_for(lora_request, len(prompts))
        return [pooled_output(request, kind) for request in self._finish_pooled(parts, params, adapters, use_tqdm)]

    def _cosines(
        self, pairs: list[tuple[str, str]], params: PoolingParams, use_tqdm: bool | None, lora_request: LoRA
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """The products of the vectors of pairs, their cosines if they are normalised; every text is computed once."""
        if isinstance(lora_request, Sequence) and not isinstance(lora_request, str):
            raise RequestError("the pairs of one call have one lora_request: pass one")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        params = dataclasses.replace(params, use_activation=params.activated is not False, normalize=None)
        found = self._pooled([*texts], params, EmbeddingOutput, None, use_tqdm, lora_request)
        vectors = dict(zip(texts, found, strict=True))
        scored = []
        for one, other in ((vectors[a], vectors[b]) for a, b in pairs):
            cosine = np.float32(np.dot(one.outputs.data.astype(np.float64), other.outputs.data.astype(np.float64)))
            ids = [*one.prompt_token_ids, *other.prompt_token_ids]
            scored.append(PoolingRequestOutput(one.request_id, ScoringOutput(np.asarray(cosine)), ids))
        return scored

    def _finish_pooled(
        self,
        parts: Iterator[list[EncodedText]],
        params: PoolingParams,
        adapters: list[LoadedAdapter | None],  # of each text
        use_tqdm: bool | None,
    ) -> list[Request]:
        """Finished requests of all texts. Few texts are encoded here: another thread would wait for a processor."""
        requests: list[Request] = []
        try:
            with no_garbage_collection():  # all requests stay until the end: the collector finds nothing to free
                if len(adapters) <= AT_ONCE:
                    for texts in parts:
                        requests += self._shared.add_pooled(texts, params, adapters)
                else:
                    self._add_in_turns(parts, params, adapters, requests)
                self._shared.finish(requests, show_progress(use_tqdm, len(adapters)))
        except BaseException:
            self._shared.abort(requests)
            raise
        for request in requests:
            if request.error is not None:
                raise ModelOutputError(request.error)
        return requests

    def _add_in_turns(
        self,
        parts: Iterator[list[EncodedText]],
        params: PoolingParams,
        adapters: list[LoadedAdapter | None],
        requests: list[Request],
    ) -> None:
        """Append the requests of all texts. The next texts are encoded while those before them are computed."""
        with ThreadPoolExecutor(1, thread_name_prefix="bifolio-tokenize") as encoder:
            coming: Future[list[EncodedText] | None] = encoder.submit(next, parts, None)
            while (texts := coming.result()) is not None:
                coming = encoder.submit(next, parts, None)
                own = adapters[len(requests) : len(requests) + len(texts)]
                requests += self._shared.add_pooled(texts, params, own)
                self._shared.step()  # a device computes while more texts are added
                while not coming.done() and self._shared.engine.has_work:
                    self._shared.step()


def _parts(items: list[Item]) -> Iterator[list[Item]]:
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))


def _params(given: PoolingParams | None, task: PoolingTask, truncate: int | None) -> PoolingParams:
    """The parameters of a call, with its task."""
    if given is not None and not isinstance(given, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, not {given!r}")
    params = given or PoolingParams()
    if params.task not in (None, task):
        raise RequestError(f"pooling_params has the task {params.task!r} and this method is for {task!r}")
    truncate = params.truncate_prompt_tokens if truncate is None else truncate
    return dataclasses.replace(params, task=task, truncate_prompt_tokens=truncate)


def _scoring(request: Request, score: np.float32) -> PoolingRequestOutput[ScoringOutput]:
    return PoolingRequestOutput(request.request_id, ScoringOutput(np.asarray(score)), request.prompt_token_ids)
