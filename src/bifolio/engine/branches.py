"""Open branches of texts: forks share computed tokens, and an operation computes the missing ones.

    trunk   |<------------ computed and kept by the engine ------------>|     shared by branches
    branch  |<--------- num_kept -------->|<----- tail ----->|                tokens of its own
            |<------ prompt ------>|<------- answer -------->|

A fork is a new branch over the same trunk, so it copies neither blocks nor tables. A truncated branch uses less of its
trunk. A trunk is a kept request of the engine (`InferenceEngine.keep`), which memory pressure may drop: the next
operation then computes its tokens again, with the same bits.

The answer begins behind the last tokens that were appended. Grammars, penalties and stop conditions read all of it,
however many calls generate it.

All functions here run on the thread that owns the engine, or under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import Unpack

from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.engine import InferenceEngine
from bifolio.errors import EmptyPromptError, RequestError
from bifolio.images import PromptImage
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request, RequestOptions

PROMPT_ALONE = SamplingParams(temperature=0.0, max_tokens=0, detokenize=False)
SCORING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)


@dataclass(slots=True, eq=False)
class Trunk:
    """Computed tokens, as long as the engine keeps them."""

    request_id: str  # of the request that computed them
    token_ids: list[int]  # never changed
    num_branches: int = 1


@dataclass(slots=True, eq=False)
class BranchState:
    """The tokens of one branch."""

    salt: bytes = b""
    owner: str = ""
    trunk: Trunk | None = None
    num_kept: int = 0  # first tokens of the trunk that belong to the branch
    tail: list[int] = field(default_factory=list)
    num_prompt: int = 0  # tokens before the answer
    images: tuple[PromptImage, ...] = ()  # among these tokens
    adapter: LoadedAdapter | None = None  # of its passes; None: the base
    changing: Request | None = None  # of the operation that will change it
    is_closed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_kept + len(self.tail)

    @property
    def token_ids(self) -> list[int]:
        return [*([] if self.trunk is None else self.trunk.token_ids[: self.num_kept]), *self.tail]

    @property
    def num_missing(self) -> int:
        """Tokens that no pass has computed, but for the last one: its logits are computed by the next operation."""
        return max(len(self.tail) - 1, 0)


class BranchOwner:
    """The branches of one engine: makes their requests and holds their trunks."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._abandoned: deque[Trunk] = deque()  # of branches that were dropped without `close`

    # -- tokens ----------------------------------------------------------------------------------------------------
    def open(
        self,
        token_ids: Sequences[int],
        *,
        salt: bytes = b"",
        owner: str = "",
        images: tuple[PromptImage, ...] = (),
        adapter: LoadedAdapter | None = None,
    ) -> BranchState:
        """A branch of these tokens; `missing` computes them."""
        if not len(token_ids):
            raise EmptyPromptError("a branch begins with at least one token: pass a prompt")
        tokens = list(token_ids)
        return BranchState(salt, owner, tail=tokens, num_prompt=len(tokens), images=images, adapter=adapter)

    def append(self, branch: BranchState, token_ids: Sequences[int], *, to_answer: bool = False) -> None:
        """Add tokens; they end the answer, unless they belong to it."""
        self._check(branch)
        branch.tail.extend(token_ids)
        if not to_answer:
            branch.num_prompt = branch.num_tokens

    def truncate(self, branch: BranchState, num_tokens: int) -> None:
        """Keep the first tokens."""
        self._check(branch)
        if not 1 <= num_tokens <= branch.num_tokens:
            raise RequestError(
                f"a branch of {branch.num_tokens} tokens cannot be truncated to {num_tokens}: keep at least one of them"
            )
        cut = next((image for image in branch.images if image.start < num_tokens < image.end), None)
        if cut is not None:
            raise RequestError(
                f"a branch cannot be truncated inside an image: keep {cut.start} tokens or at least {cut.end}"
            )
        branch.images = tuple(image for image in branch.images if image.end <= num_tokens)
        if num_tokens >= branch.num_kept:
            del branch.tail[num_tokens - branch.num_kept :]
        else:
            branch.num_kept = num_tokens
            branch.tail = []
        branch.num_prompt = min(branch.num_prompt, num_tokens)

    def fork(self, branch: BranchState) -> BranchState:
        """Another branch of the same tokens; nothing is copied but the tail."""
        self._check(branch)
        if branch.trunk is not None:
            branch.trunk.num_branches += 1
        return replace(branch, tail=list(branch.tail), changing=None)

    def close(self, branch: BranchState) -> None:
        """Forget the branch; the last one of a trunk releases its blocks."""
        if not branch.is_closed:
            branch.is_closed = True
            self._drop(branch.trunk)
            branch.trunk, branch.num_kept, branch.tail = None, 0, []

    def abandon(self, branch: BranchState) -> None:
        """`close` from any thread, at any moment: its trunk is released with the next operation of another branch."""
        if not branch.is_closed:
            branch.is_closed = True
            if branch.trunk is not None:
                self._abandoned.append(branch.trunk)

    def block_ids(self, branch: BranchState) -> list[int]:
        """The blocks that hold its computed tokens; none where memory pressure has dropped them."""
        self._check(branch)
        trunk, blocks = branch.trunk, self._engine.blocks
        kept = None if trunk is None else self._engine.batcher.kept(trunk.request_id)
        if kept is None:
            return []
        return blocks.block_ids_of(kept.id)[: blocks.blocks_for(min(branch.num_kept, kept.num_computed))]

    # -- requests --------------------------------------------------------------------------------------------------
    def missing(self, branch: BranchState, request_id: str, **options: Unpack[RequestOptions]) -> Request | None:
        """A request that computes all tokens but the last; None if they are computed."""
        self._check(branch)
        if not branch.num_missing:
            return None
        tokens = branch.tail[:-1]
        request = self._start(branch, request_id, tokens, PROMPT_ALONE, options)
        self._engine.keep(request_id)
        branch.changing = request
        return request

    def computed(self, branch: BranchState, request: Request) -> None:
        """Take over the tokens that a request of `missing` has computed."""
        branch.changing = None
        sequence = request.sequences[0]
        if branch.is_closed:
            self._engine.release(request.request_id)
        elif sequence.finish_reason is FinishReason.LENGTH:
            self._take(branch, request, branch.tail[-1:])

    def generate(
        self,
        branch: BranchState,
        request_id: str,
        params: SamplingParams,
        *,
        advances: bool,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request that continues the answer; the branch takes its tokens over if it `advances`."""
        self._check(branch)
        if advances and params.num_sequences > 1:
            raise RequestError(
                f"a branch cannot go on in {params.num_sequences} completions: fork it first, or pass advance=False"
            )
        if params.prompt_logprobs is not None:
            raise RequestError("a branch gives no prompt_logprobs: call score() for logprobs of given tokens")
        options["num_given"] = branch.num_tokens - branch.num_prompt
        request = self._start(branch, request_id, branch.tail, params, options)
        if advances:
            self._engine.keep(request_id)
            branch.changing = request
        return request

    def generated(self, branch: BranchState, request: Request) -> None:
        """Take over the tokens of a request that has ended; one that failed leaves the branch as it was."""
        branch.changing = None
        if branch.is_closed:
            self._engine.release(request.request_id)
        elif request.sequences[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._take(branch, request, [])

    def interrupted(self, branch: BranchState, requests: list[Request]) -> None:
        """Give up an operation whose requests were aborted: the branch stays as it was."""
        for request in requests:
            self._engine.release(request.request_id)
            if branch.changing is request:
                branch.changing = None

    def score(
        self,
        branch: BranchState,
        request_id: str,
        continuation: Sequences[int],
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request for the logprobs of these tokens behind the branch, which stays as it is."""
        self._check(branch)
        if not len(continuation):
            raise EmptyPromptError("a continuation is empty: pass at least one token to score")
        options["score_from"] = branch.num_tokens - 1
        return self._start(branch, request_id, [*branch.tail, *continuation], SCORING, options)

    # -- details ---------------------------------------------------------------------------------------------------
    def _start(
        self,
        branch: BranchState,
        request_id: str,
        token_ids: Sequences[int],  # behind those of the trunk
        params: SamplingParams,
        options: RequestOptions,
    ) -> Request:
        while self._abandoned:
            self._drop(self._abandoned.popleft())
        trunk = branch.trunk
        options.setdefault("owner", branch.owner)
        options["images"], options["adapter"] = branch.images, branch.adapter
        if trunk is not None and self._engine.batcher.kept(trunk.request_id) is not None:
            return self._engine.fork(
                trunk.request_id, request_id, token_ids, params, num_kept=branch.num_kept, **options
            )
        known = [] if trunk is None else trunk.token_ids[: branch.num_kept]
        options["salt"] = branch.salt
        return self._engine.add_request(request_id, [*known, *token_ids], params, **options)

    def _take(self, branch: BranchState, request: Request, tail: list[int]) -> None:
        """Let a branch continue from the tokens of a request."""
        self._drop(branch.trunk)
        branch.trunk = Trunk(request.request_id, request.sequences[0].token_ids)
        branch.num_kept, branch.tail = len(branch.trunk.token_ids), tail

    def _drop(self, trunk: Trunk | None) -> None:
        if trunk is not None:
            trunk.num_branches -= 1
            if not trunk.num_branches:
                self._engine.release(trunk.request_id)

    def _check(self, branch: BranchState) -> None:
        if branch.is_closed:
            raise RequestError("this branch is closed: open or fork another one")
        if branch.changing is not None:
            raise RequestError("this branch is being continued: wait for that call, or fork the branch before it")
