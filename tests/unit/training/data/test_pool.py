"""Workers that die are replaced, and nothing of a loader outlives its rank, whoever is killed and whenever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from spec.errors import DataError, UnreachableError
from spec.shards import open_manifest, path_of
from spec.train import ModelConfig
from training.data.loader import Loader, LocalBatch, WorkerEvent
from training.data.plan import Refs
from training.data.pool import WorkerProcess
from training.data.tickets import Ticket, as_records
from training.data.work import Delivery, Order, plan_work

SECONDS = 30.0
F_GETPIPE_SZ, PIPE_BUF = 1032, 4096
MODEL = ModelConfig(image_size=4, channels=1)
ROOT = Path(__file__).parents[4]
SHARED_MEMORY = Path("/dev/shm")
SCRIPT = """
import os, signal, sys
from spec.train import ModelConfig
from training.data.loader import Loader

def a_loader(workers=2, batch=16):
    return Loader(
        sys.argv[1], seed=3, learner="east", start_position=0, batch=batch, rank=0, world_size=1, workers=workers,
        prefetch=4, model=ModelConfig(image_size=4, channels=1),
    )

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture(autouse=True)
def _short_temporary_folder(tmp_path: Path) -> Generator[None]:
    """What `a_rank` uses as TMPDIR: pytest's own folders can be too long for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="gkr-", dir="/tmp") as short:
        (tmp_path / "temporary").symlink_to(short)
        yield


def a_loader(dataset: str, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {
        "seed": 3, "learner": "east", "start_position": 0, "batch": 16, "rank": 0, "world_size": 1, "workers": 2,
        "prefetch": 4, "model": MODEL,
    }  # fmt: skip
    return Loader(dataset, **(arguments | changes))


def take(loader: Loader, count: int) -> list[LocalBatch]:
    return [loader.next(SECONDS) for _ in range(count)]


def wanted(dataset: str, count: int) -> list[bytes]:
    with a_loader(dataset, workers=0) as loader:
        return [batch.noise.tobytes() for batch in take(loader, count)]


def events_of(loader: Loader, *, count: int) -> list[WorkerEvent]:
    """That many events, once they are there."""
    with loader._changed:
        assert loader._changed.wait_for(lambda: len(loader._events) >= count, SECONDS)
    return loader.worker_events()


@contextlib.contextmanager
def a_rank(
    body: str, *, dataset: str, tmp_path: Path, temporary: Path | None = None
) -> Generator[subprocess.Popen[str]]:
    """A process of its own that runs SCRIPT and `body`; killed at the end, if it still runs."""
    temporary = temporary or (tmp_path / "temporary").resolve()
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT + body)
    process = subprocess.Popen(
        [sys.executable, str(script), dataset],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def first_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def has_ended(process: psutil.Process) -> bool:
    """A zombie has: only its parent has not looked yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def shared_names(processes: list[psutil.Process]) -> set[Path]:
    """What they have mapped or opened in shared memory, where other processes have files too."""
    maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in processes]
    mapped = {line.split(maxsplit=5)[-1] for text in maps for line in text.splitlines()}
    opened = {link for one in processes for link in descriptors(one.pid)}
    return {Path(name) for name in mapped | opened if name.startswith(f"{SHARED_MEMORY}/")}


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS)
    assert alive == []


def test_a_killed_worker_is_replaced_and_nothing_changes_in_the_order(dataset: str) -> None:
    want = wanted(dataset, 30)
    with a_loader(dataset) as loader:
        got = take(loader, 5)
        victim, other = loader.pids
        os.kill(victim, signal.SIGKILL)
        (event,) = events_of(loader, count=1)
        got += take(loader, 25)
        assert (event.index, event.cause) == (0, "SIGKILL")
        assert 0 <= event.detected_seconds <= event.redone_seconds < SECONDS
        assert loader.worker_events() == []
        assert other in loader.pids
        assert victim not in loader.pids
    assert [batch.noise.tobytes() for batch in got] == want


