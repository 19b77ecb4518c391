"""Columns of the batches: taken apart with their lengths checked.

Owns: the check that a batch's columns belong together, so that nothing behind it has to.
Does not know: what the columns mean.
"""

from __future__ import annotations

import itertools

from busllm.errors import MalformedMessage
from busllm.messages.codec import unpack_ids


def unpack_column(packed: bytes, num_rows: int) -> list[int]:
    """Unpacks one int32 per row.

    Raises:
        MalformedMessage: another number of entries.
    """
    column: list[int] = unpack_ids(packed).tolist()
    if len(column) != num_rows:
        raise MalformedMessage(f"A column has {len(column)} entries for {num_rows} rows.")
    return column


def unpack_rows(offsets: bytes, token_ids: bytes, num_rows: int) -> list[list[int]]:
    """Unpacks the token ids of each row.

    Raises:
        MalformedMessage: the offsets do not divide the ids into that many rows.
    """
    bounds = unpack_column(offsets, num_rows + 1)
    ids: list[int] = unpack_ids(token_ids).tolist()
    if bounds[0] != 0 or bounds[-1] != len(ids) or any(a > b for a, b in itertools.pairwise(bounds)):
        raise MalformedMessage(f"Offsets do not divide {len(ids)} token ids into {num_rows} rows.")
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def check_row_numbers(rows: set[int], num_rows: int) -> None:
    """Checks rows that are named by number.

    Raises:
        MalformedMessage: one does not exist.
    """
    if rows and not 0 <= min(rows) <= max(rows) < num_rows:
        raise MalformedMessage(f"A row beyond the {num_rows} rows of the batch is named.")
