"""Random requests with any combination of options, in company, end as they do alone (`option_draws`).

`BIFOLIO_OPTION_DRAWS=20000` draws as many requests; `BIFOLIO_OPTION_SEED` repeats a run.
"""

from __future__ import annotations

import os
import random

import pytest
from option_draws import METHODS, NUM_ASKED, counts, run
from option_strategies import missing_strategies

from bifolio.config import SPECULATIVE_METHODS

DRAWS = int(os.environ.get("BIFOLIO_OPTION_DRAWS", "0"))
FEW_DRAWS = 240  # about 10 seconds on one core


def test_every_field_of_a_request_has_a_strategy() -> None:
    assert missing_strategies() == set()
    assert set(METHODS) - {""} == set(SPECULATIVE_METHODS)


@pytest.mark.full
@pytest.mark.timeout(24 * 3600 if DRAWS else 900)
@pytest.mark.parametrize("on_device", [False, True])
def test_options_together(on_device: bool) -> None:
    seed = int(os.environ.get("BIFOLIO_OPTION_SEED", "0")) or random.getrandbits(32)
    print(f"BIFOLIO_OPTION_SEED={seed}")
    counts.clear()
    wanted = DRAWS or FEW_DRAWS
    run(wanted // 3 if on_device else wanted, seed, on_device)
    assert counts["draws"] > wanted // NUM_ASKED