def test_what_a_killed_worker_held_is_prepared_again(dataset: str) -> None:
    """A stopped worker surely holds its tickets when it is killed, and nobody else is there to do them."""
    want = wanted(dataset, 12)
    with a_loader(dataset, workers=1, prefetch=4) as loader:
        got = take(loader, 1)
        with loader._changed:
            assert loader._changed.wait_for(lambda: loader.ready == 4, SECONDS)
        os.kill(loader.pids[0], signal.SIGSTOP)
        got += take(loader, 4)  # hands four positions to the stopped worker
        os.kill(loader.pids[0], signal.SIGKILL)
        got += take(loader, 7)
        (event,) = events_of(loader, count=1)
        assert event.redone_seconds > event.detected_seconds
    assert [batch.noise.tobytes() for batch in got] == want


def test_the_forkserver_may_be_killed_too(dataset: str) -> None:
    want = wanted(dataset, 20)
    with a_loader(dataset) as loader:
        got = take(loader, 5)
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
        events = events_of(loader, count=2)
        assert {event.cause for event in events} <= {"forkserver died", "SIGKILL"}
        got += take(loader, 15)
    assert [batch.noise.tobytes() for batch in got] == want


def test_a_worker_that_hangs_is_named_at_the_deadline_and_can_go_on(dataset: str) -> None:
    """Report 7 (streaming#617): no wait is without end, and ranks do not wait for each other at all."""
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        take(loader, 1)
        with loader._changed:
            assert loader._changed.wait_for(lambda: loader.ready == 1, SECONDS)
        (pid,) = loader.pids
        os.kill(pid, signal.SIGSTOP)
        take(loader, 1)
        with pytest.raises(UnreachableError, match=rf"no batch for position 32 within 0.05 s.*{pid}"):
            loader.next(0.05)
        os.kill(pid, signal.SIGCONT)
        assert loader.next(SECONDS).position == 32


def test_a_position_that_kills_every_worker_is_an_error_at_last(dataset: str) -> None:
    """Each shard becomes a pipe that nobody writes to, so that every worker surely dies while it opens one."""
    for shard in open_manifest(dataset).splits.train:
        path = path_of(dataset).parent / shard.path
        path.unlink()
        os.mkfifo(path)
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        killed: set[int] = set()

        def is_next() -> bool:
            """The third one tells that it has begun with a sample: who dies before blames none."""
            begun = 0 if len(killed) == 2 else -1
            return not killed & set(loader._pids()) and loader._workers[0].row == begun

        for _ in range(3):
            with loader._changed:
                assert loader._changed.wait_for(is_next, SECONDS)
                (pid,) = loader._pids()
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        with pytest.raises(DataError, match=r"3 loader workers in a row died \(SIGKILL\).*position 0"):
            loader.next(SECONDS)


def test_a_position_whose_workers_die_before_its_first_sample_is_tried_again(dataset: str) -> None:
    """Deaths that no sample can have caused, as the out-of-memory killer's, end no run and replace no sample."""
    with a_loader(dataset, workers=1, prefetch=1) as loader:
        killed: set[int] = set()
        for _ in range(4):
            with loader._changed:  # its pump cannot take what the worker says before it dies
                assert not killed & set(loader._pids())
                (pid,) = loader._pids()
                loader._workers[0].row = -1
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                assert loader._changed.wait_for(lambda: not killed & set(loader._pids()), SECONDS)
        assert loader.next(SECONDS).noise.tobytes() == wanted(dataset, 1)[0]
        assert loader.quarantined() == []


def test_who_answers_a_careful_ticket_has_no_sample_left_to_die_of(dataset: str) -> None:
    """A worker that was killed while it sent its answer had the first sample blamed."""
    order = Order([dataset], seed=0, learner="east", batch=4)
    work = plan_work(order, delivery=Delivery(MODEL), world_size=1, cache=None).work
    one = np.zeros(12_000, dtype=np.int64)
    worker = WorkerProcess(work, index=0)
    try:
        worker.hand(Ticket(0, 0, 0, as_records(Refs(one, one, one)), is_careful=True))
        size, until = fcntl.fcntl(worker.results, F_GETPIPE_SZ), time.monotonic() + SECONDS
        while struct.unpack("i", fcntl.ioctl(worker.results, termios.FIONREAD, b"1234"))[0] < size - 4 * PIPE_BUF:
            worker.send()
            assert time.monotonic() < until
            threading.Event().wait(0.01)
        os.kill(worker.pid, signal.SIGKILL)
        assert list(worker.receive()) == [], "the answer does not fit into the pipe"
        assert worker._received > 0
        assert worker.row == -1
    finally:
        worker.release()
        worker.reap(timeout_seconds=SECONDS)


