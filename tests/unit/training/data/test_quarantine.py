"""Bad samples are replaced by a rule that needs no memory, and too many of them end the run with a report."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.errors import DataError
from training.data.plan import Source
from training.data.quarantine import Bad, Limits, Quarantine, candidates

BUCKETS = np.arange(10_000, dtype=np.int16) % 7
SOURCE = Source("ab" * 32, 10_000, BUCKETS)


def tried(sample: int, position: int, count: int, source: Source = SOURCE) -> list[int]:
    found = candidates(source, sample=sample, position=position, seed=0, learner="east")
    return list(itertools.islice(found, count))


@given(sample=st.integers(0, 9_999), position=st.integers(0, 10**12))
def test_a_replacement_has_the_same_bucket_and_is_another_sample(sample: int, position: int) -> None:
    found = tried(sample, position, 50)
    assert len(set(found)) == 50
    assert sample not in found
    assert {BUCKETS[one] for one in found} == {BUCKETS[sample]}
    assert found == tried(sample, position, 50)


def test_positions_have_replacements_of_their_own() -> None:
    assert tried(3, 1, 20) != tried(3, 2, 20)


def test_every_sample_of_the_bucket_is_a_candidate_before_there_is_none() -> None:
    small = Source("cd" * 32, 30, np.array([0, 1] * 15, dtype=np.int16))
    assert sorted(tried(4, 0, 99, small)) == [one for one in range(0, 30, 2) if one != 4]
    assert sorted(tried(4, 0, 99, Source("cd" * 32, 30))) == [one for one in range(30) if one != 4]


def bad(position: int, reason: str = "truncated") -> Bad:
    return Bad(position=position, source=0, sample=position, reason=reason, replacement=0)


def test_a_row_of_bad_samples_stops_the_run_with_its_reasons() -> None:
    quarantine = Quarantine(Limits(in_a_row=5))
    quarantine.add([bad(one) for one in range(4)], first=0, count=5, where="east")
    quarantine.add([bad(one, "bomb") for one in range(6, 10)], first=5, count=5, where="east")
    with pytest.raises(DataError, match=r"5 samples in a row.*4 truncated \(first: sample 0 of source 0\), 4 bomb"):
        quarantine.add([bad(10)], first=10, count=5, where="east")


def test_a_share_over_a_window_stops_it_too_and_old_damage_is_forgotten() -> None:
    quarantine = Quarantine(Limits(share=0.1, window=100, least=5))
    for turn in range(100):
        quarantine.add([bad(10 * turn)], first=10 * turn, count=10, where="east")
    with pytest.raises(DataError, match=r"11 of the last 1\d\d samples cannot be used, more than 10.0%"):
        quarantine.add([bad(1000), bad(1002)], first=1000, count=10, where="east")
