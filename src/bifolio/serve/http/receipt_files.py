"""The receipts of all answers of a server, as files of one folder, one after another on a thread."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bifolio.api.receipts import write_receipt
from bifolio.errors import ConfigError

logger = logging.getLogger("bifolio.http")


class ReceiptFiles:
    """Writes `ID.json` for an answer with this id; answers that were aborted have no receipt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "bifolio-receipts")

    @classmethod
    def of(cls, folder: Path | None) -> ReceiptFiles | None:
        return None if folder is None else cls(folder)

    def put(self, answer_id: str, receipts: list[dict[str, Any]]) -> None:
        """Write the receipts of an answer, one for each prompt."""
        whole = [one for one in receipts if all(choice["finish_reason"] != "abort" for choice in one["answer"])]
        for number, receipt in enumerate(whole):
            name = answer_id if len(receipts) == 1 else f"{answer_id}-{number}"
            self._thread.submit(self._write, name, receipt)

    def close(self) -> None:
        """Wait for all files."""
        self._thread.shutdown()

    def _write(self, name: str, receipt: dict[str, Any]) -> None:
        try:
            write_receipt(self._folder, name, receipt)
        except ConfigError as error:
            logger.warning("a receipt was not written", extra={"reason": str(error)})