def test_closing_ends_the_workers_and_may_be_repeated(dataset: str) -> None:
    loader = a_loader(dataset)
    take(loader, 2)
    processes = [psutil.Process(pid) for pid in loader.pids]
    loader.close()
    loader.close()
    assert all(has_ended(process) for process in processes)


def test_closing_does_not_wait_for_a_worker_that_is_stopped(dataset: str) -> None:
    loader = a_loader(dataset, workers=1)
    take(loader, 1)
    process = psutil.Process(loader.pids[0])
    process.send_signal(signal.SIGSTOP)
    loader.close()
    assert has_ended(process)


def test_a_worker_does_not_import_what_the_rank_did(dataset: str, tmp_path: Path) -> None:
    """multiprocessing would import the rank's main module, here one with pydantic, into each worker."""
    body = "loader = a_loader(1)\nloader.next(30)\ntell(*loader.pids)\nsys.stdin.read()\n"
    with a_rank(body, dataset=dataset, tmp_path=tmp_path) as rank:
        (pid,) = first_line(rank)
        assert "pydantic_core" in Path(f"/proc/{rank.pid}/maps").read_text()
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" in mapped
        assert "pydantic_core" not in mapped


@pytest.mark.parametrize("busy", [False, True], ids=["idle workers", "workers that hang in a read"])
def test_nothing_outlives_a_rank_that_was_killed(dataset: str, tmp_path: Path, *, busy: bool) -> None:
    if busy:
        for shard in open_manifest(dataset).splits.train:
            path = path_of(dataset).parent / shard.path
            path.unlink()
            os.mkfifo(path)
    body = f"loader = a_loader()\n{'' if busy else 'loader.next(30)'}\ntell(*loader.pids)\nsys.stdin.read()\n"
    with a_rank(body, dataset=dataset, tmp_path=tmp_path) as rank:
        workers = {int(pid) for pid in first_line(rank)}
        children = psutil.Process(rank.pid).children(recursive=True)
        assert workers < {child.pid for child in children}
        assert len(children) == 4  # two workers, their forkserver, multiprocessing's resource tracker
        names = shared_names([psutil.Process(rank.pid), *children])
        rank.kill()
        assert_all_end(children)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not [name for name in names if name.exists()]


def test_nothing_outlives_a_rank_that_leaves_without_closing(dataset: str, tmp_path: Path) -> None:
    """A forked rank leaves by os._exit, which runs none of multiprocessing's own clean-up."""
    body = "loader = a_loader()\nloader.next(30)\ntell(*loader.pids)\nsys.stdin.read()\nos._exit(0)\n"
    with a_rank(body, dataset=dataset, tmp_path=tmp_path) as rank:
        first_line(rank)
        children = psutil.Process(rank.pid).children(recursive=True)
        assert rank.stdin is not None
        rank.stdin.close()
        rank.stdin = None
        assert rank.wait(SECONDS) == 0
        assert_all_end(children)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_second_start_finds_nothing_in_its_way(dataset: str, tmp_path: Path, sent: signal.Signals) -> None:
    """Report 6 (streaming#781): ctrl-C, then a stale name of shared memory. Here batches lie in an arena."""
    body = "loader = a_loader(batch=1024)\ntell(len(loader.next(30).ids), loader._arena.free)\nsys.stdin.read()\n"
    for _ in range(2):
        with a_rank(body, dataset=dataset, tmp_path=tmp_path) as rank:
            assert first_line(rank)[0] == "1024"
            children = psutil.Process(rank.pid).children(recursive=True)
            names = shared_names([psutil.Process(rank.pid), *children])
            rank.send_signal(sent)
            assert rank.wait(SECONDS) != 0
            assert_all_end(children)
        assert not [name for name in names if name.exists()]


