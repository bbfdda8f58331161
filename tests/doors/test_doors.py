"""Every family through every door on the CPU: kernels x entries x options, sampled.

pytest tests/doors                            # all families with defaults, and some doors of each other kind
BIFOLIO_DOOR_SEED=7 pytest tests/doors        # the sample of another seed; without it, of the day
BIFOLIO_DOOR=all pytest -m slow tests/doors   # every door
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import date
from itertools import product
from typing import Any

import pytest
from door_models import HYBRID, ROW_FAMILIES, first_rows, has_gguf
from served import check_served_door
from stand_in_slots import MeasuredStandIn

from bifolio.errors import BifolioError
from bifolio.model.families import all_families
from bifolio.model.huggingface.hf_loader import load_folder
from doors import OPTIONS, Door, opened_llm, recorded
from helpers import cpu_kernel_names

pytestmark = pytest.mark.full  # transformers is slow to import
SEED = int(os.environ.get("BIFOLIO_DOOR_SEED") or date.today().toordinal())
KERNELS = [name for name in ("native", "reference") if name in cpu_kernel_names()]
FEW = {"max_num_seqs": 4, "token_budget": 64}  # sizes of a stand-in's step, which is measured on the host


def every_door() -> Iterator[Door]:
    """All doors on the CPU; a stand-in for a device has no ranks, and no server finds it."""
    for name, kernels, entry, option in product(ROW_FAMILIES, (*KERNELS, "stand-in"), ("folder", "gguf"), OPTIONS):
        is_possible = kernels != "stand-in" or option != "tensor parallel"
        if is_possible and (entry == "folder" or has_gguf(name)):
            yield Door(name, kernels, entry, option)
    for name, kernels, option in product(ROW_FAMILIES, KERNELS, OPTIONS):
        yield Door(name, kernels, "serve", option)


def sampled_doors() -> list[Door]:
    """A few doors of each kind by the seed: (kernels, entry, option) alternate, and so do hybrid and other models."""
    rng = random.Random(SEED)
    doors = list(every_door())
    rng.shuffle(doors)
    chosen = [door for door in doors if door.entry == "serve"][:1]
    chosen += [door for door in doors if door.option == "tensor parallel" and door.entry != "serve"][:1]
    quick = [door for door in doors if door.option != "tensor parallel" and door.entry != "serve"]
    for kernels, option in product((*KERNELS, "stand-in"), OPTIONS):
        chosen += [door for door in quick if (door.kernels, door.option) == (kernels, option)][:1]
    hybrids = [door for door in quick if door.is_hybrid and door.kernels == "stand-in" and door.option == "defaults"]
    return list(dict.fromkeys([*chosen, *hybrids[:4]]))


def open_door(door: Door) -> None:
    """Open and check a door, or see the refusal that its option announces for the family."""
    option = OPTIONS[door.option]
    settings: dict[str, Any] = {"threads": 1, "kernels": door.kernels, **door.settings}
    if door.kernels == "stand-in":
        settings |= {**FEW, "kernels": MeasuredStandIn(), "warm_up": False}
    if door.entry == "serve":
        check_served_door(door, door.tolerance)
    elif door.refusal is not None:
        with pytest.raises(BifolioError, match=door.refusal), opened_llm(door.path, **settings):
            pass
    else:
        with recorded(door), opened_llm(door.path, **settings) as entry:
            assert door.kernels != "stand-in" or "num_blocks" in settings or entry.llm.plan.step_bytes > 0
            option.check(entry, door.model, door.tolerance)


# -- rows ------------------------------------------------------------------------------------------------------------
def test_every_registered_family_has_a_row() -> None:
    assert set(ROW_FAMILIES.values()) == {family.name for family in all_families()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", first_rows().values())
def test_a_folder_with_default_options(name: str) -> None:
    door = Door(name, KERNELS[0], "folder", "defaults")
    config = load_folder(door.model.folder).config
    assert (config.architecture, config.recurrent is not None) == (door.family, door.family in HYBRID)
    open_door(door)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("door", sampled_doors(), ids=str)
def test_sampled_doors(door: Door) -> None:
    print(f"BIFOLIO_DOOR_SEED={SEED} gives this sample")
    open_door(door)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("BIFOLIO_DOOR") != "all", reason="set BIFOLIO_DOOR=all")
@pytest.mark.parametrize("door", every_door() if os.environ.get("BIFOLIO_DOOR") == "all" else [], ids=str)
def test_every_door(door: Door) -> None:
    open_door(door)
