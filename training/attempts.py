"""Attempts of one learner: carries out what the recovery controller decides, and tells it what happened.

The thin layer between `training.recovery` (pure) and the agents (Ray actors, reached only through the handle that
`training.agent` gives). Every remote call has a deadline. What it observes it also writes as events, so that the next
driver can go on counting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spec import events as ev
from spec.errors import UnreachableError
from spec.plan import NodePlan, Plan
from spec.services import Directory
from training import recovery
from training.agents import AgentLostError, Agents
from training.classify import Cause, RankEnd, classify, classify_commands
from training.context import RuntimeContext
from training.event_log import EventLog
from training.files import replace_text
from training.options import Options, node_folder
from training.progress import NOT_RESTORED, read_page

log = logging.getLogger("attempts")

SETTLE_SECONDS = 0.4
"""After the first failed rank, how long its peers may still show their own end before the cause is judged."""
WAIT_TICK_SECONDS = 0.25
SAY_AFTER_SECONDS, SAY_EVERY_SECONDS = 5.0, 30.0
"""When a wait for agents is told to the person who watches, and how often again."""
STALL_SECONDS = {"start": 180.0, "join": 120.0, "restore": 120.0, "step": 120.0}
"""Longest time without progress by phase. Phases that wait with deadlines of their own (register, barrier, apply) are
not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What earlier drivers of this learner left in the events."""

    attempt: int = 0
    epoch: int = 0
    furthest: int = 0
    last_position: int = 0
    """Where the last attempt ended, as far as it is known."""
    last_step: int = 0
    restored_at: int | None = None
    """Where the last attempt began; none if it did not come so far."""
    last_time: float = 0.0
    """Of the last event of the learner, in seconds since 1970."""
    open_attempt: bool = False
    """The last attempt has no recorded end: its driver died with it."""

    @property
    def samples_run(self) -> int:
        """Of the last attempt."""
        return 0 if self.restored_at is None else max(0, self.last_position - self.restored_at)


def previous_attempts(path: Path, *, learner: str) -> History:
    """Fold the events of earlier drivers, so that attempts and epochs only grow."""
    history = History()
    if not path.exists():
        return history
    with path.open(encoding="utf-8", errors="replace") as file:
        for event in ev.read_events(file):
            if getattr(event, "learner", "") == learner:
                history = _fold(replace(history, last_time=max(history.last_time, event.time)), event)
    return history


def _fold(history: History, event: ev.Event) -> History:
    match event:
        case ev.AttemptStarted(attempt=attempt, epoch=epoch):
            return replace(history, attempt=attempt, epoch=epoch, open_attempt=True, restored_at=None)
        case ev.AttemptEnded(attempt=attempt, position=position) if attempt == history.attempt:
            return replace(history, open_attempt=False, last_position=position)
        case ev.Restored(position=position):
            return replace(history, last_position=position, restored_at=position)
        case ev.StepMetrics(position=position, step=step):
            furthest = max(history.furthest, position)
            return replace(history, furthest=furthest, last_position=position, last_step=step)
        case _:
            return history


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last attempt that is over, as it was reported."""

    number: int
    cause: str
    samples_run: int
    position: int

    def seen_from(self, restored: int) -> Ended:
        """The same end, known better: whoever could restore a later position proves that it had been reached.

        Steps between the last look at a rank and the end of its machine are not seen. Those that were saved or merged
        show up here; the others were lost unseen, and count neither as run nor as lost.
        """
        beyond = restored - self.position
        return self if beyond <= 0 else replace(self, samples_run=self.samples_run + beyond, position=restored)


@dataclass(slots=True)
class _Restart:
    """A recovery whose first new step is still awaited."""

    event: dict[str, Any]
    died: float
    furthest_step: int


