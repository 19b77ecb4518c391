"""The rows of a step as paged-attention kernels take them: decode rows and prompt chunks apart, all indices from zero.

Owns: cutting a ragged batch in two, and filling decode rows up to a fixed number.
Does not know: any kernel library; all arrays are numpy on the host.
Next on the path: `attention/flashinfer_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from busllm.engine.batch import Int32s, RaggedBatch


@dataclass(frozen=True)
class PagedRows:
    """Some rows of a step.

    Attributes:
        qo_indptr: int32 (num_rows + 1,); row r has the queries qo_indptr[r] : qo_indptr[r + 1] of this part.
        indptr: int32 (num_rows + 1,); row r has the pages indices[indptr[r] : indptr[r + 1]].
        indices: int32, pages in the order of positions.
        last_page_len: int32 (num_rows,), tokens in each row's last page, 1 … page_tokens.
    """

    qo_indptr: Int32s
    indptr: Int32s
    indices: Int32s
    last_page_len: Int32s

    @property
    def num_rows(self) -> int:
        """Rows of this part."""
        return len(self.last_page_len)


def decode_rows(batch: RaggedBatch) -> PagedRows:
    """The leading rows with one token each; may be none."""
    return _part(batch, 0, batch.num_decode_rows)


def prefill_rows(batch: RaggedBatch) -> PagedRows:
    """The prompt chunks that follow; may be none."""
    return _part(batch, batch.num_decode_rows, batch.num_rows)


def pad_decode_rows(rows: PagedRows, num_rows: int, scratch_page: int) -> PagedRows:
    """Fills decode rows up to a fixed number.

    Args:
        rows: one query each, at most `num_rows` rows.
        num_rows: wanted.
        scratch_page: what the added rows read: one token of a page that no sequence has.
    """
    missing = num_rows - rows.num_rows
    added = np.arange(1, missing + 1, dtype=np.int32)
    return PagedRows(
        qo_indptr=np.arange(num_rows + 1, dtype=np.int32),
        indptr=np.concatenate((rows.indptr, rows.indptr[-1] + added)),
        indices=np.concatenate((rows.indices, np.full(missing, scratch_page, dtype=np.int32))),
        last_page_len=np.concatenate((rows.last_page_len, np.ones(missing, dtype=np.int32))),
    )


def _part(batch: RaggedBatch, first: int, end: int) -> PagedRows:
    indptr = batch.indptr[first : end + 1]
    queries = batch.cu_seqlens[first : end + 1]
    return PagedRows(
        qo_indptr=queries - queries[0],
        indptr=indptr - indptr[0],
        indices=batch.indices[indptr[0] : indptr[-1]],
        last_page_len=batch.last_page_len[first:end],
    )
