"""The code that came with an experiment: the right bytes, at the right place, and nothing outside of it."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from spec.errors import DataError
from spec.plan import Plan
from storage import open_bucket
from tests.builders.local_runs import plan
from training.fetch_code import fetch, unpack


def archive(*members: tuple[str, str | None], links: tuple[tuple[str, str], ...] = ()) -> bytes:
    """A tar.gz of (name, text; none is a device) and symbolic links."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, text in members:
            info = tarfile.TarInfo(name)
            if text is None:
                info.type = tarfile.CHRTYPE
                tar.addfile(info)
                continue
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return data.getvalue()


def planned(root: Path, data: bytes) -> Plan:
    made = plan("east")
    uri = f"{(root / 'bucket').as_uri()}/runs/{made.experiment}/{made.run}"
    learner = made.learners[0].model_copy(update={"run_uri": uri})
    return made.model_copy(update={"learners": [learner], "code_sha256": hashlib.sha256(data).hexdigest()})


def test_the_planned_code_is_unpacked(tmp_path: Path) -> None:
    data = archive(("mine/train.py", "print(1)\n"), ("go.sh", "#!/bin/sh\n"), links=(("mine/go.sh", "../go.sh"),))
    made = planned(tmp_path, data)
    open_bucket((tmp_path / "bucket").as_uri()).put(f"code/{made.code_sha256}.tar.gz", data)
    assert fetch(made, learner=made.home, into=tmp_path / "code") == 3
    assert (tmp_path / "code" / "mine" / "train.py").read_text() == "print(1)\n"
    assert (tmp_path / "code" / "mine" / "go.sh").read_text() == "#!/bin/sh\n"
    assert (tmp_path / "code" / "go.sh").stat().st_mode & 0o100


def test_other_bytes_than_the_planned_ones_are_refused(tmp_path: Path) -> None:
    made = planned(tmp_path, archive(("a", "1")))
    open_bucket((tmp_path / "bucket").as_uri()).put(f"code/{made.code_sha256}.tar.gz", archive(("a", "2")))
    with pytest.raises(DataError, match="the plan says"):
        fetch(made, learner=made.home, into=tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_code_that_was_never_uploaded_names_the_remedy(tmp_path: Path) -> None:
    made = planned(tmp_path, b"")
    with pytest.raises(DataError, match=r"code/.*\.tar\.gz is not there"):
        fetch(made, learner=made.home, into=tmp_path / "code")


@pytest.mark.parametrize(
    "data",
    [
        archive(("../evil", "x")),
        archive(("/tmp/evil", "x")),
        archive(("a/../../evil", "x")),
        archive(links=(("out", "/etc"),)),
        archive(links=(("a/out", "../../etc"),)),
        archive(("device", None)),
    ],
    ids=["parent", "absolute", "dots", "link", "link-inside", "device"],
)
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "code.tar.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"lies outside|special file"):
        unpack(path, into=tmp_path / "code")
    assert list((tmp_path / "code").iterdir()) == []


def test_an_archive_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "code.tar.gz"
    path.write_bytes(b"not a tar")
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(path, into=tmp_path / "code")
