"""Branches of a text: fork it, append to it, generate from it, score continuations of it, and cut it.

`Branch` belongs to an `LLM`, `AsyncBranch` to an `AsyncLLM`: the same verbs, which are awaited. `engine.branches` has
the tokens and the rules; this module turns text into tokens and runs the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from bifolio.api.outputs import RequestOutput, Score, request_output, scored_continuation
from bifolio.api.shared_engine import Start
from bifolio.counts import whole
from bifolio.engine.branches import BranchOwner, BranchState
from bifolio.engine.requests import as_token_ids
from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request

if TYPE_CHECKING:
    from types import TracebackType

    from bifolio.api.async_llm import AsyncLLM
    from bifolio.api.llm import LLM
    from bifolio.engine.adapters import LoadedAdapter
    from bifolio.engine.engine import InferenceEngine
    from bifolio.images import PromptImage

Text: TypeAlias = str | Sequence[int]  # text or token ids
T = TypeVar("T")


class _Tokens:
    """The tokens of a branch, as both classes show them."""

    def __init__(self, llm: LLM, state: BranchState) -> None:
        self._llm = llm
        self._owner: BranchOwner = llm.branches
        self._state = state

    @property
    def token_ids(self) -> list[int]:
        """All tokens, the prompt and the end token of an answer included."""
        return self._state.token_ids

    @property
    def answer_token_ids(self) -> list[int]:
        """The tokens behind the last ones that were appended."""
        return self._state.token_ids[self._state.num_prompt :]

    @property
    def adapter(self) -> LoadedAdapter | None:
        """The adapter that the branch was opened with; None: the base."""
        return self._state.adapter

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """The images among its tokens."""
        return self._state.images

    @property
    def text(self) -> str:
        """The text of all tokens, without special ones."""
        return self._llm.model.require_tokenizer().decode(self.token_ids, True)

    def __len__(self) -> int:
        return self._state.num_tokens

    def __repr__(self) -> str:
        state = (
            "closed" if self._state.is_closed else f"{len(self)} tokens, {len(self) - self._state.num_prompt} answer"
        )
        return f"{type(self).__name__}({state})"

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self._owner.abandon(self._state)

    # -- requests ----------------------------------------------------------------------------------------------------
    def _encoded(self, text: Text) -> list[int]:
        if isinstance(text, str):
            return self._llm.model.require_tokenizer().encode(text, add_special_tokens=False)
        return as_token_ids(text)

    def _compute(self) -> Start:
        return lambda engine, request_id: self._owner.missing(self._state, request_id)

    def _computed(self, request: Request) -> None:
        self._owner.computed(self._state, request)
        if request.error is not None:
            raise RequestError(f"the branch could not be computed: {request.error}")

    def _generation(self, params: SamplingParams | None, advance: bool, priority: int) -> Start:
        [resolved] = self._llm.params_for([()], params)
        return lambda engine, request_id: self._owner.generate(
            self._state, request_id, resolved, advances=advance, priority=priority
        )

    def _generated(self, request: Request, advance: bool) -> RequestOutput:
        if advance:
            self._owner.generated(self._state, request)
        return request_output(request, self._llm.decode_token)

    def _scoring(self, continuations: Sequence[Text]) -> list[Start]:
        if isinstance(continuations, str):
            raise RequestError("continuations are a list: pass [text] for one")
        return [self._one_score(self._encoded(continuation)) for continuation in continuations]

    def _one_score(self, tokens: list[int]) -> Start:
        return lambda engine, request_id: self._owner.score(self._state, request_id, tokens)

    def _needs_computing(self, block_size: int) -> bool:
        """Whether forks would compute enough tokens each that computing them once before is cheaper."""
        return self._state.num_missing > block_size

    def _checked_copies(self, n: int) -> int:
        return whole("n, the number of forks,", n, least=1, error=RequestError)


class Branch(_Tokens):
    """A text that can be forked; `LLM.open` makes the first one. Close branches that are not needed any more.

    Forks share the computed tokens: they cost neither time nor memory until they differ. `generate` continues the
    answer of the branch; `append` adds tokens and begins a new answer.
    """

    def generate(
        self, sampling_params: SamplingParams | None = None, *, advance: bool = True, priority: int = 0
    ) -> RequestOutput:
        """Generate behind the branch; its tokens become part of the branch, unless `advance` is False."""
        [request] = self._run([self._generation(sampling_params, advance, priority)])
        return self._locked(lambda: self._generated(request, advance))

    def score(self, continuations: Sequence[Text]) -> list[Score]:
        """The logprobs of each continuation behind the branch, which stays as it is; they run in one batch."""
        return [scored_continuation(request) for request in self._run(self._scoring(continuations))]

    def append(self, tokens: Text, *, to_answer: bool = False) -> Branch:
        """Add text or tokens, which the next operation computes; `to_answer`: they continue the answer."""
        added = self._encoded(tokens)
        self._locked(lambda: self._owner.append(self._state, added, to_answer=to_answer))
        return self

    def truncate(self, num_tokens: int) -> Branch:
        """Keep the first `num_tokens` tokens; a negative number is counted from the end."""
        self._locked(lambda: self._owner.truncate(self._state, kept_tokens(num_tokens, len(self))))
        return self

    def fork(self, n: int = 1) -> list[Branch]:
        """`n` new branches of the same tokens, which share all blocks."""
        count = self._checked_copies(n)
        if self._needs_computing(self._llm.engine.blocks.block_size):
            self.compute()
        return self._locked(lambda: [Branch(self._llm, self._owner.fork(self._state)) for _ in range(count)])

    def compute(self) -> Branch:
        """Compute the tokens that were appended, which else the next operation does."""
        for request in self._run([self._compute()]):
            self._locked(lambda request=request: self._computed(request))  # type: ignore[misc]
        return self

    def close(self) -> None:
        """Give the blocks back that no fork needs; every later call is refused."""
        self._locked(lambda: self._owner.close(self._state))

    def __enter__(self) -> Branch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, starts: Sequence[Start]) -> list[Request]:
        started: list[Request] = []
        try:
            return self._llm.run_requests([noting(start, started) for start in starts])
        except BaseException:
            self._locked(lambda: self._owner.interrupted(self._state, started))
            raise

    def _locked(self, function: Callable[[], T]) -> T:
        return self._llm.with_engine(function)


class AsyncBranch(_Tokens):
    """`Branch` for asyncio; `AsyncLLM.open` makes the first one."""

    def __init__(self, async_llm: AsyncLLM, state: BranchState) -> None:
        super().__init__(async_llm.llm, state)
        self._async_llm = async_llm

    async def generate(
        self, sampling_params: SamplingParams | None = None, *, advance: bool = True, priority: int = 0
    ) -> RequestOutput:
        """Generate behind the branch; its tokens become part of the branch, unless `advance` is False."""
        [request] = await self._run([self._generation(sampling_params, advance, priority)])
        return await self._call(lambda: self._generated(request, advance))

    async def score(self, continuations: Sequence[Text]) -> list[Score]:
        """The logprobs of each continuation behind the branch, which stays as it is; they run in one batch."""
        return [scored_continuation(request) for request in await self._run(self._scoring(continuations))]

    async def append(self, tokens: Text, *, to_answer: bool = False) -> AsyncBranch:
        """Add text or tokens, which the next operation computes; `to_answer`: they continue the answer."""
        added = self._encoded(tokens)
        await self._call(lambda: self._owner.append(self._state, added, to_answer=to_answer))
        return self

    async def truncate(self, num_tokens: int) -> AsyncBranch:
        """Keep the first `num_tokens` tokens; a negative number is counted from the end."""
        await self._call(lambda: self._owner.truncate(self._state, kept_tokens(num_tokens, len(self))))
        return self

    async def fork(self, n: int = 1) -> list[AsyncBranch]:
        """`n` new branches of the same tokens, which share all blocks."""
        count = self._checked_copies(n)
        if self._needs_computing(self._llm.engine.blocks.block_size):
            await self.compute()
        states = await self._call(lambda: [self._owner.fork(self._state) for _ in range(count)])
        return [AsyncBranch(self._async_llm, state) for state in states]

    async def compute(self) -> AsyncBranch:
        """Compute the tokens that were appended, which else the next operation does."""
        for request in await self._run([self._compute()]):
            await self._call(lambda request=request: self._computed(request))  # type: ignore[misc]
        return self

    async def close(self) -> None:
        """Give the blocks back that no fork needs; every later call is refused."""
        await self._call(lambda: self._owner.close(self._state))

    async def __aenter__(self) -> AsyncBranch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, starts: Sequence[Start]) -> list[Request]:
        started: list[Request] = []
        try:
            return await self._async_llm.run_requests([noting(start, started) for start in starts])
        except BaseException:
            self._async_llm.thread.post(lambda engine: self._owner.interrupted(self._state, started))
            raise

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._async_llm.with_engine(function)


def noting(start: Start, started: list[Request]) -> Start:
    """The function, whose request is added to a list."""

    def call(engine: InferenceEngine, request_id: str) -> Request | None:
        request = start(engine, request_id)
        started.extend([] if request is None else [request])
        return request

    return call


def kept_tokens(num_tokens: int, length: int) -> int:
    """A number of tokens to keep; a negative one is counted from the end."""
    count = whole("num_tokens", num_tokens, least=None, error=RequestError)
    return length + count if count < 0 else count
