"""The victim law: beside any request of one key, short requests of another key and `/health` are answered at once.

The cases are every field of every request at its limit (from the schema) and every bomb. The full tier sends some of
them and requires answers; `pytest -m slow` sends all of them and requires a request for 4 tokens within 2 seconds and
`/health` within 0.5, beside a neighbour that loads the machine. Sieges are attacks of many requests or connections;
they last while the victim asks, with keys and, from two addresses, without.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from law_server import LawServer, too_slow
from limit_cases import ENDPOINTS, Case, bomb_cases, field_cases, values_at_limits
from msgspec import inspect
from serving import ENGINE, model_folder, running_server
from sieges import SIEGES

from bifolio.api.messages import Launch, Start
from bifolio.config.transfer import TransferSettings
from bifolio.serve.http.bounds import parts
from bifolio.serve.http.connection import allow_files
from bifolio.serve.process.engine_host import EngineHost
from bifolio.serve.process.remote_engine import RemoteEngine
from bifolio.serve.process.supervisor import EngineProcess
from helpers import random_prompt

NATIVE = {"kernels": "native", "threads": 1}
SECRET = "shared-by-both-sides"
NUM_SILENT = 300
ALLOWED = {0, 200, 400, 403, 404, 408, 413, 429}  # 0: the client left before the answer came
ALL = [*field_cases(), *bomb_cases()]


@pytest.fixture(scope="module")
def law_server() -> Iterator[LawServer]:
    server = LawServer(model_folder())
    yield server
    server.close()


@pytest.fixture(scope="module")
def keyless_server() -> Iterator[LawServer]:
    server = LawServer(model_folder(), has_keys=False)
    yield server
    server.close()


def field_paths(struct: Any, prefix: str = "") -> Iterator[str]:
    """The path of every field below a struct, found without the rules of the cases."""
    for field in struct.fields:
        kinds = [part.type if isinstance(part, inspect.Metadata) else part for part in parts(field.type)]
        items = [item for kind in kinds if isinstance(kind, inspect.ListType) for item in parts(kind.item_type)]
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
        lists = [item for item in items if isinstance(item, inspect.StructType)]
        if not structs or len(kinds) > len(structs) + 1:
            yield prefix + field.encode_name
        for struct_type in structs:
            yield from field_paths(struct_type, f"{prefix}{field.encode_name}.")
        for struct_type in lists:
            yield from field_paths(struct_type, f"{prefix}{field.encode_name}[].")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_field_has_a_case(path: str) -> None:
    struct = inspect.type_info(ENDPOINTS[path][0])
    assert set(field_paths(struct)) == {name for name, _ in values_at_limits(struct)}


def test_a_field_of_an_unknown_type_is_an_error() -> None:
    class Odd(msgspec.Struct):
        field: bytes

    with pytest.raises(TypeError, match="no rule"):
        list(values_at_limits(inspect.type_info(Odd)))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["law_server", "keyless_server"])
def test_the_victim_is_answered_during_sieges(kind: str, request: pytest.FixtureRequest) -> None:
    server: LawServer = request.getfixturevalue(kind)
    stored = server.store()
    before = server.num_bytes()
    for siege in SIEGES.values():
        with siege(server):
            server.times_of_victim(stored, 1)
    assert server.is_alive
    assert server.num_bytes() < before + (700 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIEGES)
@pytest.mark.parametrize("kind", ["law_server", "keyless_server"])
def test_the_victim_law_during_sieges(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    server: LawServer = request.getfixturevalue(kind)
    stored = server.store()
    server.times_of_victim(stored, 1)  # starts the helper process
    before = server.times_of_victim(stored, 6)
    with SIEGES[name](server):
        during = server.times_of_victim(stored, 8)
    after = server.times_of_victim(stored, 6)
    found = {
        kind: too_slow(times, before[kind] + after[kind], 0.5 if kind == "health" else 2.0)
        for kind, times in during.items()
    }
    assert not any(found.values()), found


@contextlib.contextmanager
def silent_connections(port: int) -> Iterator[None]:
    """Clients that never send the secret."""
    allow_files(NUM_SILENT)
    with contextlib.ExitStack() as held:
        for _ in range(NUM_SILENT):
            held.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        yield


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


@pytest.mark.full
def test_silent_connections_to_a_prefill_engine_delay_no_prompt() -> None:
    """A long prompt still gets its blocks from there, in about the time that it takes without them."""
    seeds = itertools.count()
    with running_server(engine=NATIVE, transfer=TransferSettings("prefill", secret=SECRET)) as prefill:
        address = f"127.0.0.1:{prefill.port}"
        settings = TransferSettings("decode", prefill_addresses=(address,), secret=SECRET)
        hello = prefill.context.engine.hello
        assert hello is not None
        with running_server(engine=NATIVE, transfer=settings) as decode, decode.http() as http:

            def ask() -> None:
                prompt = random_prompt(120, seed=next(seeds), vocab_size=250)
                answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 112  # those of the prefill engine

            calm = [timed(ask) for _ in range(3)]
            with silent_connections(hello.transfer_port):
                during = [timed(ask) for _ in range(3)]
            calm += [timed(ask) for _ in range(3)]
    assert too_slow(during, calm, 2.0) is None


@pytest.mark.full
def test_silent_connections_to_an_engine_keep_no_front_end_out() -> None:
    """A front end connects, and its requests are answered, in about the time that it takes without them."""
    secret = SECRET.encode()

    async def connect(address: str) -> float:
        began = time.monotonic()
        front_end = RemoteEngine(address, secret)
        try:
            await front_end.start()
            stream = front_end.submit([Start(front_end.new_id(), [5, 9, 3], {"max_tokens": 4})])
            while not any(update.ended for update in await stream.next()):
                pass
        finally:
            await front_end.close()
        return time.monotonic() - began

    async def check() -> tuple[list[float], list[float]]:
        engine = EngineProcess(Launch({"model": str(model_folder()), **ENGINE}))
        host = EngineHost(engine, secret)
        try:
            await engine.start()
            port = await host.listen("127.0.0.1:0")
            address = f"127.0.0.1:{port}"
            calm = [await connect(address) for _ in range(3)]
            with contextlib.ExitStack() as held:
                await asyncio.to_thread(held.enter_context, silent_connections(port))  # the host accepts meanwhile
                return [await connect(address) for _ in range(3)], calm
        finally:
            await host.close()
            await engine.close()

    assert too_slow(*asyncio.run(check()), 2.0) is None


@pytest.mark.full
def test_requests_at_their_limits_are_answered_and_so_is_the_victim(law_server: LawServer) -> None:
    for case in ALL[::12]:
        _, _, statuses = law_server.attack(case.path, case.content(), 1, 2.0)
        assert set(statuses) <= ALLOWED, (case.name, statuses)
    assert law_server.is_alive


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_victim_law(law_server: LawServer, case: Case) -> None:
    answers, healths, statuses = law_server.attack(case.path, case.content(), 2, 4.0)
    assert set(statuses) <= ALLOWED
    assert max(answers) < 2.0
    assert max(healths) < 0.5
