"""Tests the exponential backoff."""

from exporter.clock import Backoff


def test_pauses_double_up_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(5, 60)
    assert [backoff.fail() for _ in range(6)] == [5, 10, 20, 40, 60, 60]
    assert backoff.failures == 6
    backoff.reset()
    assert (backoff.failures, backoff.fail()) == (0, 5)


def test_however_often_it_fails_the_pause_stays_a_number() -> None:
    backoff = Backoff(0.5, 30.0)
    assert {backoff.fail() for _ in range(5000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0}


def test_a_first_pause_beyond_the_longest_is_the_longest() -> None:
    assert Backoff(90, 60).fail() == 60
