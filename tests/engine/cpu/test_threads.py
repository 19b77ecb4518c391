"""How much of a step one core does alone."""

from __future__ import annotations

import os
import subprocess
import sys

from busllm.engine.cpu.threads import FIRST_STEPS, MANY_ROWS, RARE_TRIALS, SHARES, TRIAL_EVERY, ThreadChoice

QUIET = dict(zip(SHARES, (0.0020, 0.0024, 0.0028, 0.0035), strict=True))
BUSY = dict(zip(SHARES, (0.0300, 0.0240, 0.0180, 0.0040), strict=True))
ROUND = TRIAL_EVERY * (len(SHARES) - 1)  # steps in which each of the others has its turn


def run(choice: ThreadChoice, rows: int, times_s: dict[float, float], steps: int) -> list[float]:
    chosen = []
    for _ in range(steps):
        share = choice.choose(rows)
        choice.took(rows, share, times_s[share])
        chosen.append(share)
    return chosen


def test_the_fastest_share_is_taken_and_the_others_are_tried_now_and_then() -> None:
    for fastest in SHARES:
        times_s = dict.fromkeys(SHARES, 0.0028) | {fastest: 0.002}
        chosen = run(ThreadChoice(4), 1, times_s, FIRST_STEPS + 2 * ROUND)
        assert sorted(chosen[:FIRST_STEPS]) == sorted(2 * SHARES)
        later = chosen[FIRST_STEPS:]
        assert [later.count(share) for share in SHARES if share != fastest] == [2, 2, 2]


def test_one_that_was_much_slower_is_tried_rarely() -> None:
    chosen = run(ThreadChoice(4), 1, BUSY, FIRST_STEPS + RARE_TRIALS * ROUND)[FIRST_STEPS:]
    assert [chosen.count(share) for share in SHARES[:-1]] == [1, 1, 1]


def test_one_core_alone_has_to_win_clearly() -> None:
    choice = ThreadChoice(2)
    assert run(choice, 1, QUIET | {1.0: 0.0018}, 20)[-1] == 0.0
    assert run(choice, 1, QUIET | {1.0: 0.0015}, FIRST_STEPS + 2 * ROUND)[-1] == 1.0


def test_single_late_steps_do_not_change_the_choice_nor_does_a_late_beginning() -> None:
    choice = ThreadChoice(2)
    choice.took(2, 0.0, 0.5)
    assert set(run(choice, 2, QUIET, 20)[FIRST_STEPS:]) == {0.0}
    for _ in range(4):
        choice.took(2, 0.0, 0.1)
    assert choice.choose(2) == 0.0


def test_it_changes_its_mind_when_the_machine_gets_busy_and_when_it_is_free_again() -> None:
    choice = ThreadChoice(2)
    run(choice, 2, QUIET, 50)
    assert run(choice, 2, BUSY, 50)[-16:].count(1.0) >= 14
    assert run(choice, 2, QUIET, RARE_TRIALS * ROUND + 16)[-16:].count(0.0) >= 15


def test_steps_of_other_sizes_are_judged_by_themselves() -> None:
    choice = ThreadChoice(2)
    run(choice, 1, BUSY, FIRST_STEPS + 4)
    assert run(choice, 8, QUIET, FIRST_STEPS + 4)[-1] == 0.0


def test_large_steps_always_get_all_cores() -> None:
    assert set(run(ThreadChoice(2), MANY_ROWS, BUSY, 10)) == {0.0}


def test_one_core_leaves_no_choice() -> None:
    assert run(ThreadChoice(1), 1, QUIET, 3) == [1.0, 1.0, 1.0]


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
