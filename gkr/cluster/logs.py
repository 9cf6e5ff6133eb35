"""Lines of pods as lines of processes: what a line says about its origin, what was seen already, what is shown; pure.

A pod's main process prints `<learner>/<attempt>/<role>-<index> | line` for every line of its log files; everything else
that a container prints is the pod's own (Ray's start, a command that does not exist).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from gkr.cluster.explain_objects import Object, called, ended, labels, name, phase, ready, seconds, sub, subs
from gkr.logs import RUN, Selection, in_default
from manifests.labels import GROUP, LEARNER, ROLE

TRACEBACK = "Traceback (most recent call last)"
_ORIGIN = re.compile(
    r"(?P<learner>[a-z][a-z0-9-]*)/(?P<attempt>\d+)/(?P<role>[a-z][a-z0-9-]*?)-(?P<index>\d+) \| ?(?P<text>.*)",
    re.DOTALL,
)
POD_ROLE = "pod"
"""Role of lines that are the pod's own."""


@dataclass(frozen=True)
class PodRef:
    """One container of one pod."""

    cluster: str
    namespace: str
    name: str
    learner: str
    role: str
    group: str
    node: str
    container: str
    restarts: int
    failed_at: float | None = None
    """When a container of it first ended badly, as far as the pod still knows."""
    running: bool = True
    """Its container prints, or will."""
    printing: bool = True
    """It does so now: neither ended nor between two starts."""
    ended: bool = False
    """It prints nothing any more, ever."""
    ready: bool = False

    @property
    def broken(self) -> bool:
        """It ended badly and has not recovered: then what it says itself matters."""
        return self.failed_at is not None and not self.ready

    @property
    def key(self) -> tuple[str, str, str]:
        return self.cluster, self.namespace, self.name


@dataclass(frozen=True)
class Source:
    """Who wrote a line."""

    learner: str
    attempt: int
    role: str
    index: int
    pod: str = ""

    @property
    def prefix(self) -> str:
        """`east/rank-0#2`, as for files; of a pod's own lines the pod's name."""
        if self.role == POD_ROLE:
            return f"{self.learner}/{self.pod}" + (f"#{self.attempt}" if self.attempt else "")
        return f"{self.learner}/{self.role}-{self.index}#{self.attempt}"


@dataclass(frozen=True)
class Line:
    """One line with its time as the node wrote it: fixed width, so that text order is time order."""

    stamp: str
    source: Source
    text: str


@dataclass
class Seen:
    """What was already printed of one container: after a reconnect the server repeats a second's lines."""

    reading: Lock = field(default_factory=Lock)
    """Held by whoever reads this container."""
    last: str = ""
    at_last: Counter[str] = field(default_factory=Counter[str])
    _repeats: Counter[str] = field(default_factory=Counter[str])

    def reconnect(self) -> None:
        """The server will start again at the last second."""
        self._repeats = Counter(self.at_last)

    def is_new(self, stamp: str, text: str) -> bool:
        """Count a line; false for one that was counted before."""
        if stamp < self.last:
            return False
        if stamp > self.last:
            self.last, self.at_last, self._repeats = stamp, Counter(), Counter()
        elif self._repeats[text] > 0:
            self._repeats[text] -= 1
            return False
        self.at_last[text] += 1
        return True


def pod_ref(pod: Object, *, cluster: str, container: str | None = None) -> PodRef:
    """What following a pod needs to know of it."""
    own = labels(pod)
    containers = [str(one.get("name")) for one in subs(pod, "spec", "containers")]
    chosen = container or next(iter(containers), "")
    every = [*subs(pod, "status", "initContainerStatuses"), *subs(pod, "status", "containerStatuses")]
    return PodRef(
        cluster=cluster,
        namespace=str(sub(pod, "metadata").get("namespace", "")),
        name=name(pod),
        learner=own.get(LEARNER) or RUN,
        role=own.get(ROLE, ""),
        group=own.get(GROUP, ""),
        node=str(sub(pod, "spec").get("nodeName") or ""),
        container=chosen,
        restarts=int(called(every, chosen).get("restartCount") or 0),
        failed_at=min((at for one in every if (at := _failed_at(one)) is not None), default=None),
        running=phase(pod) in {"Running", "Unknown"} or (phase(pod) == "Pending" and container is not None),
        printing="running" in sub(called(every, chosen), "state"),
        ended=ended(pod),
        ready=ready(pod),
    )


