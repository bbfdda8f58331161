"""Every operation of every kernel set against `reference`, over the table of `operation_cases`.

A set that lacks a member of the protocol fails, and so does a member of the protocol without a case. The interpreter's
run and the GPU's import these tests and find their own kernels under the fixture.
"""

from __future__ import annotations

from typing import Any

import pytest
from case_table import activations, protocol_members
from operation_cases import CASES, check_operation
from phase_checks import PHASE_KERNELS, check_decode_needs_a_cache, check_phase_selects

from bifolio.kernels.interface import AttentionPhase, KernelSet
from bifolio.kernels.operation_hook import OPERATIONS, hooked
from helpers import cpu_kernel_names, make_kernels

MEMBERS = protocol_members(KernelSet)


@pytest.fixture(scope="module", params=cpu_kernel_names())
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return make_kernels(request.param)


def test_every_member_of_the_protocol_has_a_case() -> None:
    assert {case.member for case in CASES.values()} == MEMBERS
    assert {"attend", "record", "formats", "launches_ahead"} <= MEMBERS  # inherited, a method, and bare annotations


def test_the_set_has_every_member_of_the_protocol(kernels: KernelSet) -> None:
    assert not MEMBERS - set(dir(kernels))


def test_a_hook_sees_every_operation_of_the_protocol(kernels: KernelSet) -> None:
    assert {"attend", "linear", "logits", "tap"} <= OPERATIONS <= MEMBERS
    seen: list[str] = []

    def hook(name: str, work: Any, *arguments: Any) -> Any:
        seen.append(name)
        return work(*arguments)

    watched = hooked(kernels, hook)
    assert not MEMBERS - set(dir(watched))
    check_operation("add_norm", watched)
    assert set(seen) == {"add_norm", "linear"}
    assert watched.device_slots(None, None, None) is None  # type: ignore[arg-type]
    assert hooked(kernels, hook, one_by_one=True).record(None, AttentionPhase.DECODE) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_operation_equals_the_reference(name: str, kernels: KernelSet) -> None:
    check_operation(name, kernels)


def test_a_wrong_operation_is_noticed(kernels: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = kernels.add

    def broken(x: Any, y: Any) -> Any:
        total = kernels.to_host(honest(x, y)).copy()
        total[-1, -1] *= 1.25
        return activations(kernels, total)

    monkeypatch.setattr(kernels, "add", broken)
    with pytest.raises(AssertionError, match="add, output 0"):
        check_operation("add", kernels)


# -- the phase of a segment selects the kernel -------------------------------------------------------------------------
WATCHED = [name for name in cpu_kernel_names() if name in PHASE_KERNELS]  # native/selftest.cpp tests the native set's


@pytest.mark.parametrize("phase", AttentionPhase)
@pytest.mark.parametrize("name", WATCHED)
def test_the_phase_selects_the_attention_kernel(
    name: str, phase: AttentionPhase, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_phase_selects(make_kernels(name), phase, monkeypatch)


def test_a_decode_segment_without_a_cache_is_an_error(kernels: KernelSet) -> None:
    check_decode_needs_a_cache(kernels)
