"""Runs of 64 keys: where in memory the pages of a sequence hold them.

Owns: the arithmetic from positions to addresses.
Does not know: what is done with keys and values (`attention.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from numba import njit

BLOCK = 16  # tokens whose keys are stored together
RUN = 64  # keys per step of the softmax
BLOCKS_PER_RUN = RUN // BLOCK


class Pages(NamedTuple):
    """Where the keys and values of one KV head are: addresses in page 0, bytes from page to page."""

    keys: int
    values: int
    key_page_bytes: int
    value_page_bytes: int
    blocks_per_page: int


@njit(nogil=True)
def find_pages(item, keys, values, layer, batch, heads):
    """Where one KV head's keys and values are in a layer, and the pages of a piece's sequence."""
    sequence, kv_head = batch.items[item, 0], batch.items[item, 1]
    where = Pages(
        keys[0, layer, kv_head].ctypes.data,
        values[0, layer, kv_head].ctypes.data,
        keys[0].nbytes,
        values[0].nbytes,
        heads.page_tokens // BLOCK,
    )
    return where, batch.pages[batch.page_starts[sequence] : batch.page_starts[sequence + 1]]


@njit(nogil=True)
def first_run(position, window):
    """The first run that a token at a position sees."""
    return max(0, position - window + 1) // RUN


@njit(nogil=True)
def find_run(run, where, pages, width, dim):
    """Addresses of a run's four blocks of keys, and of values.

    Args:
        run: number of 64 positions, from the sequence's first.
        where, pages: of `find_pages`.
        width, dim: numbers of a value, padded, and of a key.
    """
    block = run * BLOCKS_PER_RUN
    k0, v0 = _find_block(block, where, pages, width, dim)
    k1, v1 = _find_block(block + 1, where, pages, width, dim)
    k2, v2 = _find_block(block + 2, where, pages, width, dim)
    k3, v3 = _find_block(block + 3, where, pages, width, dim)
    return (k0, k1, k2, k3), (v0, v1, v2, v3)


@njit(nogil=True)
def _find_block(block, where, pages, width, dim):
    """Beyond the last page the first block stands in: there everything is masked."""
    each = where.blocks_per_page
    if block >= len(pages) * each:
        block = 0
    page, within = pages[block // each], block % each
    return (
        where.keys + page * where.key_page_bytes + within * (BLOCK * dim * 2),
        where.values + page * where.value_page_bytes + within * (BLOCK * width * 2),
    )
