"""A mixture of experts: which experts a row goes through, its way there, and the sum of what comes back.

Owns: the router's arithmetic and choice, the order of the visits (a visit is one row at one expert), and the weighted
sum. All of it depends on the row alone, so a row has the same bits in every batch.
Does not know: what an expert computes: its matrices lie one after the other, `linear.py` multiplies by them.
Next on the path: `step.py`.

It computes what `engine/layers/experts.py` describes. The router is float32 throughout: what it rounds would send a row
to another expert.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from busllm.engine.cpu import lanes
from busllm.engine.cpu.inputs import prepare_row, rows_beside
from busllm.engine.cpu.shapes import FEW_ROWS, VECTOR

_float = np.float32
_VECTOR_BYTES = VECTOR * 4
_TAKEN = np.float32(-1.0)  # no share


@njit(nogil=True)
def choose_experts(router, normalizes, normed, rows, mixture):
    """Fills in `chosen`, `shares`, `places` and `firsts` of a `Mixture`.

    Args:
        router: float32 (num_experts, padded hidden_size).
        normalizes: a row's shares are scaled to sum to 1.
        normed: float32 (at least rows, padded hidden_size).
        rows: how many.
        mixture: a `Mixture`.
    """
    _score(router, normed, rows, mixture.scores)
    for row in range(rows):
        _choose(len(router), normalizes, mixture.scores[row], mixture.chosen[row], mixture.shares[row])
    _sort(len(router), rows, mixture)


@njit(nogil=True, parallel=True)
def _score(router, normed, rows, scores):
    """scores[row, expert] = normed[row] · router[expert]"""
    for index in prange(len(router)):
        expert = np.int64(index)
        weights = router[expert].ctypes.data
        for row in range(rows):
            scores[row, expert] = _dot(weights, normed[row].ctypes.data, router.shape[1])


@njit(nogil=True)
def _dot(weights, states, width):
    """Of addresses of float32; `width` is a multiple of 32. Two sums side by side need not wait for each other."""
    even, odd = lanes.splat(_float(0.0)), lanes.splat(_float(0.0))
    for place in range(0, width * 4, 2 * _VECTOR_BYTES):
        even = lanes.multiply_add(lanes.load(weights + place), lanes.load(states + place), even)
        second = place + _VECTOR_BYTES
        odd = lanes.multiply_add(lanes.load(weights + second), lanes.load(states + second), odd)
    return lanes.total(lanes.add(even, odd))


@njit(nogil=True, error_model="numpy")  # a division by zero gives a number that is not finite
def _choose(num_experts, normalizes, scores, chosen, shares):
    """The experts with the largest shares of softmax(scores), of equal ones those with the smaller numbers.

    Numbers that are not finite give shares that are not, and experts that exist.
    """
    scores[num_experts:] = -np.inf
    first, num_bytes = scores.ctypes.data, len(scores) * 4
    largest = lanes.load(first)
    for place in range(_VECTOR_BYTES, num_bytes, _VECTOR_BYTES):
        largest = lanes.larger(largest, lanes.load(first + place))
    most, summed = lanes.splat(lanes.largest(largest)), lanes.splat(_float(0.0))
    for place in range(0, num_bytes, _VECTOR_BYTES):
        x = lanes.exponential(lanes.subtract(lanes.load(first + place), most))
        lanes.store(first + place, x)
        summed = lanes.add(summed, x)
    total = lanes.total(summed)
    for choice in range(len(chosen)):
        best = -1
        for expert in range(num_experts):
            if scores[expert] != _TAKEN and (best < 0 or scores[expert] > scores[best]):
                best = expert
        chosen[choice], shares[choice] = best, scores[best] / total
        scores[best] = _TAKEN
    if normalizes:
        total = _float(0.0)
        for choice in range(len(chosen)):
            total += shares[choice]
        for choice in range(len(chosen)):
            shares[choice] /= total


@njit(nogil=True)
def _sort(num_experts, rows, mixture):
    """Visits in the order of experts, each expert's in the order of rows."""
    chosen, places, firsts = mixture.chosen, mixture.places, mixture.firsts
    counts = np.zeros(num_experts, np.int64)
    for row in range(rows):
        for choice in range(chosen.shape[1]):
            expert = chosen[row, choice]
            places[row, choice] = counts[expert]  # among the visits of this expert
            counts[expert] += 1
    firsts[0] = 0
    for expert in range(num_experts):
        firsts[expert + 1] = firsts[expert] + counts[expert]
    for row in range(rows):
        for choice in range(chosen.shape[1]):
            places[row, choice] += firsts[chosen[row, choice]]


@njit(nogil=True)
def send_rows(linear, normed, rows, places, firsts, visits):
    """Makes each row the input of each of its visits; meanwhile `normed` has zeros where inputs are kept apart.

    Args:
        linear: of the experts, int64, by `Field`.
        normed: float32 (at least rows, padded hidden_size).
        rows: how many.
        places, firsts, visits: of a `Mixture`; `visits` gets them.
    """
    if rows <= FEW_ROWS:
        for row in range(rows):
            _send_row(linear, normed, row, places, firsts, visits)
    else:
        _send_many(linear, normed, rows, places, firsts, visits)


@njit(nogil=True, parallel=True)
def _send_many(linear, normed, rows, places, firsts, visits):
    for index in prange(rows):
        row = np.int64(index)  # as in the loop without threads, so that it is compiled once
        _send_row(linear, normed, row, places, firsts, visits)


@njit(nogil=True)
def _send_row(linear, normed, row, places, firsts, visits):
    for visit in places[row]:
        first, end = rows_beside(visit, firsts)
        prepare_row(linear, visits, visit, first, end, normed[row].ctypes.data)


@njit(nogil=True, parallel=True)
def add_visits(mixture, rows, out):
    """out[row] = the sum over the row's visits of share * result, in the order of its choices; out: float32."""
    results, places, shares = mixture.visits.branch, mixture.places, mixture.shares
    for index in prange(rows):
        row = np.int64(index)
        to = out[row].ctypes.data
        for place in range(0, out.shape[1] * 4, _VECTOR_BYTES):
            summed = lanes.splat(_float(0.0))
            for choice in range(places.shape[1]):
                result = lanes.load(results[places[row, choice]].ctypes.data + place)
                summed = lanes.multiply_add(lanes.splat(shares[row, choice]), result, summed)
            lanes.store(to + place, summed)
