"""Pauses and new weights, in the engine's process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.api.weight_stream import WeightStream
from bifolio.api.weight_update import Source, updated_model
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.sleep import check_can_sleep, checked_tags, fall_asleep, wake
from bifolio.engine.thread import EngineThread
from bifolio.errors import BifolioError, ConfigError, FaultKind
from bifolio.model.weights import prepare


def control(
    llm: LLM, thread: EngineThread, stream: WeightStream, message: m.Control, send: Callable[[m.FromEngine], None]
) -> None:
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

    def take() -> None:
        if stream.has_tensors:
            update(stream.taken)
        else:
            thread.post(done)

    def update(source: Callable[[], Source] = lambda: message.path) -> None:
        try:
            model = updated_model(llm.model, source())
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

    def communicate(work: Callable[[], None]) -> None:
        try:
            work()
        except BifolioError as error:
            refuse(error)
        else:
            thread.post(done)

    if message.verb in ("update", "wake", "take"):
        work = {"update": update, "wake": wake_up, "take": take}[message.verb]
        threading.Thread(target=work, name="bifolio-weights", daemon=True).start()
    elif message.verb == "join":
        communicate(lambda: stream.join(message.host, message.port, message.world_size))
    elif message.verb == "expect":
        communicate(lambda: stream.expect(message.name, message.dtype, message.shape))
    elif message.verb == "leave":
        communicate(stream.leave)
    else:
        thread.post({"pause": pause, "resume": resume, "reset": reset, "sleep": sleep, "look": done}[message.verb])