LOOPS = """
import asyncio, threading, zmq
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
socket = zmq.Context().socket(zmq.DEALER)
socket.bind("tcp://127.0.0.1:0")
loader = a_loader(1, batch=1024)
loader.next(30)
tell(*loader.pids)
sys.stdin.read()
"""


def test_workers_inherit_no_event_loop_and_no_socket(dataset: str, tmp_path: Path) -> None:
    """Report 15 (gcsfs#379): what the rank uses in threads of its own would hang in a copy."""
    with a_rank(LOOPS, dataset=dataset, tmp_path=tmp_path) as rank:
        (pid,) = first_line(rank)
        assert any("eventpoll" in link for link in descriptors(rank.pid))
        assert not [link for link in descriptors(int(pid)) if "eventpoll" in link or "socket" in link]
        assert psutil.Process(int(pid)).num_threads() == 1


def descriptors(pid: int) -> list[str]:
    found: list[str] = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(one.readlink()))
    return found


FORK = """
first = a_loader()
first.next(30)
child = os.fork()
if child == 0:
    second = a_loader()
    batch = second.next(30)
    first.close()  # a copy: must not end the parent's workers
    tell("child", batch.position, *second.pids)
    sys.stdin.read()
    os._exit(0)
tell("parent", first.next(30).position, *first.pids)
signal.pause()
"""


def test_a_forked_rank_has_a_forkserver_of_its_own(dataset: str, tmp_path: Path) -> None:
    with a_rank(FORK, dataset=dataset, tmp_path=tmp_path) as parent:
        lines = {line[0]: line[1:] for line in (first_line(parent), first_line(parent))}
        assert (lines["parent"][0], lines["child"][0]) == ("16", "0")
        (child,) = [
            one
            for one in psutil.Process(parent.pid).children()
            if {int(pid) for pid in lines["child"][1:]}
            & {grandchild.pid for grandchild in one.children(recursive=True)}
        ]
        of_child = child.children(recursive=True)
        of_parent = [
            one for one in psutil.Process(parent.pid).children(recursive=True) if one not in (child, *of_child)
        ]
        assert {int(pid) for pid in lines["parent"][1:]} < {one.pid for one in of_parent}
        parent.kill()
        workers = [one for one in of_parent if str(one.pid) in lines["parent"]]
        assert_all_end(workers)  # though the child was forked with copies of all their pipes
        assert child.is_running()
        child.kill()
        assert_all_end([child, *of_child, *of_parent])
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_temporary_folder_too_long_for_sockets_is_said_with_the_remedy(dataset: str, tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20)
    deep.mkdir()
    body = "try:\n    a_loader()\nexcept Exception as error:\n    tell(type(error).__name__, error.hint)\n"
    with a_rank(body, dataset=dataset, tmp_path=tmp_path, temporary=deep) as rank:
        assert " ".join(first_line(rank)) == "ConfigError set TMPDIR to a short folder such as /tmp"


APART = """
loader = a_loader()
for _ in range(8):
    loader.next(30)
tell("ready", *sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "torch"}))
sys.stdin.read()
"""


def test_loading_makes_no_call_of_ray(dataset: str, tmp_path: Path) -> None:
    """I9: neither the rank's loader nor its workers have Ray's code or any connection to make a call through."""
    with a_rank(APART, dataset=dataset, tmp_path=tmp_path) as rank:
        assert first_line(rank) == ["ready"]
        processes = [psutil.Process(rank.pid), *psutil.Process(rank.pid).children(recursive=True)]
        assert len(processes) >= 4  # with the forkserver and two workers
        assert [one.net_connections(kind="inet") for one in processes] == [[]] * len(processes)
        mapped = {Path(part.path).name for one in processes for part in one.memory_maps()}
        assert [name for name in mapped if "raylet" in name or "libtorch" in name] == []
