"""Directory file: only newer ones count, and a reader never sees half of one."""

from __future__ import annotations

from pathlib import Path

from services.directory import DirectoryWatch, write_directory
from spec.services import Directory


def test_a_missing_file_is_no_directory_yet(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path / "directory.json")

    assert not watch.refresh()
    assert watch.current is None


def test_a_change_is_seen_once(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path / "directory.json")
    write_directory(watch.path, directory=Directory(epoch=1))
    assert watch.refresh()
    assert not watch.refresh()

    write_directory(watch.path, directory=Directory(epoch=2))
    assert watch.refresh()
    assert watch.current == Directory(epoch=2)


def test_an_older_epoch_changes_nothing(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path / "directory.json")
    write_directory(watch.path, directory=Directory(epoch=5))
    watch.refresh()
    write_directory(watch.path, directory=Directory(epoch=4))

    assert not watch.refresh()
    assert watch.current == Directory(epoch=5)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    watch = DirectoryWatch(tmp_path / "directory.json")
    write_directory(watch.path, directory=Directory(epoch=5))
    watch.refresh()
    watch.path.write_text('{"epoch": ')

    assert not watch.refresh()
    assert watch.current == Directory(epoch=5)


def test_writing_leaves_only_the_file(tmp_path: Path) -> None:
    write_directory(tmp_path / "state" / "directory.json", directory=Directory(epoch=1))

    assert [path.name for path in (tmp_path / "state").iterdir()] == ["directory.json"]