@dataclass(slots=True)
class _Attempt:
    """What is known of the attempt that runs."""

    number: int
    ends: dict[int, RankEnd] = field(default_factory=dict[int, RankEnd])
    first_failure: float | None = None
    steps: int = 0
    """Furthest step of rank 0."""
    samples_run: int = 0
    position: int | None = None
    """None until the rank has taken up its state."""
    first_step: float | None = None
    over: bool = False


class Attempts:
    """All attempts of one learner under one driver."""

    def __init__(
        self, plan: Plan, *, options: Options, out: EventLog, history: History, node_deadline_seconds: float
    ) -> None:
        self.plan, self.options, self.out = plan, options, out
        self.learner = plan.learner(options.learner)
        self.finish: recovery.Finish | None = None
        self._node_deadline_seconds = node_deadline_seconds
        """Longest wait for the agent that replaces a lost one."""
        self._processes = len(self.learner.nodes) if plan.run_script is not None else self.learner.world_size
        self._current: _Attempt | None = None
        self._restart: _Restart | None = None
        self._ended: Ended | None = None
        history = self._close_open_attempt(history)
        self._state = recovery.State(
            attempt=history.attempt,
            epoch=history.epoch,
            furthest=history.furthest,
            budget=plan.retry.max,
            retried=frozenset(plan.retry.on),
        )
        self._agents = Agents(plan, learner=self.learner)
        self._last_position = history.last_position
        self._starting: tuple[recovery.StartAttempt, float] | None = None
        self._lost_since: dict[str, float] = {}
        self._held: list[str] = []
        self._said = 0.0
        self._directory_epoch = -1
        self._directory: Directory | None = None

    def start_agents(self) -> None:
        """Ask Ray for one agent per node; does not wait for them."""
        for node in self.learner.nodes:
            self._agents.start(node.name)

    def await_agents(self, *, deadline_seconds: float) -> None:
        """Until every node has its agent; on a cluster that is when its pod has joined."""
        started = time.monotonic()
        while missing := self._agents.missing():
            waited = time.monotonic() - started
            if waited > deadline_seconds:
                raise UnreachableError(
                    f"no agent on {self._lacks(missing)} after {deadline_seconds:.0f} s",
                    hint="`gkr why` says what their pods wait for; timeouts.start sets how long is waited",
                )
            self._say_wait(missing, waited=waited)
            time.sleep(WAIT_TICK_SECONDS)
        places = [
            f"{node} in {place.pod} on {place.machine}" for node, place in self._agents.places().items() if place.pod
        ]
        if places:
            self._note(f"agents of {self.learner.name}: {', '.join(places)}")

    def preflight(self, *, deadline_seconds: float) -> tuple[str, ...]:
        """Run every node's checks at once; returns the failed ones in words."""
        logs = {
            node.name: f"{self.options.log_folder}/preflight-{index}.log"
            for index, node in enumerate(self.learner.nodes)
        }
        started = time.monotonic()
        results = self._agents.preflight(logs=logs, deadline_seconds=deadline_seconds)
        failed: list[str] = []
        for node, checks in results.items():
            parsed = [ev.Check(**check) for check in checks]
            self.out.emit(
                ev.Preflight, learner=self.learner.name, node=node, checks=parsed, seconds=time.monotonic() - started
            )
            failed += [
                f"{node}: {one.name}: {one.value} (needs {one.threshold}) {one.evidence}; {one.hint}".strip("; ")
                for one in parsed
                if one.verdict == "FAIL"
            ]
        return tuple(failed)

    def set_directory(self, directory: Directory) -> None:
        """Hand new service addresses to every node."""
        if directory.epoch == self._directory_epoch:
            return
        self._directory, self._directory_epoch = directory, directory.epoch
        text = directory.write_json()
        self._agents.set_directory(text)
        replace_text(self.options.run_dir / "state" / f"services-{self.learner.name}.json", text)

    def hold(self, unplaced: list[str]) -> None:
        """Start no attempt while these replicas have no machine: its ranks would only wait for them, and in vain after
        their deadline. How long such a replica may take is its host's to say."""
        self._held = unplaced

    def handle(self, event: recovery.Event) -> None:
        """Tell the controller, then do what it says."""
        self._state, effects = recovery.step(self._state, event)
        self._carry_out(effects)

    def poll(self) -> None:
        """Look at every node once and react."""
        if self._starting is not None and time.monotonic() >= self._starting[1]:
            if self._held:
                self._say_held(time.monotonic() - self._starting[1])
            else:
                effect, self._starting = self._starting[0], None
                self._spawn(effect)
        self._replace_nodes()
        current = self._current
        for node, snapshot in self._agents.poll():
            if isinstance(snapshot, AgentLostError):
                self._lost(node, snapshot)
                continue
            for line in snapshot["events"]:
                self.out.line(line)
            if current is not None and snapshot["epoch"] == self._state.epoch:
                self._look(current, snapshot)
        if current is not None and not current.over:
            self._judge(current)

    def close(self) -> None:
        """Kill all ranks and agents."""
        self._agents.close()

    def _close_open_attempt(self, history: History) -> History:
        """Write the end of an attempt whose driver died. The progress page of rank 0 outlives both where nodes share
        this folder; where they do not, the last event is what is known."""
        if not history.open_attempt:
            return history
        nodes = [self.options.run_dir / node_folder(self.learner.name, node=one.name) for one in self.learner.nodes]
        pages = [read_page(folder / "progress-0.page") for folder in nodes]
        page = next((page for page in pages if page is not None and page.epoch == history.epoch), None)
        samples_run = history.samples_run
        if page is not None and page.position != NOT_RESTORED:
            furthest = max(history.furthest, page.position)
            history, samples_run = replace(history, furthest=furthest, last_position=page.position), page.samples_run
        self._emit_end(
            Ended(number=history.attempt, cause="driver lost", samples_run=samples_run, position=history.last_position)
        )
        if self.options.events is None:  # else the supervisor that started us again says so
            silent = max(0.0, time.time() - history.last_time)
            fields = {
                "learner": self.learner.name,
                "what": "driver",
                "cause": "its pod or process is gone",
                "action": f"a new driver went on with attempt {history.attempt + 1}",
                "detected_seconds": silent,
            }
            self._restart = _Restart(event=fields, died=time.monotonic() - silent, furthest_step=history.last_step)
        return replace(history, open_attempt=False)

    def _carry_out(self, effects: list[recovery.Effect]) -> None:
        for effect in effects:
            match effect:
                case recovery.StartAttempt():
                    self._starting = (effect, time.monotonic() + effect.after_seconds)
                case recovery.Fence(epoch=epoch):
                    self._agents.fence(epoch)
                case recovery.ReplaceNode(node=node):
                    self._agents.start(node)
                case recovery.Finish():
                    self.finish = effect

    def _spawn(self, effect: recovery.StartAttempt) -> None:
        started = time.monotonic()
        context = RuntimeContext(
            plan="",  # these two are the agent's to say
            learner=self.learner.name,
            node="",
            node_dir="",
            rank=0,
            local_rank=0,
            world_size=self.learner.world_size,
            attempt=effect.attempt,
            epoch=effect.epoch,
            master_addr="",
            master_port=0,
            syncer_control=self.options.syncer_control,
            syncer_bulk=self.options.syncer_bulk,
            last_position=self._last_position,
        )
        self._current = _Attempt(effect.attempt)
        try:
            pids = self._agents.spawn(context, ranks=_ranks(self.learner.nodes))
        except AgentLostError as lost:
            self._lost(lost.node, lost)
            return
        log.info(
            "attempt %d (epoch %d): %s after %.2f s", effect.attempt, effect.epoch, pids, time.monotonic() - started
        )
        self.out.emit(
            ev.AttemptStarted,
            learner=self.learner.name,
            attempt=effect.attempt,
            epoch=effect.epoch,
            world_size=self.learner.world_size,
            pids={**pids, **self._agents.pids()},
        )
        if self.plan.run_script is not None and self._restart is not None:  # nobody tells of a command's first step
            self._emit_recovery(self._restart, first_step=None, lost_steps=0)
            self._restart = None

    def _look(self, current: _Attempt, snapshot: dict[str, Any]) -> None:
        # Each machine has a monotonic clock of its own.
        offset = time.monotonic() - snapshot["monotonic"]
        for end in snapshot["exits"]:
            rank, moment = int(end["job"].removeprefix("rank-")), end["monotonic"] + offset
            current.ends.setdefault(rank, RankEnd(rank=rank, code=end["code"], monotonic=moment, reason=end["reason"]))
        page = snapshot["pages"].get(0)
        if page is None:
            return
        if page["position"] != NOT_RESTORED:
            if current.position is None:
                self._restored(page["position"] - page["samples_run"])
            current.samples_run, current.position, current.steps = page["samples_run"], page["position"], page["step"]
            self.handle(recovery.Progress(page["position"]))
        moment = page["monotonic"] + offset
        if page["steps_run"] and current.first_step is None:
            current.first_step = moment
            self._first_step(page=page, moment=moment)
        limit = STALL_SECONDS.get(page["phase"])
        if limit is not None and time.monotonic() - moment > limit and not current.over:
            text = f"no progress for {limit:.0f} s in phase {page['phase']}"
            self._over(current, cause=Cause(kind="hang", text=text, signature="hang"), died=moment)

    def _restored(self, position: int) -> None:
        """The ranks have taken up their state: correct the end of the attempt before, if it was not known so far."""
        if self._ended is None:
            return
        better = self._ended.seen_from(position)
        if better != self._ended:
            self._emit_end(better)

    def _judge(self, current: _Attempt) -> None:
        failed = [end for end in current.ends.values() if end.code != 0]
        if failed and current.first_failure is None:
            current.first_failure = time.monotonic()
        everyone = len(current.ends) == self._processes
        # Errors of the peers of a lost node come before the news of its loss: wait until every node has answered.
        settled = (
            current.first_failure is not None
            and time.monotonic() - current.first_failure >= SETTLE_SECONDS
            and self._agents.answered_since(current.first_failure)
        )
        # A rank that was killed is the cause whatever its peers say, so nothing is gained by waiting for them.
        killed = any(end.code < 0 for end in failed)
        if (everyone and not failed) or settled or killed:
            died = min((end.monotonic for end in failed), default=time.monotonic())
            judge = classify_commands if self.plan.run_script is not None else classify
            self._over(current, cause=judge(list(current.ends.values())), died=died)

    def _over(self, current: _Attempt, *, cause: Cause, died: float) -> None:
        current.over = True
        detected = time.monotonic() - died
        log.info("attempt %d over: %s (%s)", current.number, cause.text, cause.kind)
        if current.position is not None:
            self._last_position = current.position
        self._emit_end(
            Ended(
                number=current.number,
                cause=cause.text,
                samples_run=current.samples_run,
                position=self._last_position,
            )
        )
        if cause.kind != "finished":
            what = f"rank {cause.ranks[0]}" if cause.ranks else "learner"
            if cause.kind == "node_lost":
                what = f"agent {cause.text.split()[0]}"
            fields: dict[str, Any] = {
                "learner": self.learner.name,
                "what": what,
                "cause": cause.text.removeprefix(f"{what.removeprefix('agent ')} "),
                "action": "all ranks restarted",
                "detected_seconds": detected,
            }
            if self._restart is not None:  # died again before its first step: the first death keeps its own entry
                self._emit_recovery(self._restart, first_step=None, lost_steps=0)
            self._restart = _Restart(event=fields, died=died, furthest_step=current.steps)
        self.handle(recovery.AttemptOver(current.number, cause))
        if self.finish is not None and self._restart is not None:
            self._restart.event["action"] = "run ended"
            if cause.kind not in {"user", "numeric"}:
                self._emit_recovery(self._restart, first_step=None, lost_steps=0)
            self._restart = None

    def _first_step(self, *, page: dict[str, Any], moment: float) -> None:
        if self._restart is None:
            return
        lost = max(0, self._restart.furthest_step - (page["step"] - page["steps_run"]))
        self._emit_recovery(self._restart, first_step=moment - self._restart.died, lost_steps=lost)
        self._restart = None

    def _emit_end(self, ended: Ended) -> None:
        self._ended = ended
        self.out.emit(
            ev.AttemptEnded,
            learner=self.learner.name,
            attempt=ended.number,
            cause=ended.cause,
            samples_run=ended.samples_run,
            position=ended.position,
        )

    def _note(self, text: str) -> None:
        log.info("%s", text)
        self.out.emit(ev.Note, level="info", text=text)

    def _emit_recovery(self, restart: _Restart, *, first_step: float | None, lost_steps: int) -> None:
        self.out.emit(ev.Recovery, **restart.event, first_step_seconds=first_step, lost_steps=lost_steps)

    def _lost(self, node: str, lost: AgentLostError) -> None:
        self._state, effects = recovery.lost_nodes(self._state, nodes=(node,))
        self._carry_out(effects)
        if self._current is not None and not self._current.over:
            self._last_page(self._current, node=node)
            cause = Cause(kind="node_lost", text=f"{node} {lost.cause}", signature=f"node {node}")
            self._over(self._current, cause=cause, died=lost.monotonic)

    def _last_page(self, current: _Attempt, *, node: str) -> None:
        """Steps since the last poll, if the lost node's folder can still be read (on a cluster it is gone as well)."""
        folder = self.options.run_dir / node_folder(self.learner.name, node=node)
        page = read_page(folder / "progress-0.page")
        if page is not None and page.epoch == self._state.epoch and page.position != NOT_RESTORED:
            current.samples_run, current.position, current.steps = page.samples_run, page.position, page.step
            self.handle(recovery.Progress(page.position))

    def _replace_nodes(self) -> None:
        for node in sorted(self._state.missing_nodes):
            since = self._lost_since.setdefault(node, time.monotonic())
            waited = time.monotonic() - since
            if self._agents.ready(node):
                del self._lost_since[node]
                if self._directory is not None:
                    self._agents.set_directory(self._directory.write_json())
                self.handle(recovery.NodeBack(node))
            elif waited > self._node_deadline_seconds:
                self.handle(recovery.NodeOverdue(node, self._node_deadline_seconds))
            else:
                self._say_wait(self._agents.missing(), waited=waited)

    def _say_wait(self, missing: dict[str, int], *, waited: float) -> None:
        if missing and self._may_say(waited):
            self._note(f"learner {self.learner.name} waits for an agent on {self._lacks(missing)} ({waited:.0f} s)")

    def _say_held(self, waited: float) -> None:
        if self._may_say(waited):
            names = ", ".join(self._held)
            self._note(f"learner {self.learner.name} waits for a machine for service {names} ({waited:.0f} s)")

    def _may_say(self, waited: float) -> bool:
        """Not at once, and not all the time."""
        now = time.monotonic()
        if waited < SAY_AFTER_SECONDS or now - self._said < SAY_EVERY_SECONDS:
            return False
        self._said = now
        return True

    def _lacks(self, missing: dict[str, int]) -> str:
        """`1 of 2 nodes of group trainer (1 is in the Ray cluster)`."""
        return ", ".join(
            f"{count} of {len(self.learner.group(group))} nodes of group {group} "
            f"({self._agents.present(group)} in the Ray cluster)"
            for group, count in missing.items()
        )


def _ranks(nodes: list[NodePlan]) -> dict[str, dict[int, int]]:
    """Node to its ranks (global to local), in the order of the plan."""

    def numbered() -> Iterator[tuple[str, dict[int, int]]]:
        first = 0
        for node in nodes:
            yield node.name, {first + local: local for local in range(node.ranks)}
            first += node.ranks

    return dict(numbered())
