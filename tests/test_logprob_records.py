"""Packed logprobs read as the objects that were packed."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.logprob_records import LogprobRecords, TokenLogprob, pack_records

ITEMS = [
    TokenLogprob(7, -0.5, 1, ((7, -0.5), (3, -1.25))),
    TokenLogprob(131071, float(np.float32(-17.3)), 5000, ((1, -0.125),)),
    TokenLogprob(0, -2.0, 3),
]


def test_items_come_back() -> None:
    records = LogprobRecords(2)
    records.extend(ITEMS)
    assert (len(records), list(records), records[1], records[-2:]) == (3, ITEMS, ITEMS[1], ITEMS[1:])
    assert records == ITEMS
    assert LogprobRecords(2, records.packed(1)) == ITEMS[1:]
    assert LogprobRecords(2, records.packed(0, 2)) == ITEMS[:2]


def test_copies_are_independent_and_grow_after_they_were_read() -> None:
    records = LogprobRecords(2)
    records.append(ITEMS[0])
    assert records[0] == ITEMS[0]
    twin = records.copy()
    records.append(ITEMS[1])
    twin.append(ITEMS[2])
    assert (list(records), list(twin)) == (ITEMS[:2], [ITEMS[0], ITEMS[2]])


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_a_sequence_takes_the_beginning_of_a_longer_record(num_top: int) -> None:
    ids, values = np.array([[4, 5], [6, 0]], np.int32), np.array([[-1.0, -2.0], [-3.0, np.nan]], np.float32)
    heads = np.array([9, 8], np.int32), np.array([-4.0, -5.0], np.float32), np.array([2, 1], np.int32)
    words = pack_records(*heads, np.minimum([2, 1], num_top), ids, values, 2)
    records = LogprobRecords(num_top)
    for row in words:
        records.add(row.tobytes()[: records.num_bytes])
    assert records[0] == TokenLogprob(9, -4.0, 2, ((4, -1.0), (5, -2.0))[:num_top])
    assert records[1] == TokenLogprob(8, -5.0, 1, ((6, -3.0),)[:num_top])


def test_records_can_be_written_again() -> None:
    records, again = LogprobRecords(2), LogprobRecords(2)
    again.extend(ITEMS)
    records.put(0, again.packed(0, 2))
    records.put(1, again.packed(1))
    assert records == ITEMS
