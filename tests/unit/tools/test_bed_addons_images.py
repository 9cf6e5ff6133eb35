"""Recipes of images: equal content has an equal name, other content another."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from tools.bed import images
from tools.bed.images import Recipe
from tools.bed.layout import PAUSE_IMAGE


def recipe(file: Path) -> Recipe:
    return Recipe("tool", files={"/tool": file}, entrypoint=("/tool", "serve"), env={"A": "1"}, folders=("/tmp",))


def test_the_name_follows_everything_that_goes_in(tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_text("one")
    first = recipe(file)
    assert recipe(file).reference == first.reference
    others = [
        dataclasses.replace(first, env={"A": "2"}),
        dataclasses.replace(first, user="1:1"),
        dataclasses.replace(first, entrypoint=("/tool",)),
        dataclasses.replace(first, texts={"/etc/passwd": "root"}),
        dataclasses.replace(first, links={"/bin": "usr/bin"}),
        dataclasses.replace(first, folders=("/tmp", "/run")),
    ]
    names = {one.reference for one in (first, *others)}
    assert len(names) == 1 + len(others)
    before = first.digest
    file.write_text("two, longer")
    assert recipe(file).digest != before


def test_a_changed_file_of_equal_size_is_another_image(tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_text("one")
    before = recipe(file).digest
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    assert recipe(file).digest != before


def test_the_containerfile_says_user_environment_and_entrypoint(tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.touch()
    assert recipe(file).containerfile.splitlines() == [
        "FROM scratch",
        "COPY root/ /",
        "USER 0:0",
        'ENV A="1"',
        'ENTRYPOINT ["/tool", "serve"]',
    ]


def test_the_sandbox_has_the_name_that_containerd_is_told_and_brings_its_loader() -> None:
    one = images.pause()
    assert one.reference == PAUSE_IMAGE
    assert any("ld-linux" in target or "ld-musl" in target for target in one.files)


def test_experiments_find_their_own_python_first_and_mount_all_of_it() -> None:
    one = images.hostroot()
    mounts = images.mounts()
    first = Path(one.env["PATH"].split(":")[0])
    interpreter = (first / "python").resolve()
    for needed in (first, interpreter, images.REPOSITORY / "spec"):
        assert any(mount == needed or mount in needed.parents for mount in mounts), needed
    assert not [inner for inner in mounts for outer in mounts if outer in inner.parents]
    assert one.links["/bin"] == "usr/bin"
