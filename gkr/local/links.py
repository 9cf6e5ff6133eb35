"""The simulated links of a run as the supervisor keeps them: one process per learner that has one.

The listening sockets are the supervisor's: a learner's driver can be told the addresses before the process answers, and
a link that died is started again on the same ports. Links end with the supervisor.
"""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gkr.local.children import Children, Gone
from gkr.local.states import Endpoints
from spec.plan import Plan

MOST_RESTARTS = 3
_PREFIX = "link/"


@dataclass
class _Link:
    learner: str
    target: Endpoints
    listeners: list[socket.socket]
    began: float = field(default_factory=time.monotonic)
    starts: int = 0


class Links:
    """The links of one run."""

    def __init__(self, folder: Path, *, plan: Plan, children: Children) -> None:
        self._folder, self._children = folder, children
        self._simulated = {one.name for one in plan.learners if one.link is not None}
        self._links: dict[str, _Link] = {}

    def endpoints(self, learner: str, syncer: Endpoints | None) -> Endpoints | None:
        """Where this learner reaches the syncer; starts its link on the first call. Raises OSError."""
        if syncer is None or learner not in self._simulated:
            return syncer
        if learner not in self._links:
            listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in range(2)]
            self._links[learner] = _Link(learner, syncer, listeners)
            self._start(self._links[learner])
        control, bulk = (f"127.0.0.1:{one.getsockname()[1]}" for one in self._links[learner].listeners)
        return Endpoints(control=control, bulk=bulk)

    def restart(self, gone: Gone) -> str:
        """Start a link that died again; a reason if that makes no sense any more."""
        link = self._links[gone.name.removeprefix(_PREFIX)]
        if link.starts > MOST_RESTARTS:
            return f"the link of {link.learner} died {link.starts} times, last with code {gone.code}: {gone.last_line}"
        try:
            self._start(link)
        except OSError as error:
            return f"the link of {link.learner} died and cannot be started again: {error}"
        return ""

    def close(self) -> None:
        """End all of them."""
        for link in self._links.values():
            self._children.end(_PREFIX + link.learner)
            for one in link.listeners:
                one.close()

    def _start(self, link: _Link) -> None:
        link.starts += 1
        command = [sys.executable, "-m", "gkr.local.link", "--plan", f"{self._folder / 'plan.json'}"]
        command += ["--learner", link.learner, "--started", f"{link.began}"]
        for listener, target in zip(link.listeners, (link.target.control, link.target.bulk), strict=True):
            command += ["--port", f"{listener.fileno()}", target]
        log = self._folder / "logs" / link.learner / f"{link.starts}" / "link-0.log"
        descriptors = [one.fileno() for one in link.listeners]
        self._children.start(_PREFIX + link.learner, command=command, log=log, descriptors=descriptors)


def is_link(name: str) -> bool:
    """Whether a child of this name is a link."""
    return name.startswith(_PREFIX)
