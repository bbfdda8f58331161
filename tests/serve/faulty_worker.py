"""An engine process whose forward pass fails, hangs or dies when a certain token is in the batch."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from bifolio.engine.executor import ModelRunner
from bifolio.serve.process import worker

FAIL, DIE, HANG = 300, 301, 302  # token ids that no test uses otherwise


def main() -> None:
    plain = ModelRunner.run

    def run(self: ModelRunner, batch: Any) -> Any:
        tokens = np.asarray(batch.token_ids)
        if (tokens == FAIL).any():
            raise ArithmeticError("a kernel failed")
        if (tokens == DIE).any():
            os._exit(17)
        if (tokens == HANG).any():
            time.sleep(1000)
        return plain(self, batch)

    ModelRunner.run = run  # type: ignore[method-assign]
    worker.main()


if __name__ == "__main__":
    main()
