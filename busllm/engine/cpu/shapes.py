"""What the compiled step is given: the model, the sizes and the working memory, as arrays that numba understands.

Owns: the tuples and their fields.
Does not know: how they are filled (`cpu_decoder.py`) and read (`step.py` and below).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]

VECTOR = 16  # numbers in a vector: widths are padded to whole vectors
GROUP = 32  # inputs that share a scale: inputs are padded to whole groups
FEW_ROWS = 4  # rows that one core has done before others would have woken up
MOST_OUTLIERS = 8  # inputs of a linear that are kept apart: see `outliers.py`


class Format(IntEnum):
    """Number format of a linear's weights."""

    INT4 = 0
    INT8 = 1
    BFLOAT16 = 2


class Part(IntEnum):
    """The linears of a layer, in the order of their use."""

    QUERIES_KEYS_VALUES = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class Field(IntEnum):
    """What is said of a linear, in the order of the int64 array that says it.

    (A parallel loop of numba takes arrays, but no records.)
    """

    FORMAT = 0  # a `Format`
    WEIGHTS = 1  # address, 64-byte aligned
    BIAS = 2  # address of float32 (16 * number of tiles)
    NUM_TILES = 3  # of 16 outputs
    NUM_GROUPS = 4  # of 32 inputs
    CHANNELS = 5  # address of int64, the inputs that are multiplied in float32
    NUM_CHANNELS = 6  # at most `MOST_OUTLIERS`


class Sizes(NamedTuple):
    """Numbers of the model.

    Attributes:
        gate_size, expert_size: padded widths of dense feed-forward layers and of experts; 0 without any.
        normalizes: the shares of a row's experts are scaled to sum to 1.
    """

    num_layers: int
    hidden_size: int
    gate_size: int
    expert_size: int
    normalizes: bool
    norm_epsilon: float


class Heads(NamedTuple):
    """Numbers of attention and its cache; `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    padded_head_dim: int
    page_tokens: int
    num_threads: int
    scale: float


class Model(NamedTuple):
    """Weights.

    Attributes:
        linears: int64 (num_layers, 4, 7), by `Part` and `Field`; GATE_UP and DOWN of a layer with experts are those of
            all its experts, one after the other.
        embedding, head: int64 (7,).
        norms: float32 (2 * num_layers + 1, padded hidden_size): before attention and before feed-forward of each layer,
            and the last one.
        head_norms: float32 (num_layers, 2, head_dim), of queries and keys; no layers where the model has none.
        has_experts: bool (num_layers,).
        routers: float32 (num_layers, num_experts, padded hidden_size), zeros where a layer has none; no layers where
            none has.
        windows: int64 (num_layers,), how many positions a token sees.
        cosines, sines: float32 (positions, head_dim / 2).
    """

    linears: Array
    embedding: Array
    head: Array
    norms: Array
    head_norms: Array
    has_experts: Array
    routers: Array
    windows: Array
    cosines: Array
    sines: Array


class Batch(NamedTuple):
    """A step's tokens.

    Attributes:
        token_ids, positions, cache_slots: int64 (num_tokens,).
        items: int64 (num_items, 6), pieces of attention: (row, KV head, first query head, query heads, first token,
            tokens).
        pages, page_starts: int64; row r has the pages pages[page_starts[r] : page_starts[r + 1]].
    """

    token_ids: Array
    positions: Array
    cache_slots: Array
    items: Array
    pages: Array
    page_starts: Array


class Cache(NamedTuple):
    """Keys and values of all layers.

    A page's layers lie together: the operating system gives memory on first use, in blocks of up to 2 MB, and a page
    in as many places as there are layers would want a block for each.

    Attributes:
        keys: uint16 (num_pages, num_layers, num_kv_heads, page_tokens / 16, head_dim / 2, 16, 2): bfloat16, of each
            16 tokens the pairs of dimensions.
        values: uint16 (num_pages, num_layers, num_kv_heads, page_tokens / 16, 8, padded head_dim, 2): the pairs of
            tokens.
    """

    keys: Array
    values: Array


class Workspace(NamedTuple):
    """Memory for a step of at most as many tokens as it has rows. Padding is zero and stays so.

    Attributes:
        states: float32, the residual stream.
        branch: float32, what attention or feed-forward adds to it.
        normed: float32, input of a linear.
        merged: float32, queries, keys and values.
        queries: uint16 (rows, num_heads * head_dim), bfloat16, rotated and scaled.
        attended: float32.
        gated: float32, gate and up.
        inputs: uint8 (rows, bytes of the widest), of a linear, by piece, see `inputs.py`.
        outliers: float32 (rows, MOST_OUTLIERS), inputs that are kept apart from the bytes.
        peaks: float32 (4 * num_layers + 1, widest input) while outliers are looked for, the largest magnitude of each
            input of each linear; else no rows.
        num_parts: equal parts of a linear's work, one for each thread that there may be.
    """

    states: Array
    branch: Array
    normed: Array
    merged: Array
    queries: Array
    attended: Array
    gated: Array
    inputs: Array
    outliers: Array
    peaks: Array
    num_parts: int


class Mixture(NamedTuple):
    """Memory of a step for layers with experts. A visit is one row at one of its experts.

    Attributes:
        scores: float32 (rows, padded num_experts), the router's.
        chosen: int64 (rows, experts_per_token), a row's experts, its favourite first.
        shares: float32, likewise: what each of them counts.
        places: int64, likewise: which visit it is.
        firsts: int64 (num_experts + 1,): expert e has the visits from firsts[e] up to firsts[e + 1].
        visits: what happens at the experts; only `branch`, `gated` and `inputs` with what belongs to them have a width.
    """

    scores: Array
    chosen: Array
    shares: Array
    places: Array
    firsts: Array
    visits: Workspace


def padded(size: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit
