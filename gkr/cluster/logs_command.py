"""`gkr logs` of a run on clusters: live pods through their API servers, pods that are gone through the buckets."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gkr.backend import Attachment, backend_of
from gkr.cluster.connection import Connection, connect
from gkr.cluster.logs import POD_ROLE, Chooser, Line, PodRef, first_failure, latest_only, merged, wanted_pods
from gkr.cluster.logs_reading import MOST_STREAMS, Follower, Request, list_pods, read_pods, since_time
from gkr.cluster.places import Places, read_places
from gkr.log_output import Printer
from gkr.logs import LogFile, Selection, find_logs, first_failed, select, tail_lines
from gkr.output import say
from gkr.runs import FINAL, Run, read_state
from spec.errors import EXIT_OK, GkrError, NotFoundError, UnreachableError

_BIG_TAIL = 1000
"""Lines per process when there are more pods than can be read whole."""
_PROCESSES = 16
"""Processes that share a pod's output: the server counts the pod's lines, people count a process's."""
_STEP_SECONDS = 0.25
_LOOK_SECONDS = 2.0
_LAST_SECONDS = 3.0


@dataclass(frozen=True)
class Pods:
    """What was asked about pods rather than processes."""

    group: str | None = None
    node: str | None = None
    pod: str | None = None
    container: str | None = None
    since: float | None = None
    failed: bool = False

    @property
    def named(self) -> bool:
        """Certain pods were asked for, so that their own lines count too."""
        return any(one is not None for one in (self.group, self.node, self.pod, self.container))

    def choose(self, pods: Sequence[PodRef], selection: Selection) -> list[PodRef]:
        """Those that were asked for."""
        return wanted_pods(pods, selection=selection, group=self.group, node=self.node, pod=self.pod)


def print_pods(run: Run, selection: Selection, *, pods: Pods, tail: int | None, printer: Printer) -> int:
    """Everything there is, once."""
    places = read_places(run.path)
    with _Connections(places) as connections:
        present = _present(places, connections, container=pods.container)
        chosen = pods.choose(present, selection)
        lines = _live_lines(chosen, connections, selection, pods=pods, tail=tail)
    files = _files(run, selection, pods=pods, live=lines)
    if not lines and not files:
        there = ", ".join(one.name for one in present[:8]) or "none"
        hint = f"live pods: {there}; `gkr why {run.name}` says what it waits for"
        raise NotFoundError(f"run {run.name} has no such log", hint=hint)
    for log in files:
        kept, left_out = tail_lines(log, count=tail)
        _left_out(log.prefix, left_out)
        for text in kept:
            printer.file_line(log, text)
    kept_lines, missing = merged(lines, tail=tail)
    for prefix, count in missing.items():
        _left_out(prefix, count)
    for line in kept_lines:
        printer.pod_line(line)
    return EXIT_OK


def follow_pods(run: Run, selection: Selection, *, pods: Pods, tail: int | None, printer: Printer) -> int:
    """Until the run has ended; then its fate. While nothing runs yet, what it waits for is said."""
    places = read_places(run.path)
    if read_state(run.path).status in FINAL:
        print_pods(run, selection, pods=pods, tail=tail, printer=printer)
        return _fate(run)
    with _Connections(places) as connections:
        request = Request(tail=None if tail is None else tail * _PROCESSES, since=_moment(pods.since))
        follower = Follower(
            places,
            connections,
            request=request,
            wants=lambda one: bool(pods.choose([one], selection)),
            container=pods.container,
        )
        chooser = Chooser(selection, own_lines=pods.named or selection.everything)
        state = _State(run)
        follower.start()
        state.start()
        try:
            _pump(follower, chooser, state=state, printer=printer)
        finally:
            follower.stop.set()
            state.stop.set()
    if state.error is not None:
        raise state.error
    return _fate(run)


