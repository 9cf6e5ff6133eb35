"""What a folder can meet and an object store cannot: a full disk, missing rights, writers that were killed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spec.errors import RefusedError, UnreachableError
from storage import folder as module
from storage.folder import Folder


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """The child dies between its last byte and the new name."""
    folder = Folder(tmp_path)
    folder.put("a/HEAD", b"old")
    child = (
        "import os, signal, sys; from pathlib import Path; from storage.folder import Folder;"
        "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "Folder(Path(sys.argv[1])).put('a/HEAD', b'new')"
    )
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert folder.get("a/HEAD").data == b"old"
    assert [one.key for one in folder.list()] == ["a/HEAD"]
    assert len(list((tmp_path / "a").iterdir())) == 2, "what it left is there"
    folder.clear("a")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_the_former_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put("a", b"former")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UnreachableError, match="the disk is full") as caught:
            folder.put("a", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free space" in caught.value.hint
    assert folder.get("a").data == b"former"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_below_a_file_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="Not a directory"):
        Folder(tmp_path / "file").put("a", b"")
    with pytest.raises(RefusedError, match="Not a directory"):
        Folder(tmp_path / "file").below("deep").create("a", b"")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_missing_rights_are_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(RefusedError, match="Permission denied"):
        Folder(tmp_path).put("a", b"")


def test_a_listing_has_files_only(tmp_path: Path) -> None:
    """To open a named pipe waits for its writer, and a link in a circle ends every call."""
    Folder(tmp_path).put("a", b"")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    assert [one.key for one in Folder(tmp_path).list()] == ["a", "link"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any folder")
def test_a_folder_that_cannot_be_read_is_not_empty(tmp_path: Path) -> None:
    Folder(tmp_path).put("deep/a", b"")
    (tmp_path / "deep").chmod(0o000)
    with pytest.raises(RefusedError, match="Permission denied"):
        list(Folder(tmp_path).list())
    (tmp_path / "deep").chmod(0o755)


def test_a_lock_that_is_never_given_back_is_waited_for_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    tag = folder.create("HEAD", b"1")
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    with folder._locked(tmp_path / "HEAD"), pytest.raises(UnreachableError, match="has been locked by another process"):
        folder.replace("HEAD", b"2", tag=tag)
    folder.replace("HEAD", b"2", tag=tag)


def test_writers_and_removers_of_one_folder_do_not_hinder_each_other(tmp_path: Path) -> None:
    """A remover takes an empty folder away at any moment, also just before a writer's first file in it."""
    folder = Folder(tmp_path)
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            folder.delete(["deep/er/a"])

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for _ in range(300):
            folder.write("deep/er/a", [b"x"])
    finally:
        stop.set()
        thread.join(20)
    folder.delete(["deep/er/a"])
    assert list(tmp_path.iterdir()) == []
