"""The victim law: beside any request of one key, short requests of another key and `/health` are answered at once.

The cases are every field of every request at its limit (from the schema) and every bomb. The full tier sends some of
them and requires answers; `pytest -m slow` sends all of them and requires a request for 4 tokens within 2 seconds and
`/health` within 0.5, beside a neighbour that loads the machine. Sieges are attacks of many requests or connections;
they last while the victim asks, with keys and, from two addresses, without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from law_server import LawServer
from limit_cases import ENDPOINTS, Case, bomb_cases, field_cases, values_at_limits
from msgspec import inspect
from serving import model_folder
from sieges import SIEGES

from bifolio.serve.bounds import parts

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
    for siege in SIEGES.values():
        with siege(server):
            server.times_of_victim(stored, 1)
    assert server.is_alive


@pytest.mark.slow
@pytest.mark.parametrize("name", SIEGES)
@pytest.mark.parametrize("kind", ["law_server", "keyless_server"])
def test_the_victim_law_during_sieges(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    server: LawServer = request.getfixturevalue(kind)
    stored = server.store()
    server.times_of_victim(stored, 1)  # starts the helper process
    with SIEGES[name](server):
        times = server.times_of_victim(stored, 8)
    assert times.pop("health") < 0.5
    assert max(times.values()) < 2.0, times


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
