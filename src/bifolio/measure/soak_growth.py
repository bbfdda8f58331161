"""Growth of one process of a soak test: a robust slope of its memory, with a lower bound.

    memory  |  warm-up, 40 %  |  block 0  |  block 1  |  ...  |  block 11  |
    floor                     the memory that a tenth of the samples of a block stay below

A floor leaves out the memory of requests in flight: clients pause now and then, and where there are enough samples of
such moments, only those are read. The largest rise between neighbouring floors is taken out, since an allocator may
grow in one step, once. The slope is the median over all pairs of floors
(Theil and Sen), and its bound comes from the number of pairs that noise may put in the wrong order (Kendall).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WARM_UP = 0.4  # share of a life that is not judged
NUM_BLOCKS = 12
FLOOR = 0.1
SIGMAS = 1.28  # a bound that noise without a slope passes in one of ten runs, if the limit were 0
MIN_SAMPLES = 8  # after the warm-up
MIN_QUIET = 14  # samples of moments without requests, of a whole life


class Growth(NamedTuple):
    """MiB per minute."""

    slope: float
    least: float  # the slope is above this, as far as the noise allows to tell


def growth_of(times: np.ndarray, memory: np.ndarray) -> Growth | None:
    """The growth of a process with so much memory (MiB) at these times (s); None if its life was too short to tell."""
    first = int(len(times) * WARM_UP)
    minutes, values = np.asarray(times[first:], float) / 60, np.asarray(memory[first:], float)
    if len(minutes) < MIN_SAMPLES:
        return None
    count = min(NUM_BLOCKS, len(minutes))
    parts = np.array_split(np.arange(len(minutes)), count)
    centres = np.array([minutes[part].mean() for part in parts])
    floors = _without_one_step(np.array([np.quantile(values[part], FLOOR) for part in parts]))
    earlier, later = np.triu_indices(count, 1)
    slopes = np.sort((floors[later] - floors[earlier]) / (centres[later] - centres[earlier]))
    spread = SIGMAS * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return Growth(float(np.median(slopes)), float(slopes[max(0, int((len(slopes) - spread) / 2))]))


def _without_one_step(floors: np.ndarray) -> np.ndarray:
    """Floors whose largest rise is an ordinary one; a rise may lie in two intervals."""
    rises = np.diff(floors)
    ordinary = float(np.median(rises))
    first = int(np.argmax(rises[:-1] + rises[1:]))
    rises[first : first + 2] = np.minimum(rises[first : first + 2], max(ordinary, 0.0))
    kept: np.ndarray = floors[0] + np.concatenate([[0.0], np.cumsum(rises)])
    return kept
