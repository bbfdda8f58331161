"""Pauses and new weights, in the engine's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.api.weight_stream import WeightStream
from bifolio.api.weight_update import Source, updated_model
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.sleep import check_can_sleep, checked_tags, fall_asleep, wake
from bifolio.engine.thread import EngineThread
from bifolio.errors import BifolioError, ConfigError, FaultKind


@dataclass(frozen=True, slots=True)
class WeightControl:
    """One control message. Work on the engine is posted to its thread; work beside it has a thread of its own.

    New weights are read and prepared while the engine goes on.
    """

    llm: LLM
    thread: EngineThread
    stream: WeightStream
    message: m.Control
    send: Callable[[m.FromEngine], None]

    def run(self) -> None:
        beside = {"update": self._update, "wake": self._wake, "take": self._take}
        talks = {"join": self._join, "expect": self._expect, "leave": self.stream.leave}
        between = {
            "pause": self._pause, "resume": self._resume, "sleep": self._sleep, "reset": self._reset,
            "look": self._done,
        }  # fmt: skip
        verb = self.message.verb
        if verb in beside:
            threading.Thread(target=beside[verb], name="bifolio-weights", daemon=True).start()
        elif verb in talks:
            self._then_post(talks[verb], self._done)
        else:
            self.thread.post(between[verb])

    def _done(self, engine: InferenceEngine) -> None:
        self.send(m.Controlled(self.message.id, engine.weight_version, bool(engine.asleep)))

    def _refuse(self, error: Exception) -> None:
        self.send(m.Refused(self.message.id, FaultKind.INVALID_REQUEST, str(error)))

    def _then_post(self, work: Callable[[], object], after: Callable[[InferenceEngine], None]) -> None:
        """Do the work here, then go on between two steps; an error is the answer."""
        try:
            work()
        except (BifolioError, OSError) as error:
            self._refuse(error)
        else:
            self.thread.post(after)

    # -- between two steps --------------------------------------------------------------------------------------------
    def _pause(self, engine: InferenceEngine) -> None:
        self._abort(engine)
        self.thread.is_paused = True
        self._done(engine)

    def _resume(self, engine: InferenceEngine) -> None:
        if engine.asleep:
            self._refuse(ConfigError("the engine sleeps: call /wake_up"))
            return
        self.thread.is_paused = False
        self._done(engine)

    def _reset(self, engine: InferenceEngine) -> None:
        engine.blocks.drop_cached()
        self._done(engine)

    def _sleep(self, engine: InferenceEngine) -> None:
        try:
            check_can_sleep(engine)
            self._abort(engine)
            fall_asleep(engine, self.message.level)
        except BifolioError as error:
            self._refuse(error)
            return
        self.thread.is_paused = True
        self._done(engine)

    def _abort(self, engine: InferenceEngine) -> None:
        if self.message.aborts:
            engine.abort_all()
            self.thread.deliver()

    def _awake(self, engine: InferenceEngine) -> None:
        self.thread.is_paused = self.thread.is_paused and bool(engine.asleep)
        self._done(engine)

    # -- beside the engine --------------------------------------------------------------------------------------------
    def _update(self) -> None:
        self._then_post(lambda: self._exchange(self.message.path), self._done)

    def _take(self) -> None:
        """Put the tensors of the stream in place; without any there is nothing to do."""
        if self.stream.has_tensors:
            self._then_post(lambda: self._exchange(self.stream.taken()), self._done)
        else:
            self.thread.post(self._done)

    def _exchange(self, source: Source) -> None:
        llm = self.llm
        model = updated_model(llm.model, source)
        prepared = llm.prepared(model)
        self.thread.call(lambda engine: llm.exchange(model, prepared)).result()

    def _wake(self) -> None:
        self._then_post(self._load_and_wake, self._awake)

    def _load_and_wake(self) -> None:
        tags = self.message.tags
        checked_tags(tags)
        weights = self.llm.awake_weights(tags)
        self.thread.call(lambda engine: wake(engine, tags, weights)).result()

    # -- the trainer's communicator -----------------------------------------------------------------------------------
    def _join(self) -> None:
        asked = self.message
        self.stream.join(asked.host, asked.port, asked.world_size, asked.backend, asked.trainer_uuid)

    def _expect(self) -> None:
        self.stream.expect(self.message.name, self.message.dtype, self.message.shape)
