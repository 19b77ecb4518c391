"""Pauses between attempts, and how often they are logged."""

from __future__ import annotations

from busllm.bus.retry import RetryPace, RetryTimings


def test_pauses_double_up_to_the_limit_and_half_of_each_is_random() -> None:
    paces = [RetryPace(RetryTimings(first_pause_s=0.1, max_pause_s=2.0)) for _ in range(50)]
    for whole_s in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        pauses = {pace.next_pause_s() for pace in paces}
        assert all(whole_s / 2 <= pause <= whole_s for pause in pauses)
        assert len(pauses) > 40, "many clients spread out"


def test_after_a_reset_the_pauses_are_short_again() -> None:
    pace = RetryPace(RetryTimings())
    for _ in range(10):
        pace.next_pause_s()
    pace.reset()
    assert pace.next_pause_s() <= 0.1


def test_the_first_failure_is_logged_and_the_next_ones_are_not() -> None:
    pace = RetryPace(RetryTimings(first_log_interval_s=3600))
    assert [pace.is_time_to_log() for _ in range(100)] == [True] + [False] * 99
    pace.reset()
    assert pace.is_time_to_log()


def test_failures_are_logged_again_after_growing_intervals() -> None:
    pace = RetryPace(RetryTimings(first_log_interval_s=1e-9, max_log_interval_s=3600))
    logged = sum(pace.is_time_to_log() for _ in range(10_000))
    assert 2 < logged < 60
