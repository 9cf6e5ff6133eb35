"""The progress page: readable at any time, also when its writer is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from training.progress import NOT_RESTORED, ProgressWriter, read_page


def test_what_was_committed_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "progress-0.page"
    with ProgressWriter(path, epoch=3) as page:
        page.restored(step=10, position=640)
        page.committed(samples=64)
        page.phase("barrier")
        read = read_page(path)
    assert read is not None
    assert (read.epoch, read.step, read.position, read.samples_run, read.steps_run, read.phase) == (
        3,
        11,
        704,
        64,
        1,
        "barrier",
    )


def test_a_rank_that_has_not_taken_up_its_state_says_so(tmp_path: Path) -> None:
    path = tmp_path / "progress-0.page"
    with ProgressWriter(path, epoch=1):
        read = read_page(path)
    assert read is not None
    assert read.position == NOT_RESTORED


def test_a_dying_rank_of_an_older_epoch_cannot_write_into_the_new_page(tmp_path: Path) -> None:
    path = tmp_path / "progress-0.page"
    with ProgressWriter(path, epoch=1) as old, ProgressWriter(path, epoch=2) as new:
        new.restored(step=3, position=192)
        old.phase("step")
        read = read_page(path)
    assert read is not None
    assert (read.epoch, read.position) == (2, 192)


def test_a_missing_or_empty_page_is_none(tmp_path: Path) -> None:
    assert read_page(tmp_path / "none.page") is None
    (tmp_path / "empty.page").write_bytes(b"")
    assert read_page(tmp_path / "empty.page") is None


def test_the_page_outlives_a_sigkill_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "progress-0.page"
    code = (
        "import sys, pathlib, signal\nfrom training.progress import ProgressWriter\n"
        f"page = ProgressWriter(pathlib.Path({str(path)!r}), epoch=1)\n"
        "for _ in range(5): page.committed(samples=8)\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=10)
    read = read_page(path)
    assert read is not None
    assert (read.steps_run, read.samples_run, read.pid) == (5, 40, writer.pid)


def test_a_page_whose_writer_died_inside_a_write_is_none(tmp_path: Path) -> None:
    path = tmp_path / "progress-0.page"
    with ProgressWriter(path, epoch=1) as page:
        page.committed(samples=8)
    data = bytearray(path.read_bytes())
    data[8] |= 1
    path.write_bytes(data)
    assert read_page(path) is None
