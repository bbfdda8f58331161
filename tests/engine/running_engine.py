"""An engine on its own thread, for tests of transfers between engines."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from bifolio import LLM, SamplingParams
from bifolio.engine.thread import EngineThread
from bifolio.engine.transfer.blocks import Sizes
from bifolio.sequence import StepResult

PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=2, logprobs=2, ignore_eos=True)


@dataclass
class Running:
    """An engine on its own thread."""

    llm: LLM
    thread: EngineThread = field(init=False)
    finished: dict[str, threading.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.thread = EngineThread(self.llm.engine, self._results)
        self.thread.start()

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.llm.engine)

    def _results(self, results: list[StepResult]) -> None:
        for result in results:
            if result.finished and result.request_id in self.finished:
                self.finished[result.request_id].set()

    def generate(self, prompt: list[int], salt: bytes = b"", params: SamplingParams = PARAMS) -> tuple[Any, int]:
        """Tokens and logprobs, and how many tokens of the prompt were cached."""
        name = f"request-{len(self.finished)}"
        self.finished[name] = threading.Event()
        request = self.thread.call(lambda engine: engine.add_request(name, prompt, params, salt=salt)).result()
        assert self.finished[name].wait(60)
        sequence = request.sequences[0]
        scores = [(entry.logprob, tuple(entry.top)) for entry in sequence.logprobs]
        return (sequence.output_token_ids, scores), request.metrics.num_cached_tokens

    def stop(self) -> None:
        self.thread.stop(10)
        assert self.llm.engine.blocks.num_used_blocks == 0  # no table of a transfer is left
