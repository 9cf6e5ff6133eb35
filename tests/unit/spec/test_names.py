"""Names fit what will carry them, or are refused with one that does."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec import names
from spec.problems import RemedyError

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize(
    ("name", "want_hint"),
    [
        ("Bad", '"bad" would do'),
        ("1abc", '"abc" would do'),
        ("a_b", '"a-b" would do'),
        ("a-", '"a" would do'),
        ("имя", "for example portrait-2b"),
        ("", "for example portrait-2b"),
        ("x" * 80, f'"{"x" * 40}" would do'),
    ],
)
def test_a_name_that_is_no_label_is_refused_with_a_proposal(name: str, want_hint: str) -> None:
    with pytest.raises(RemedyError) as caught:
        names.check_label(name)
    assert caught.value.hint == want_hint


@given(st.text(max_size=100), st.integers(1, 60))
def test_a_proposal_is_always_acceptable(name: str, longest: int) -> None:
    proposal = names.propose(name, longest=longest)
    assert proposal == "" or names.check_label(proposal, longest=longest) == proposal


def test_a_run_id_is_a_function_of_time_and_random_digits() -> None:
    started = datetime(2026, 11, 30, 14, 37, 55, tzinfo=UTC)
    assert names.run_id(started, random_hex="3fa9c1dd") == "20261130-143755-3fa9c1"
    elsewhere = started.astimezone(timezone(timedelta(hours=9)))
    assert names.run_id(elsewhere, random_hex="3fa9c1dd") == "20261130-143755-3fa9c1"
    with pytest.raises(ValueError, match="hexadecimal"):
        names.run_id(started, random_hex="xyz")


@given(st.datetimes(min_value=datetime(2020, 1, 1)), st.integers(1, 10**9))  # noqa: DTZ001 (hypothesis wants it naive)
def test_run_ids_sort_by_time(first: datetime, seconds: int) -> None:
    early = first.replace(year=2026, day=1, tzinfo=UTC)
    late = early + timedelta(seconds=seconds)
    assert names.run_id(early, random_hex="ffffff") < names.run_id(late, random_hex="000000")


@given(
    st.from_regex(_LABEL, fullmatch=True), st.from_regex(_LABEL, fullmatch=True), st.from_regex(_LABEL, fullmatch=True)
)
def test_names_within_the_budget_are_never_cut_by_kuberay(experiment: str, learner: str, group: str) -> None:
    job = names.rayjob_name(experiment, learner=learner, run="20261130-143755-3fa9c1")
    if names.rayjob_excess(experiment, learner=learner, longest_group=group) <= 0:
        assert len(job) <= names.LONGEST_RAYJOB
        assert len(f"{job}-abcde") <= names.LONGEST_RAYCLUSTER
        assert len(f"{job}-abcde-{group}") <= names.LONGEST_POD_PREFIX
        assert _LABEL.fullmatch(job)


def test_the_only_learner_of_the_short_form_is_not_named_twice() -> None:
    assert names.rayjob_name("a", learner="a", run="20261130-143755-3fa9c1") == "a-3fa9c1"
    assert names.syncer_name("a", run="20261130-143755-3fa9c1") == "a-3fa9c1-syncer"
    assert names.run_suffix("my-own-run") == "ownrun"
