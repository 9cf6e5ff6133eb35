"""What a run's folder says, read leniently.

Every piece may be missing, torn or damaged: each loss becomes one line in `problems`, never an exception. Only a folder
that does not exist is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from spec.base import Record, first_fault
from spec.errors import NotFoundError
from spec.events import AttemptStarted, Event, RunStatus, read_event
from spec.fold import fold
from spec.plan import Plan
from spec.summary import Summary

AnyRecord = TypeVar("AnyRecord", bound=Record)
AnyEvent = TypeVar("AnyEvent", bound=Record)
AnyResult = TypeVar("AnyResult")


@dataclass(frozen=True)
class RunRecord:
    """All that is known about one run."""

    folder: Path
    plan: Plan | None = None
    events: tuple[Event, ...] = ()
    summary: Summary | None = None
    problems: list[str] = field(default_factory=list[str])
    """Pieces that could not be read; sections add theirs while they are drawn."""

    def of(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        """The events of one kind, in order."""
        return [one for one in self.events if isinstance(one, kind)]

    @cached_property
    def learners(self) -> list[str]:
        """Names in the plan's order, then any other that events mention.

        The order of colours everywhere in the report.
        """
        names = [one.name for one in self.plan.learners] if self.plan else []
        names += [one.name for one in self.summary.learners] if self.summary else []
        names += [one.learner for one in self.of(AttemptStarted)]
        return list(dict.fromkeys(names))

    @cached_property
    def decoupled(self) -> bool:
        """Whether learners go on training while they synchronise."""
        return bool(self.plan and self.plan.syncer and self.plan.syncer.config.mode == "decoupled")

    @cached_property
    def start(self) -> float:
        """Seconds since 1970 of the earliest event."""
        return min((one.time for one in self.events), default=0.0)

    @cached_property
    def end(self) -> float:
        """Of the latest event."""
        return max((one.time for one in self.events), default=0.0)

    @property
    def wall_seconds(self) -> float:
        """By the summary, else by the events."""
        return self.summary.wall_seconds if self.summary and self.summary.wall_seconds else self.end - self.start

    @property
    def status(self) -> str:
        """The run's fate: by its last status event, which is younger than any summary, else by the summary."""
        said = self.of(RunStatus)
        return said[-1].status if said else self.summary.status if self.summary else "unknown"

    @property
    def reason(self) -> str:
        said = self.of(RunStatus)
        return said[-1].reason if said else self.summary.reason if self.summary else ""

    @property
    def title(self) -> str:
        """The experiment's name, else the folder's parent."""
        return (
            self.plan.experiment if self.plan else self.summary.experiment if self.summary else self.folder.parent.name
        )

    @property
    def run(self) -> str:
        return self.plan.run if self.plan else self.summary.run if self.summary else self.folder.name


def read_record(folder: Path) -> RunRecord:
    """Read a run's folder."""
    if not folder.is_dir():
        raise NotFoundError(f"no run folder {folder}", hint="`gkr ps` lists the runs")
    problems: list[str] = []
    plan = _document(folder / "plan.json", model=Plan, problems=problems)
    events = tuple(sorted(_events(folder / "events.jsonl", problems=problems), key=lambda one: one.time))
    summary = _document(folder / "summary.json", model=Summary, problems=problems)
    if summary is None and plan is not None:
        summary = guarded(
            lambda: fold(events, plan), what="summary could not be folded from the events", problems=problems
        )
        problems.append("summary.json is missing; the numbers were folded from the events")
    return RunRecord(folder=folder, plan=plan, events=events, summary=summary, problems=problems)


def _document(path: Path, *, model: type[AnyRecord], problems: list[str]) -> AnyRecord | None:
    try:
        return model.read_json(path.read_bytes())
    except FileNotFoundError:
        if path.name != "summary.json":
            problems.append(f"{path.name} is missing")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    except ValidationError as error:
        problems.append(f"{path.name} is not readable: {first_fault(error)}")
    return None


def _events(path: Path, *, problems: list[str]) -> Iterator[Event]:
    skipped = 0
    try:
        with path.open("rb") as lines:
            for line in lines:
                event = read_event(line) if line.strip() else None
                if event is not None:
                    yield event
                elif line.strip():
                    skipped += 1
    except FileNotFoundError:
        problems.append("events.jsonl is missing")
    except OSError as error:
        problems.append(f"events.jsonl cannot be read: {error.strerror}")
    if skipped:
        problems.append(
            f"{skipped} line{'s' if skipped > 1 else ''} of events.jsonl could not be read and were left out"
        )


def guarded(work: Callable[[], AnyResult], *, what: str, problems: list[str]) -> AnyResult | None:
    """The result, or none and a line in `problems`.

    A boundary: the report must come out even where the events contradict each other in a way that nobody foresaw.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        problems.append(f"{what}: {type(error).__name__}: {error}")
        return None