def _failed_at(container: Object) -> float | None:
    for where in ("lastState", "state"):
        ended = sub(container, where).get("terminated")
        if ended and ended.get("exitCode"):
            return seconds(ended.get("finishedAt"))
    return None


def read_line(raw: str, *, pod: PodRef, attempt: int = 0) -> Line:
    """One line as the API server gives it with timestamps. `attempt`: of the pod's own lines, its restarts plus one."""
    stamp, _, text = raw.partition(" ")
    text = text.rstrip("\r\n")
    found = _ORIGIN.match(text)
    if found is None:
        return Line(stamp, Source(pod.learner, attempt, POD_ROLE, 0, pod.name), last_state(text))
    source = Source(found["learner"], int(found["attempt"]), found["role"], int(found["index"]), pod.name)
    return Line(stamp, source, last_state(found["text"]))


def last_state(text: str) -> str:
    """Of a progress bar that rewrote itself only what it showed last."""
    return text.rpartition("\r")[2]


def wanted_pods(
    pods: Iterable[PodRef], *, selection: Selection, group: str | None, node: str | None, pod: str | None
) -> list[PodRef]:
    """The pods in which a selection can have processes."""
    return [
        one
        for one in pods
        if (selection.learner in (None, one.learner))
        and (group in (None, one.group) or group in (one.role, f"{one.group}"))
        and (node in (None, one.node))
        and (pod is None or one.name == pod or one.name.startswith(pod))
        and _may_hold(one, selection)
    ]


def _may_hold(pod: PodRef, selection: Selection) -> bool:
    if selection.rank is not None:
        return pod.role == "trainer"
    if selection.service is not None:
        return pod.role == "service" and pod.group.removeprefix("svc-") in selection.service
    if selection.role in {"head", "trainer", "service", "syncer"}:
        return pod.role == selection.role
    return True


@dataclass
class Chooser:
    """Which lines are shown. Remembers who printed a traceback: from then on such a process is shown too."""

    selection: Selection
    own_lines: bool
    """Pods' own lines as well: somebody asked for certain pods, or for everything."""
    failed: frozenset[str] = frozenset()
    """Pods whose own lines are shown because a container of them ended badly."""
    _traces: set[tuple[str, str, int]] = field(default_factory=set[tuple[str, str, int]])

    def shows(self, line: Line) -> bool:
        """Whether to print it."""
        source, selection = line.source, self.selection
        if selection.learner not in (None, source.learner):
            return False
        if source.role == POD_ROLE:
            return self.own_lines or source.pod in self.failed
        if selection.attempt not in (None, source.attempt):
            return False
        meant = selection.means(role=source.role, index=source.index)
        if meant is not None:
            return meant
        who = (source.learner, source.role, source.index)
        if line.text.startswith(TRACEBACK):
            self._traces.add(who)
        return in_default(source.role, source.index) or who in self._traces


def latest_only(lines: Iterable[Line], *, previous: bool = False) -> list[Line]:
    """Of each process its latest attempt among these lines, or the one before."""
    every = list(lines)
    latest: dict[tuple[str, str], int] = {}
    for line in every:
        key = (line.source.learner, line.source.role)
        latest[key] = max(latest.get(key, 0), line.source.attempt)
    return [
        line
        for line in every
        if line.source.role == POD_ROLE
        or line.source.attempt == latest[line.source.learner, line.source.role] - int(previous)
    ]


def merged(lines: Iterable[Line], *, tail: int | None = None) -> tuple[list[Line], Counter[str]]:
    """By time; of each process the last `tail` lines, and how many of each are left out."""
    ordered = sorted(lines, key=lambda line: line.stamp)
    if tail is None:
        return ordered, Counter()
    total = Counter(line.source.prefix for line in ordered)
    counts: Counter[str] = Counter()
    kept: list[Line] = []
    for line in ordered:
        counts[line.source.prefix] += 1
        if counts[line.source.prefix] > total[line.source.prefix] - tail:
            kept.append(line)
    return kept, Counter({prefix: count - tail for prefix, count in total.items() if count > tail})


def first_failure(lines: Sequence[Line], *, pods: Iterable[PodRef]) -> list[Line]:
    """Lines of the process that failed first: the earliest traceback, else the pod that ended badly first."""
    trace = next((line for line in lines if line.text.startswith(TRACEBACK)), None)
    if trace is not None:
        return [line for line in lines if line.source == trace.source]
    ended = sorted((one for one in pods if one.failed_at is not None), key=lambda one: one.failed_at or 0.0)
    return [line for line in lines if ended and line.source.pod == ended[0].name]