class _State:
    """Keeps the run's folder current beside the following, and says when its state changes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.stop, self.over = threading.Event(), threading.Event()
        self.error: GkrError | None = None

    def start(self) -> None:
        """Daemon: a request that hangs must not keep the command from ending."""
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        attachment: Attachment | None = None
        said = ""
        try:
            attachment = backend_of(self._run).attach(self._run)
            while not self.stop.is_set():
                more = attachment.refresh()
                state = read_state(self._run.path)
                now = state.status + (f": {state.reason}" if state.reason else "")
                if now != said and state.status not in FINAL:
                    said = now
                    say(f"run {self._run.name} {now}")
                if not more:
                    break
                self.stop.wait(max(_LOOK_SECONDS, attachment.poll_seconds))
        except GkrError as error:
            self.error = error
        finally:
            self.over.set()
            if attachment is not None:
                attachment.close()


def _pump(follower: Follower, chooser: Chooser, *, state: _State, printer: Printer) -> None:
    """From the pods to the printer; a short while longer than the run, for the last lines."""
    until: float | None = None
    while until is None or time.monotonic() < until:
        chooser.failed = follower.broken_pods
        for line in follower.lines(wait_seconds=_STEP_SECONDS):
            if chooser.shows(line):
                printer.pod_line(line)
        if not follower.problems.empty():
            raise follower.problems.get()
        if until is None and state.over.is_set():
            until = time.monotonic() + _LAST_SECONDS


def _live_lines(
    chosen: Sequence[PodRef],
    connections: Mapping[str, Connection],
    selection: Selection,
    *,
    pods: Pods,
    tail: int | None,
) -> list[Line]:
    if tail is None and len(chosen) > MOST_STREAMS:
        tail = _BIG_TAIL
        say(f"{len(chosen)} pods: only the last {tail} lines of each process; --tail, --node and --rank choose")
    request = Request(tail=None if tail is None else tail * _PROCESSES, since=_moment(pods.since))
    lines, silent = read_pods(chosen, connections, request=request)
    restarted = [one for one in chosen if one.restarts and (selection.previous or pods.failed or not one.running)]
    if restarted:
        lines += read_pods(restarted, connections, request=replace(request, previous=True))[0]
    for name, why in list(silent.items())[:3]:
        say(f"{name}: {why}")
    bad = frozenset(one.name for one in chosen if one.broken)
    chooser = Chooser(selection, own_lines=pods.named or selection.everything or pods.failed, failed=bad)
    ordered, _ = merged(lines)
    if pods.failed:
        return first_failure(ordered, pods=chosen)
    shown = [line for line in ordered if chooser.shows(line)]
    keep = selection.everything or selection.attempt is not None
    return shown if keep else latest_only(shown, previous=selection.previous)


def _files(run: Run, selection: Selection, *, pods: Pods, live: Sequence[Line]) -> list[LogFile]:
    """Mirrored files of processes that no live pod shows, as when a driver is gone and other pods are not yet.

    Files know neither group nor node.
    """
    silent = all(line.source.role == POD_ROLE for line in live)
    wanted = silent or selection.everything or selection.attempt is not None or selection.previous
    if not wanted or pods.named or (pods.failed and live):
        return []
    attachment = backend_of(run).attach(run)
    try:
        attachment.logs()
    finally:
        attachment.close()
    seen = {(one.source.learner, one.source.attempt, one.source.role, one.source.index) for one in live}
    found = select(find_logs(run.path), selection=selection)
    found = first_failed(found) if pods.failed else found
    return [log for log in found if (log.learner, log.attempt, log.role, log.index) not in seen]


def _present(places: Places, connections: Mapping[str, Connection], *, container: str | None) -> list[PodRef]:
    """A cluster that does not answer costs its own pods only: its files may be here."""
    try:
        return list_pods(places, connections, container=container)
    except UnreachableError as error:
        say(f"{error}")
        return []


def _fate(run: Run) -> int:
    state = read_state(run.path)
    say(f"run {run.name} {state.status}" + (f": {state.reason}" if state.reason else ""))
    return state.exit_code


def _left_out(prefix: str, count: int) -> None:
    if count:
        say(f"{prefix}: {count} earlier lines are not shown")


def _moment(seconds_ago: float | None) -> str | None:
    return None if seconds_ago is None else since_time(seconds_ago, now=time.time())


class _Connections:
    """A connection to each cluster of a run, given back at the end."""

    def __init__(self, places: Places) -> None:
        self._open = {name: connect(entry) for name, entry in places.clusters.items()}

    def __enter__(self) -> Mapping[str, Connection]:
        return self._open

    def __exit__(self, *_: object) -> None:
        for one in self._open.values():
            one.close()
