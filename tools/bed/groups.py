"""Control groups of a bed: one group per hierarchy that is the root of everything inside, so that all can be removed.

Containers get theirs at paths that two kubelets, or a containerd that somebody else runs, would share. Inside the bed's
control group namespace the same paths lie under the bed's own group. Works with version 1 (a tree per controller)
and version 2 (one for all, whose groups hold either processes or groups: components get a group of their own).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spec.errors import UnreachableError
from tools.bed.layout import Bed

COMPONENTS = "components"
"""The group of what is no container."""
REMOVE_SECONDS = 5.0
POLL_SECONDS = 0.05
PLAIN_OPTIONS = frozenset({"rw", "relatime", "nosuid", "nodev", "noexec", "xattr", "clone_children", "nsdelegate"})
"""Options of a mount that do not say which hierarchy it is."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted tree of control groups."""

    path: Path
    kind: str
    """`cgroup` or `cgroup2`."""
    controllers: tuple[str, ...] = ()
    """What its mount names: controllers, or `name=...`; nothing for version 2."""

    @property
    def mount(self) -> list[str]:
        """The command that mounts it again from inside a namespace, with the namespace's group as its root."""
        named = all(one.startswith("name=") for one in self.controllers)
        options = ["none", *self.controllers] if named else list(self.controllers)
        flags = ["-o", ",".join(options)] if self.kind == "cgroup" else []
        return ["mount", "-t", self.kind, *flags, self.kind, f"{self.path}"]


def hierarchies(mounts: str | None = None) -> list[Hierarchy]:
    """What is mounted, outermost first."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    found: dict[Path, Hierarchy] = {}
    for line in text.splitlines():
        _, path, kind, options = line.split()[:4]
        if kind not in {"cgroup", "cgroup2"}:
            continue
        known = kind == "cgroup2"
        controllers = () if known else tuple(one for one in options.split(",") if one not in PLAIN_OPTIONS)
        kept = tuple(one for one in controllers if not one.startswith(("release_agent=", "cpuset_")))
        found[Path(path)] = Hierarchy(Path(path), kind, kept)
    return sorted(found.values(), key=lambda one: len(one.path.parts))


def create(bed: Bed) -> list[Path]:
    """Make the bed's groups, with the controllers of their parents. Returns the top one of every hierarchy."""
    tops: list[Path] = []
    for hierarchy in hierarchies():
        top = hierarchy.path / bed.netns
        _enable(hierarchy.path)
        for group in (top, top / COMPONENTS):
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                _inherit(group / name, group.parent / name)
        tops.append(top)
    return tops


def _enable(group: Path) -> None:
    """All controllers for the groups below, with version 2; one that is not to be had is no reason to stop."""
    try:
        names = (group / "cgroup.controllers").read_text().split()
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            (group / "cgroup.subtree_control").write_text(f"+{name}")


def _inherit(file: Path, parent: Path) -> None:
    """Version 1 lets no process into a group without processors and memory nodes."""
    if parent.is_file() and file.is_file() and not file.read_text().strip():
        file.write_text(parent.read_text())


def join(bed: Bed, pids: Iterable[int]) -> None:
    """Move processes into the bed's group of components."""
    numbers = list(pids)
    for hierarchy in hierarchies():
        top = hierarchy.path / bed.netns
        for pid in numbers:
            (top / COMPONENTS / "cgroup.procs").write_text(f"{pid}")
        # Not before: with version 2 a group that gives controllers to those below holds no process itself.
        _enable(top)


def remove(bed: Bed) -> None:
    """Remove all groups; the kernel lets go of one a moment after its last process."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while tops := [path for path in (one.path / bed.netns for one in hierarchies()) if path.is_dir()]:
        for top in tops:
            folders = [top, *(path for path in top.rglob("*") if path.is_dir())]
            for folder in sorted(folders, reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if time.monotonic() > deadline:
            raise UnreachableError(f"the control group {tops[0]} cannot be removed", hint="a process in it still runs")
        time.sleep(POLL_SECONDS if any(top.is_dir() for top in tops) else 0)
