"""Pauses and new weights, in the engine's process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.api.weight_update import updated_model
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.sleep import check_can_sleep, checked_tags, fall_asleep, wake
from bifolio.engine.thread import EngineThread
from bifolio.errors import BifolioError, ConfigError, FaultKind
from bifolio.model.weights import prepare


def control(llm: LLM, thread: EngineThread, message: m.Control, send: Callable[[m.FromEngine], None]) -> None:
    """Run a control message; new weights are read and prepared while the engine goes on."""

    def done(engine: InferenceEngine) -> None:
        send(m.Controlled(message.id, engine.weight_version, bool(engine.asleep)))

    def refuse(error: Exception) -> None:
        send(m.Refused(message.id, FaultKind.INVALID_REQUEST, str(error)))

    def pause(engine: InferenceEngine) -> None:
        if message.aborts:
            engine.abort_all()
            thread.deliver()
        thread.is_paused = True
        done(engine)

    def resume(engine: InferenceEngine) -> None:
        if engine.asleep:
            refuse(ConfigError("the engine sleeps: call /wake_up"))
            return
        thread.is_paused = False
        done(engine)

    def reset(engine: InferenceEngine) -> None:
        engine.blocks.drop_cached()
        done(engine)

    def update() -> None:
        try:
            model = updated_model(llm.model, message.path)
            prepared = prepare(model.weights, llm.engine.runner.kernels)
            thread.call(lambda engine: llm.exchange(model, prepared)).result()
        except (BifolioError, OSError) as error:
            refuse(error)
        else:
            thread.post(done)

    def sleep(engine: InferenceEngine) -> None:
        try:
            check_can_sleep(engine)
            if message.aborts:
                engine.abort_all()
                thread.deliver()
            fall_asleep(engine, message.level)
        except BifolioError as error:
            refuse(error)
            return
        thread.is_paused = True
        done(engine)

    def wake_up() -> None:
        try:
            checked_tags(message.tags)
            weights = llm.awake_weights(message.tags)  # prepared beside the engine
            thread.call(lambda engine: wake(engine, message.tags, weights)).result()
        except (BifolioError, OSError) as error:
            refuse(error)
        else:
            thread.post(awake)

    def awake(engine: InferenceEngine) -> None:
        thread.is_paused = thread.is_paused and bool(engine.asleep)
        done(engine)

    if message.verb in ("update", "wake"):
        work = update if message.verb == "update" else wake_up
        threading.Thread(target=work, name="bifolio-weights", daemon=True).start()
    else:
        thread.post({"pause": pause, "resume": resume, "reset": reset, "sleep": sleep, "look": done}[message.verb])
