"""A run's folder follows the buckets: each segment once, the last word of the objects, nothing after the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkr.cluster.mirror import Mirror, note_standing, status_event
from gkr.cluster.state import Standing
from gkr.runs import read_state
from gkr.watch.tail import EventTail
from spec.errors import EXIT_CANCELLED, EXIT_OK
from spec.events import Note, RunStatus, write_event
from storage import Bucket, open_bucket


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "state" / "cluster.json").write_text("{}")  # a run without a supervisor
    return tmp_path / "run"


def _bucket(tmp_path: Path, name: str = "east") -> Bucket:
    return open_bucket((tmp_path / name).as_uri())


def _segment(bucket: Bucket, key: str, *notes: tuple[float, str]) -> None:
    lines = [write_event(Note(time=time, source="driver/east", text=text)) for time, text in notes]
    bucket.create(f"events/{key}.jsonl", "".join(lines).encode())


def _texts(folder: Path) -> list[str]:
    return [one.text for one in EventTail(folder).read() if isinstance(one, Note)]


def test_new_segments_only_and_a_batch_in_order_of_time(folder: Path, tmp_path: Path) -> None:
    east, west = _bucket(tmp_path), _bucket(tmp_path, "west")
    mirror = Mirror(folder, buckets={east.uri: east, west.uri: west})
    assert mirror.events() == 0
    _segment(east, "driver-east/000001-00000001", (3.0, "c"), (1.0, "a"))
    _segment(west, "driver-west/000001-00000001", (2.0, "b"))
    assert mirror.events() == 3
    assert _texts(folder) == ["a", "b", "c"]
    _segment(east, "driver-east/000002-00000001", (0.5, "late"))
    assert Mirror(folder, buckets={east.uri: east, west.uri: west}).events() == 1, "remembered across commands"
    assert _texts(folder) == ["a", "b", "c", "late"]


def test_torn_line_and_unknown_kind_cost_nothing_else(folder: Path, tmp_path: Path) -> None:
    bucket = _bucket(tmp_path)
    good = write_event(Note(time=1.0, source="syncer", text="good")).encode()
    bucket.create("events/syncer/000001-00000001.jsonl", b'{"kind": "of the future"}\n' + good + b'{"kind": "no')
    assert Mirror(folder, buckets={bucket.uri: bucket}).events() == 1


def test_files_that_grew_are_fetched_again(folder: Path, tmp_path: Path) -> None:
    bucket = _bucket(tmp_path)
    mirror = Mirror(folder, buckets={bucket.uri: bucket})
    bucket.put("logs/east/1/rank-0.log", b"one\n")
    assert (mirror.files("logs"), mirror.files("logs")) == (1, 0)
    bucket.put("logs/east/1/rank-0.log", b"one\ntwo\n")
    assert mirror.files("logs") == 1
    assert (folder / "logs" / "east" / "1" / "rank-0.log").read_bytes() == b"one\ntwo\n"


def test_news_of_the_objects_become_events_once(folder: Path) -> None:
    waiting = Standing("preparing", "east: needs 16 more GPUs")
    assert note_standing(folder, waiting)
    assert not note_standing(folder, waiting)
    assert note_standing(folder, Standing("running"))
    assert note_standing(folder, Standing("succeeded", exit_code=EXIT_OK))
    assert not note_standing(folder, Standing("failed", "too late")), "what is final stays"
    events = [one for one in EventTail(folder).read() if isinstance(one, RunStatus)]
    assert [one.status for one in events] == ["preparing", "running", "succeeded"]
    assert read_state(folder).exit_code == EXIT_OK


def test_a_cancel_elsewhere_is_heard_here(folder: Path, tmp_path: Path) -> None:
    bucket = _bucket(tmp_path)
    there = Mirror(tmp_path / "elsewhere", buckets={bucket.uri: bucket})
    there.publish(status_event("cancelled", "gkr cancel", exit_code=EXIT_CANCELLED))
    there.publish(status_event("failed", "second word", exit_code=1))
    Mirror(folder, buckets={bucket.uri: bucket}).events()
    note_standing(folder, Standing("failed", "its objects are gone"))
    assert read_state(folder).exit_code == EXIT_CANCELLED
