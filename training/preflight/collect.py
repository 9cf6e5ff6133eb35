"""Collectors: each looks at one thing of this machine and returns a measurement; none judges.

An expected refusal by the system (no space, no permission, port taken) is part of the measurement. A collector may
hang in a system call: the runner gives each a deadline and goes on without it. Whatever a collector makes, it
removes. Standard library and the store only, except psutil for the name of a port's holder.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import resource
import secrets
import socket
import sys
import time
from pathlib import Path

from spec.errors import GkrError
from spec.shards import open_manifest, read_shard
from storage import Bucket, file_path
from storage.datasets import held_shards, local_manifest, verify_file
from training.preflight.measurements import (
    Clock,
    Dataset,
    Disk,
    Memory,
    Port,
    Ports,
    ResourceLimits,
    SharedMemory,
    Store,
)

_SMALL_DATASET_BYTES = 64 * 2**20  # read and hashed in a fraction of a second
_PREFIX = ".preflight-"
_CLOCK_WINDOW_SECONDS = 0.1
_LOOPBACK_TRIES = 5
_NET_SECONDS = 2.0
_UNLIMITED_CGROUP = 2**60  # version 1 writes a number near 2^63 for "no limit"


def disk(folder: Path, *, probe_bytes: int) -> Disk:
    """Free space of a folder's file system, and bytes that go to the disk and back."""
    problem, seconds = "", 0.0
    free: os.statvfs_result | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(folder)
        if probe_bytes:
            started = time.monotonic()
            problem = _write_and_read_back(folder, size=probe_bytes)
            seconds = time.monotonic() - started
    except OSError as error:
        problem = _said(error)
    return Disk(
        path=str(folder),
        free_bytes=free.f_bavail * free.f_frsize if free else None,
        total_bytes=free.f_blocks * free.f_frsize if free else None,
        free_inodes=free.f_favail if free else None,
        total_inodes=free.f_files if free else None,
        probe_bytes=probe_bytes,
        probe_seconds=seconds,
        problem=problem,
    )


def memory(*, root: Path = Path("/")) -> Memory:
    """Memory of the machine, or of the control group if that is less."""
    told = _meminfo(root / "proc/meminfo")
    total, available = told.get("MemTotal"), told.get("MemAvailable")
    if total is None and hasattr(os, "sysconf"):
        with contextlib.suppress(ValueError, OSError):
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _control_group(root / "sys/fs/cgroup")
    if limit is not None and (total is None or limit < total):
        total = limit
    if limit is not None and used is not None:
        left = max(0, limit - used)
        available = left if available is None else min(available, left)
    return Memory(total_bytes=total, available_bytes=available)


def shared_memory(*, folder: Path = Path("/dev/shm")) -> SharedMemory:  # noqa: S108 - the system's own place for it
    """Size of the shared memory file system."""
    try:
        told = os.statvfs(folder)
    except FileNotFoundError:
        return SharedMemory(free_bytes=None, total_bytes=None)
    return SharedMemory(free_bytes=told.f_bavail * told.f_frsize, total_bytes=told.f_blocks * told.f_frsize)


def limits(*, root: Path = Path("/")) -> ResourceLimits:
    """Limits of this process, which its children inherit."""
    processes = _soft(resource.RLIMIT_NPROC)
    group = root / "sys/fs/cgroup"
    most, now = _number(group / "pids.max"), _number(group / "pids.current")
    if most is not None and now is not None:
        processes = min(processes, max(0, most - now))
    return ResourceLimits(
        open_files=_soft(resource.RLIMIT_NOFILE), processes=processes, locked_bytes=_soft(resource.RLIMIT_MEMLOCK)
    )


