"""The namespaces of a bed and the process that holds them open.

A bed is a network, a mount and a process namespace. The process that holds them open is number 1 of the process
namespace: when it is killed the kernel kills everything in there, components, containers and whatever they started, and
frees the mounts. Nothing about processes is written down, so nothing written down can be stale after a SIGKILL: the
holder is the first process of the network namespace with our name.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from gkr.runs import process_birth
from spec.errors import UnreachableError
from tools.bed import groups
from tools.bed.layout import Bed

OWNER = "GKR_BED_FOLDER"
POLL_SECONDS = 0.05
LOG_LINES = 15
RUNTIME_FOLDERS = ("/var/lib/kubelet", "/var/lib/cni")
"""Paths that kubelet and the network plugins have built in; inside the bed they are folders of its own."""


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same id."""

    pid: int
    birth: str

    @property
    def alive(self) -> bool:
        """Neither gone nor a zombie."""
        return process_birth(self.pid) == self.birth


def holder(bed: Bed) -> Process | None:
    """Process 1 of the bed, if the bed is up."""
    return next((process for process, numbers in members(bed) if numbers[1:] == [1]), None)


def owner(bed: Bed) -> Path | None:
    """The state folder of whoever brought up the bed that runs under this name: another user may have one as well."""
    first = holder(bed)
    folder = environment_of(first.pid).get(OWNER) if first else None
    return Path(folder) if folder else None


def hold(bed: Bed) -> Process:
    """Open the bed's namespaces; the network namespace is there already."""
    found = holder(bed)
    if found is not None:
        return found
    for folder in RUNTIME_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (bed.data / Path(folder).name).mkdir(parents=True, exist_ok=True)
    tops = groups.create(bed)
    script = _HOLD.replace("@groups", "\n".join(_mounts()))
    unshare = ["unshare", "--cgroup", "--mount", "--propagation=slave", "--pid", "--kill-child", "--mount-proc", "--"]
    command = [
        "nsenter", f"--net=/run/netns/{bed.netns}", "--",
        # A control group namespace has as its root the group in which it was made.
        "/bin/sh", "-ec", 'for group in $1; do echo $$ > "$group/cgroup.procs"; done; shift; exec "$@"', "sh",
        " ".join(map(str, tops)), *unshare, "/bin/sh", "-ec", script, "sh", f"{bed.data}",
    ]  # fmt: skip
    environment = {**clean_environment(), OWNER: f"{bed.folder}"}
    log = bed.log("holder")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        parent = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and parent.poll() is None:
        found = holder(bed)
        if found is not None and Path(f"/proc/{found.pid}/root/run/gkr-bed").exists():
            groups.join(bed, [parent.pid, found.pid])
            return found
        time.sleep(POLL_SECONDS)
    raise UnreachableError(f"the namespaces of {bed.name} cannot be opened{log_end(bed, 'holder')}")


# Process 1: mounts of its own, then nothing but reaping orphans. `--make-rshared` lets kubelet and containerd see each
# other's mounts; nothing goes back to the host, which is what `--propagation=slave` above says.
_HOLD = """
data=$1
@groups
mount --make-rshared /
mount -t tmpfs -o mode=0755 tmpfs /run
mount -t tmpfs -o mode=0755 tmpfs /var/log
mount --bind "$data/kubelet" /var/lib/kubelet
mount --bind "$data/cni" /var/lib/cni
mkdir -p /run/containerd /run/netns /run/lock
: > /run/gkr-bed
trap : TERM INT HUP
while :; do sleep 2147483 & wait $!; done
"""


def _mounts() -> list[str]:
    """Shell lines that mount every tree of control groups anew, with the bed's group as its root; innermost first."""
    every = groups.hierarchies()
    gone = [f"umount {shlex.quote(str(one.path))}" for one in reversed(every)]
    return [*gone, *(shlex.join(one.mount) for one in every)]


def release(bed: Bed) -> None:
    """End every process of the bed and wait until the last one is gone."""
    deadline = time.monotonic() + 30
    first = holder(bed)
    if first is not None:
        send(first, signal.SIGKILL)
    while left := members(bed):
        if time.monotonic() > deadline:
            raise UnreachableError(f"processes of {bed.name} do not end: {', '.join(str(one.pid) for one, _ in left)}")
        for process, _ in left:
            # What an `up` that was killed had started in the network namespace before there was a process 1.
            send(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def remove_mount_points() -> None:
    """Only when no bed is up: removing a folder here unmounts what lies on it in every other mount namespace.

    `ip netns` leaves its folder mounted on itself; it goes when it is empty, and `ip netns` makes it again.
    """
    if any(Path("/run/netns").glob("gkr-bed-*")):
        return
    for folder in RUNTIME_FOLDERS:
        try:
            Path(folder).rmdir()
        except OSError:
            continue  # in use by others, or never made
    names = Path("/run/netns")
    if names.is_mount() and not any(names.iterdir()):
        subprocess.run(["umount", f"{names}"], capture_output=True, check=False, timeout=10)


def members(bed: Bed) -> list[tuple[Process, list[int]]]:
    """Processes of the bed's network namespace, each with its ids from the host's namespace inwards."""
    try:
        inode = Path(f"/run/netns/{bed.netns}").stat().st_ino
    except FileNotFoundError:
        return []
    found: list[tuple[Process, list[int]]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        pid = int(entry.name)
        try:
            if Path(f"/proc/{pid}/ns/net").stat().st_ino != inode:
                continue
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        birth = process_birth(pid)
        numbers = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        if birth is not None and numbers:
            found.append((Process(pid, birth), [int(number) for number in numbers[0]]))
    return found


def environment_of(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0") if b"=" in part)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def send(process: Process, number: int) -> bool:
    """Signal the process unless it is gone."""
    if not process.alive:
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def clean_environment() -> dict[str, str]:
    """Nothing of the caller's reaches a component: proxies, credentials and kubeconfigs do not belong there."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"}


def last_lines(text: str, *, count: int = LOG_LINES, width: int = 300) -> str:
    """The end of a log, indented, with lines cut to a width that a person reads."""
    lines = [line if len(line) <= width else f"{line[:width]} ..." for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line}" for line in lines[-count:])


def log_end(bed: Bed, name: str) -> str:
    path = bed.log(name)
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return f"; the end of {path}:{last_lines(text)}"
