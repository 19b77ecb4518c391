"""The choice between all cores and one."""

from __future__ import annotations

from busllm.engine.cpu.threads import RARE_TRIAL_EVERY, TRIAL_EVERY, ThreadChoice


def run(choice: ThreadChoice, rows: int, times_s: dict[int, float], steps: int) -> list[int]:
    chosen = []
    for _ in range(steps):
        threads = choice.choose(rows)
        choice.took(rows, threads, times_s[threads])
        chosen.append(threads)
    return chosen


def test_the_faster_choice_is_taken_and_the_other_tried_now_and_then() -> None:
    chosen = run(ThreadChoice(4), 1, {1: 0.0025, 4: 0.002}, 5 * TRIAL_EVERY)
    assert chosen[:2] == [4, 1]
    assert chosen.count(1) == 6
    chosen = run(ThreadChoice(4), 1, {1: 0.003, 4: 0.020}, 4 * RARE_TRIAL_EVERY)
    assert chosen.count(4) == 5


def test_it_changes_its_mind_when_the_machine_gets_busy_and_when_it_is_free_again() -> None:
    choice = ThreadChoice(2)
    run(choice, 2, {1: 0.003, 2: 0.002}, 50)
    assert run(choice, 2, {1: 0.004, 2: 0.030}, 50)[-16:].count(2) <= 1
    assert run(choice, 2, {1: 0.003, 2: 0.002}, 10 * RARE_TRIAL_EVERY)[-16:].count(1) <= 1


def test_steps_of_other_sizes_are_judged_by_themselves() -> None:
    choice = ThreadChoice(2)
    run(choice, 1, {1: 0.001, 2: 0.002}, 10)
    assert choice.choose(8) == 2


def test_one_core_leaves_no_choice() -> None:
    assert run(ThreadChoice(1), 1, {1: 0.001}, 3) == [1, 1, 1]