def clock(store: Bucket) -> Clock:
    """Wall clock against monotonic clock, and against the time stamps of the checkpoint store."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(_CLOCK_WINDOW_SECONDS)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    return Clock(wall=wall, drift_ms=drift * 1000, store_offset_ms=_store_offset_ms(store), source=_clock_source())


def ports(wanted: tuple[int, ...], *, host: str) -> Ports:
    """Connect to ourselves over loopback, then bind each wanted port once."""
    loopback_ms, problem = None, ""
    try:
        loopback_ms = min(_loopback_ms() for _ in range(_LOOPBACK_TRIES))
    except OSError as error:
        problem = _said(error)
    return Ports(
        loopback_ms=loopback_ms, loopback_problem=problem, ports=tuple(_port(one, host=host) for one in wanted)
    )


def store(bucket: Bucket) -> Store:
    """Write, read, list and delete a small object where the checkpoints will be."""
    started, step = time.monotonic(), "write"
    folder, content = f"{_PREFIX}{secrets.token_hex(8)}", secrets.token_bytes(4096)
    key = f"{folder}/probe"
    try:
        bucket.create(key, content)
        step = "read"
        if bucket.get(key).data != content:
            return _store(bucket, started=started, step=step, problem="other bytes came back than were written")
        step = "list"
        if [entry.key for entry in bucket.list(folder)] != [key]:
            return _store(bucket, started=started, step=step, problem="what was written is not listed")
        step = "delete"
        bucket.delete([key])
        if bucket.exists(key):
            return _store(bucket, started=started, step=step, problem="what was deleted is still there")
    except GkrError as error:
        return _store(bucket, started=started, step=step, problem=error.message, hint=error.hint)
    finally:
        with contextlib.suppress(GkrError):
            bucket.clear(folder)
    return _store(bucket, started=started)


def dataset(uri: str, *, pick: str, small_bytes: int = _SMALL_DATASET_BYTES) -> Dataset:
    """Open the manifest and verify shards: all of a small dataset, else one.

    `pick` chooses which, so that different nodes verify different ones.
    """
    try:
        local = local_manifest(uri, splits=())
        manifest = open_manifest(local)
        shards = manifest.splits.train
        if not shards:
            return Dataset(uri=uri, problem="the manifest names no training shard", hint="prepare the dataset again")
        number = int.from_bytes(hashlib.sha256(pick.encode()).digest()[:8], "little") % len(shards)
        every = [*shards, *manifest.splits.test]
        chosen = every if sum(one.bytes for one in every) <= small_bytes else [shards[number]]
        which = f"all {len(every)} shards" if chosen is every else f"shard {number + 1} of {len(shards)}"
        for shard in chosen:
            with held_shards(uri, shards=[shard], local=local):
                if manifest.format == "raw":
                    view = read_shard(shard, uri=local, manifest=manifest)
                    view[len(view) - 1]
                else:
                    verify_file(shard, local=local)
    except GkrError as error:
        return Dataset(uri=uri, problem=f"{error.where or uri}: {error.message}", hint=error.hint)
    return Dataset(uri=uri, found=f"{manifest.name} {manifest.digest[:12]}, {which} verified")


def _write_and_read_back(folder: Path, *, size: int) -> str:
    path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
    block = secrets.token_bytes(min(size, 2**20))
    written, read = hashlib.sha256(), hashlib.sha256()
    try:
        with path.open("xb") as file:
            for start in range(0, size, len(block)):
                part = block[: size - start]
                written.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # else the read would only meet the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb") as file:
            while part := file.read(2**20):
                read.update(part)
    finally:
        path.unlink(missing_ok=True)
    return "" if written.digest() == read.digest() else "other bytes came back than were written"


def _meminfo(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def _control_group(folder: Path) -> tuple[int | None, int | None]:
    """Limit and use that cannot be given back, of control groups version 2, else 1."""
    for limit_name, used_name, group in (
        ("memory.max", "memory.current", folder),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", folder / "memory"),
    ):
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is None or limit >= _UNLIMITED_CGROUP:
            continue
        cached = _stat(group / "memory.stat").get("inactive_file", 0)
        return limit, None if used is None else max(0, used - cached)
    return None, None


def _stat(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    except OSError:
        return {}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _soft(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


def _clock_source() -> str | None:
    if sys.platform == "darwin":
        return "mach_absolute_time"
    try:
        return Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip() or None
    except OSError:
        return None


def _store_offset_ms(bucket: Bucket) -> float | None:
    folder = f"{_PREFIX}{secrets.token_hex(8)}"
    # Object stores tell whole seconds of the time at which the write began.
    grain = 0.0 if file_path(bucket.uri) else 1.0
    try:
        before = time.time() - grain
        bucket.put(f"{folder}/probe", b"")
        after = time.time()
        stamp = next(entry.modified for entry in bucket.list(folder))
    except (GkrError, StopIteration):
        return None
    finally:
        with contextlib.suppress(GkrError):
            bucket.clear(folder)
    if before <= stamp <= after:
        return 0.0
    return (before - stamp if stamp < before else after - stamp) * 1000


def _loopback_ms() -> float:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        server.settimeout(_NET_SECONDS)
        client.settimeout(_NET_SECONDS)
        started = time.monotonic()
        client.connect(server.getsockname())
        other, _ = server.accept()
        with other:
            other.settimeout(_NET_SECONDS)
            client.sendall(b"?")
            if other.recv(1) != b"?":
                raise ConnectionError("a byte sent over loopback did not arrive")
        return (time.monotonic() - started) * 1000


def _port(port: int, *, host: str) -> Port:
    try:
        with socket.create_server((host, port)):
            return Port(port=port)
    except OSError as error:
        return Port(port=port, problem=_said(error), holder=_holder(port))


def _holder(port: int) -> str:
    """`name (pid 123)` of the process that listens on a port, as far as this user may see it."""
    import psutil  # only needed here, and 20 ms

    try:
        pids = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN
        ]
        named = [f"{psutil.Process(pid).name()} (pid {pid})" for pid in pids if pid]
    except psutil.Error:
        return ""
    return ", ".join(sorted(set(named)))


def _store(bucket: Bucket, *, started: float, step: str = "", problem: str = "", hint: str = "") -> Store:
    place = file_path(bucket.uri)
    return Store(
        path=str(place or bucket.uri),
        seconds=time.monotonic() - started,
        step=step if problem else "",
        problem=problem,
        hint=hint,
    )


def _said(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
