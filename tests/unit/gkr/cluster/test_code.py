"""The folder of `code:`: what goes along, and that the same files give the same archive."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from gkr.cluster.code import LARGEST_BYTES, pack, upload
from gkr.cluster.ignore import parse
from spec.errors import ConfigError
from storage import open_bucket

TREE = (
    "train.py", "src/model.py", "src/deep/x.log", "debug.log", "build/out.bin", "src/build/keep.txt", "data/a.npy",
    "data/keep/b.npy", "notes/todo.txt", "notes/secret.txt", "a b.txt", "weird[1].txt", "docs/build.md", "logs/1/x.txt",
    "src/tmp.swp", "x/y/z/deep.bin",
)  # fmt: skip
IGNORED = """
# comment
*.log
/build/
data/*
!data/keep/
notes/secret.txt
**/*.swp
x/**/deep.bin
logs/
weird[[]1].txt
"""


def _tree(root: Path) -> Path:
    for name in TREE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def _names(data: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return sorted(archive.getnames())


def test_same_files_give_the_same_digest_whatever_their_times_and_order(tmp_path: Path) -> None:
    first, second = _tree(tmp_path / "a"), tmp_path / "b"
    for name in reversed(TREE):
        (second / name).parent.mkdir(parents=True, exist_ok=True)
        (second / name).write_text(name)
        os.utime(second / name, (1, 1))
    assert pack(first).sha256 == pack(second).sha256
    (second / "train.py").write_text("changed")
    assert pack(first).sha256 != pack(second).sha256


def test_executable_bit_is_kept_and_nothing_else_of_the_mode(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo")
    (tmp_path / "run.sh").chmod(0o700)
    (tmp_path / "x.py").write_text("1")
    (tmp_path / "x.py").chmod(0o600)
    with tarfile.open(fileobj=io.BytesIO(pack(tmp_path).data)) as archive:
        assert {one.name: one.mode for one in archive} == {"run.sh": 0o755, "x.py": 0o644}


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git itself")
def test_ignore_rules_are_gits(tmp_path: Path) -> None:
    root = _tree(tmp_path)
    (root / ".gitignore").write_text(IGNORED)
    (root / "src" / ".gitignore").write_text("/deep/\n!tmp.swp\n")
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, check=True, capture_output=True, text=True
    )
    assert _names(pack(root).data) == sorted(listed.stdout.rstrip("\0").split("\0"))


def test_own_ignore_file_replaces_gits(tmp_path: Path) -> None:
    root = _tree(tmp_path)
    (root / ".gitignore").write_text("*.py\n")
    (root / ".gkrignore").write_text("*\n!*.py\n!src/\n")
    assert _names(pack(root).data) == ["src/model.py", "train.py"]


@pytest.mark.parametrize(
    ("line", "path", "folder", "ignored"),
    [
        ("*.log", "a/b.log", False, True),
        ("/*.log", "a/b.log", False, False),
        ("a/*.log", "a/b/c.log", False, False),
        ("a/**/c", "a/c", False, True),
        ("build/", "build", False, False),
        ("build/", "x/build", True, True),
        (r"\#x", "#x", False, True),
        ("a?c", "abc", False, True),
        ("[!a]b", "ab", False, False),
    ],
)
def test_single_rules(line: str, path: str, folder: bool, ignored: bool) -> None:
    (rule,) = parse(line)
    assert bool((folder or not rule.folders_only) and rule.pattern.fullmatch(path)) is ignored


def test_link_inside_goes_along_and_one_that_leaves_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "code"
    inside.mkdir()
    (inside / "a.py").write_text("1")
    (inside / "b.py").symlink_to("a.py")
    assert _names(pack(inside).data) == ["a.py", "b.py"]
    (inside / "out").symlink_to("../secret")
    with pytest.raises(ConfigError, match="outside the folder"):
        pack(inside)


def test_too_much_names_the_largest_file(tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        for _ in range((LARGEST_BYTES >> 22) + 2):
            file.write(os.urandom(1 << 22))
    with pytest.raises(ConfigError, match=r"largest file is weights\.bin"):
        pack(tmp_path)


def test_empty_or_absent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        pack(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        pack(tmp_path / "x")


def test_archive_is_uploaded_once_under_its_digest(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    archive, bucket = pack(tmp_path / "code"), open_bucket((tmp_path / "bucket").as_uri())
    assert upload(archive, bucket=bucket)
    assert not upload(archive, bucket=bucket)
    assert bucket.get(f"code/{archive.sha256}.tar.gz").data == archive.data


def test_what_is_packed_here_is_what_the_pods_unpack(tmp_path: Path) -> None:
    """The init container is another package's; this is the contract between the two."""
    from training.fetch_code import unpack

    root = _tree(tmp_path / "code")
    (root / "link").symlink_to("src/model.py")
    archive = pack(root)
    (tmp_path / "code.tar.gz").write_bytes(archive.data)
    assert unpack(tmp_path / "code.tar.gz", into=tmp_path / "out") == archive.files
    assert {name: (tmp_path / "out" / name).read_text() for name in TREE} == {name: name for name in TREE}
    assert (tmp_path / "out" / "link").read_text() == "src/model.py"
