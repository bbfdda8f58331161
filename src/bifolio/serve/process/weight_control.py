"""Pauses and new weights, in the engine's process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.api.weight_update import updated_model
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.errors import BifolioError, FaultKind
from bifolio.model.weights import prepare


def control(llm: LLM, thread: EngineThread, message: m.Control, send: Callable[[m.FromEngine], None]) -> None:
    """Run a control message; new weights are read and prepared while the engine goes on."""

    def done(engine: InferenceEngine) -> None:
        send(m.Controlled(message.id, engine.weight_version))

    def pause(engine: InferenceEngine) -> None:
        if message.aborts:
            engine.abort_all()
            thread.deliver()
        thread.is_paused = True
        done(engine)

    def resume(engine: InferenceEngine) -> None:
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
            send(m.Refused(message.id, FaultKind.INVALID_REQUEST, str(error)))
        else:
            thread.post(done)

    if message.verb == "update":
        threading.Thread(target=update, name="bifolio-weights", daemon=True).start()
    else:
        thread.post({"pause": pause, "resume": resume, "reset": reset}[message.verb])
