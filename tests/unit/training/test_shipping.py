"""Events reach the bucket: in order, once, also across outages, restarts of the container and a second process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import Bucket, open_bucket
from training import shipping
from training.shipping import Outbox

SECONDS = 20.0


def bucket_at(path: Path) -> Bucket:
    return open_bucket(path.as_uri())


def opened(root: Path, *, pod: str = "pod") -> Outbox:
    return Outbox.open(bucket_at(root / "bucket"), source="driver-east", folder=root / pod, deadline_seconds=SECONDS)


def append(outbox: Outbox, *lines: str) -> None:
    with outbox.path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def shipped(root: Path) -> dict[str, str]:
    """Segment to its text, without the claims."""
    bucket = bucket_at(root / "bucket")
    return {entry.key: bucket.get(entry.key).data.decode() for entry in bucket.list("events") if entry.size}


def until(holds: Callable[[], bool]) -> None:
    deadline, tick = time.monotonic() + SECONDS, threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        tick.wait(0.02)


def test_lines_arrive_while_they_are_written_and_a_torn_one_waits(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    append(outbox, "one", "two")
    until(lambda: bool(shipped(tmp_path)))
    assert shipped(tmp_path) == {"events/driver-east/000001-00000001.jsonl": "one\ntwo\n"}
    with outbox.path.open("a") as file:
        file.write("three\nfo")
    assert not outbox.close(deadline_seconds=SECONDS)  # half a line is left
    assert list(shipped(tmp_path).values()) == ["one\ntwo\n", "three\n"]


def test_an_outage_delays_lines_and_loses_none(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    place = tmp_path / "bucket" / "events" / "driver-east"
    place.rename(tmp_path / "away")
    place.touch()  # a file where the folder should be: every write is refused
    append(outbox, *(str(number) for number in range(1000)))
    assert not outbox.close(deadline_seconds=1.5)
    place.unlink()
    (tmp_path / "away").rename(place)
    until(lambda: "".join(shipped(tmp_path).values()).splitlines() == [str(number) for number in range(1000)])
    assert outbox.close(deadline_seconds=SECONDS)


def test_a_successor_in_another_pod_reads_all_that_was_said_and_deposes(tmp_path: Path) -> None:
    first = opened(tmp_path)
    append(first, "one", "two")
    first.close(deadline_seconds=SECONDS)
    second = opened(tmp_path, pod="another")
    assert second.incarnation == 2
    assert second.history.read_text() == "one\ntwo\n"
    append(second, "three")
    second.close(deadline_seconds=SECONDS)
    assert list(shipped(tmp_path)) == [
        "events/driver-east/000001-00000001.jsonl",
        "events/driver-east/000002-00000001.jsonl",
    ]
    third = opened(tmp_path, pod="third")
    assert third.history.read_text() == "one\ntwo\nthree\n"
    third.close(deadline_seconds=SECONDS)


def test_what_a_killed_process_did_not_ship_goes_out_when_its_container_starts_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    append(first, "one")
    first.close(deadline_seconds=SECONDS)
    append(first, "two", "three")  # written, but its thread is gone as after SIGKILL
    second = opened(tmp_path)
    assert second.history.read_text() == "one\ntwo\nthree\n"
    second.close(deadline_seconds=SECONDS)
    assert "".join(shipped(tmp_path).values()) == "one\ntwo\nthree\n"


def test_a_success_whose_answer_was_lost_is_not_shipped_twice(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    bucket_at(tmp_path / "bucket").create("events/driver-east/000001-00000001.jsonl", b"one\n")
    append(outbox, "one", "two")
    assert outbox.close(deadline_seconds=SECONDS)
    assert list(shipped(tmp_path).values()) == ["one\n", "two\n"]


def test_a_long_backlog_goes_out_in_bounded_segments(tmp_path: Path) -> None:
    outbox = opened(tmp_path)
    line = "x" * 999
    append(outbox, *([line] * 3000))
    assert outbox.close(deadline_seconds=SECONDS)
    texts = list(shipped(tmp_path).values())
    assert "".join(texts) == f"{line}\n" * 3000
    assert max(map(len, texts)) <= 2**20


def test_a_process_learns_that_a_newer_one_took_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "TAKEOVER_SECONDS", 0.1)
    first = opened(tmp_path)
    second = opened(tmp_path, pod="another")
    until(lambda: first.taken_over)
    assert not second.taken_over
    first.close(deadline_seconds=SECONDS)
    second.close(deadline_seconds=SECONDS)
