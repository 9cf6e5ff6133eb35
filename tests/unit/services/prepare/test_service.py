"""Preparation as a service: a while at a time, over the wire, by whichever replica answers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.client import LocalClient, ServiceClient
from services.directory import write_directory
from services.prepare import encoded as module
from services.prepare.encoded import Job, advance
from services.prepare.service import PrepareService, prepare_by
from services.registry import CLASSES, load_class
from services.server import Server
from services.service import ServiceContext
from services.wire.messages import PrepareArgs, PrepareReply
from spec.errors import RefusedError
from spec.preparation import PrepareReport
from spec.services import Directory, Replica
from spec.shards import open_manifest
from tests.builders.pictures import image_folder


def replica(folder: Path) -> PrepareService:
    return PrepareService(ServiceContext("prepare", "preparer", cache_dir=folder, manifest="", max_batch=1))


@contextmanager
def asking(folder: Path, *, incarnation: int) -> Generator[ServiceClient]:
    """A client of a replica that listens."""
    path = folder / "directory.json"
    with Server(replica(folder / "cache"), queue_depth=2, incarnation=incarnation) as server:
        one = Replica(service="preparer", kind="prepare", index=0, endpoint=server.endpoint, incarnation=incarnation)
        write_directory(path, directory=Directory(epoch=incarnation, replicas=[one]))
        with closing(ServiceClient(path, service="preparer", identity=f"test-{incarnation}")) as client:
            yield client


def args(source: str, folder: Path, *, rules: str = "{}") -> PrepareArgs:
    return PrepareArgs(source=source, manifest=(folder / "made" / "manifest.json").as_uri(), rules=rules, seconds=0)


def test_replicas_in_turn_make_the_dataset_that_one_process_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica is gone after one call; its successor, with the same cache folder, goes on."""
    monkeypatch.setattr(module, "GROUP", 8)
    source = image_folder(tmp_path / "source", count=30)
    wanted = args(source, tmp_path)
    goes: list[PrepareReport] = []
    with asking(tmp_path, incarnation=1) as client:
        first = client.call("advance", wanted, reply=PrepareReply, deadline_seconds=60)
        assert not PrepareReport.read_json(first.body.report).done
    with asking(tmp_path, incarnation=2) as client:
        last = prepare_by(client, wanted, told=goes.append)
    assert [one.found for one in goes] == [16, 24, 32]
    assert last.done
    uri = (tmp_path / "alone" / "manifest.json").as_uri()
    alone = advance(Job(source, uri))
    assert open_manifest(wanted.manifest).splits == open_manifest(uri).splits
    assert (last.found, last.dropped) == (alone.found, alone.dropped)


def test_bad_rules_are_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    client = LocalClient(replica(tmp_path))
    with pytest.raises(RefusedError, match=r"min_side: .*; max: Extra inputs"):
        prepare_by(client, args("file:///nowhere", tmp_path, rules='{"min_side": 0, "max": 3}'))
    with pytest.raises(RefusedError, match="nothing to read"):
        prepare_by(client, args((tmp_path / "none").as_uri(), tmp_path))


def test_the_kind_is_registered() -> None:
    assert load_class(CLASSES["prepare"]) is PrepareService
