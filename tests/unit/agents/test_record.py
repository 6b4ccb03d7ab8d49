"""The names of calls, by which a call that is asked again finds its answer."""

from rlflow.agents.record import EpisodeRecord


def test_a_repeated_call_has_the_name_of_the_last_one() -> None:
    record = EpisodeRecord()
    first, second = (record.name_of(b"prompt", 8, False) for _ in range(2))
    assert first != second
    assert record.name_of(b"prompt", 8, True) == second
    assert record.name_of(b"prompt", 8, False) not in (first, second)


def test_a_call_that_this_attempt_has_not_asked_is_its_first_one() -> None:
    record = EpisodeRecord()
    name = record.name_of(b"prompt", 8, False)
    record.begin_attempt()
    assert record.name_of(b"prompt", 8, True) == name
    assert record.name_of(b"another prompt", 8, True) not in (name, record.name_of(b"prompt", 9, True))
