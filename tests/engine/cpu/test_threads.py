"""The choice between all cores and one."""

from __future__ import annotations

import os
import subprocess
import sys

from busllm.engine.cpu.threads import FIRST_STEPS, MANY_ROWS, RARE_TRIAL_EVERY, TRIAL_EVERY, ThreadChoice


def run(choice: ThreadChoice, rows: int, times_s: dict[int, float], steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        threads = choice.choose(rows)
        choice.took(rows, threads, times_s[threads])
        chosen.append(threads)
    return chosen


def test_one_core_is_taken_where_it_is_clearly_faster_and_the_other_choice_tried_now_and_then() -> None:
    chosen = run(ThreadChoice(4), 1, {1: 0.0025, 4: 0.002}, 5 * TRIAL_EVERY)
    assert chosen[:FIRST_STEPS] == [4, 1, 4, 1]
    assert chosen.count(1) == FIRST_STEPS // 2 + 5
    chosen = run(ThreadChoice(4), 1, {1: 0.003, 4: 0.020}, 4 * RARE_TRIAL_EVERY)
    assert chosen.count(4) == FIRST_STEPS // 2 + 4
    chosen = run(ThreadChoice(4), 1, {1: 0.0019, 4: 0.002}, 5 * TRIAL_EVERY)
    assert chosen.count(1) == FIRST_STEPS // 2 + 5


def test_single_late_steps_do_not_change_the_choice_nor_does_a_late_beginning() -> None:
    choice = ThreadChoice(2)
    choice.took(2, 2, 0.5)
    assert run(choice, 2, {1: 0.003, 2: 0.002}, 20)[FIRST_STEPS:].count(1) == 0
    for _ in range(4):
        choice.took(2, 2, 0.1)
    assert choice.choose(2) == 2


def test_it_changes_its_mind_when_the_machine_gets_busy_and_when_it_is_free_again() -> None:
    choice = ThreadChoice(2)
    run(choice, 2, {1: 0.003, 2: 0.002}, 50)
    assert run(choice, 2, {1: 0.004, 2: 0.030}, 50)[-16:].count(2) <= 1
    assert run(choice, 2, {1: 0.003, 2: 0.002}, RARE_TRIAL_EVERY + 16)[-16:].count(1) <= 1


def test_steps_of_other_sizes_are_judged_by_themselves() -> None:
    choice = ThreadChoice(2)
    run(choice, 1, {1: 0.001, 2: 0.002}, 10)
    assert choice.choose(8) == 2


def test_large_steps_always_get_all_cores() -> None:
    assert set(run(ThreadChoice(2), MANY_ROWS, {1: 0.001, 2: 0.5}, 10)) == {2}


def test_one_core_leaves_no_choice() -> None:
    assert run(ThreadChoice(1), 1, {1: 0.001}, 3) == [1, 1, 1]


COUNT = """
from busllm.engine.cpu.kernels import prepare_kernels
prepare_kernels()
import numba, numpy, torch
@numba.njit(parallel=True)
def double(x):
    for i in numba.prange(len(x)):
        x[i] *= 2
double(numpy.ones(8))
print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_compiled_code_keeps_to_the_number_of_threads_that_openmp_was_given() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
