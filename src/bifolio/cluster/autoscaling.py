"""Autoscaling on waiting requests: more replicas when requests wait for slots, fewer when slots stay empty.

The numbers are those of the engines (`EngineReplica.record_autoscaling_stats`). Ray serialises the function with this
module, so everything it needs is here.
"""

from __future__ import annotations

import math
from typing import Any

TARGET_USE = 0.8  # of all slots, after scaling down
NAMES = ("waiting", "running", "slots")


def wanted_replicas(current: int, waiting: float, running: float, slots: float) -> int:
    """Replicas whose slots hold all requests: `slots` is the number of slots of all `current` replicas."""
    if current < 1 or slots <= 0:
        return max(current, 1)
    per_replica = slots / current
    if waiting > 0:
        return current + max(math.ceil(waiting / per_replica), 1)
    return max(min(math.ceil(running / (per_replica * TARGET_USE)), current), 1)


def by_waiting_requests(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: (wanted number of replicas, state to keep)."""
    metrics = context.aggregated_metrics or {}
    sums = {name: sum((metrics.get(name) or {}).values()) for name in NAMES}
    wanted = wanted_replicas(context.current_num_replicas, sums["waiting"], sums["running"], sums["slots"])
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, low), high), context.policy_state or {}
