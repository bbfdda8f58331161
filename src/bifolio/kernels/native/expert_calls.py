"""Experts of the native kernels as functions that the stream of a device calls (`native/module_host.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.kernels.operands import Experts


@dataclass(frozen=True, slots=True)
class NativeExpertCalls:
    """Implements `ExpertCalls`."""

    native: Any
    pool: Any  # of the kernel set; None: that of the process

    def new_room(self) -> Any:
        return self.native.HostRoom()

    def new_call(self, experts: Experts, room: Any, sent: np.ndarray, mixed: np.ndarray) -> Any:
        return self.native.ExpertCall(experts.prepared, room, sent, mixed, self.pool)

    def product_rate(self) -> float:
        return float(self.native.product_rate(True, self.pool))
