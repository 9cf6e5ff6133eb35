"""A shell around the syncer's pure machine: effects are carried out without arrays, files or threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from training.sync.events import (
    Answer,
    Committed,
    Contributed,
    Effect,
    Event,
    Finished,
    Heartbeat,
    MergeDone,
    Published,
    Refuse,
    Register,
    SaveLedger,
    Seeded,
    Tick,
    Wait,
)
from training.sync.machine import step
from training.sync.members import Rules, recover
from training.sync.messages import Ledger


class Shell:
    """Carries effects out like the real one: HEAD is a value, the clock stands still between events."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.now, self.head, self.epoch = rules, 0.0, Ledger(run=rules.run, contract=rules.contract), 1
        self.state = recover(rules, self.head, epoch=1, now=0)
        self.effects: list[Effect] = []

    def do(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.state, event)
        if any(isinstance(one, SaveLedger) for one in effects):
            self.head = self.state.durable()
        self.effects.extend(effects)
        return list(effects)

    def restart(self) -> None:
        self.epoch += 1
        self.state = recover(self.rules, self.head, epoch=self.epoch, now=self.now)

    def register(self, learner: str) -> int:
        self.do(Register(now=self.now, learner=learner))
        return self.state.members[learner].generation

    def seed(self) -> None:
        prints = tuple(f"t{one}.0" for one in range(self.rules.fragments))
        self.do(Seeded(now=self.now, seed_sha256="s", theta_sha256=prints, fingerprint="f"))

    def send(self, learner: str, seq: int, *, generation: int = 1, base: int | None = None, **more: Any) -> Effect:
        """One contribution; the answer, or `Wait`."""
        fragment = more.pop("fragment", 0)
        event = Contributed(
            now=self.now,
            learner=learner,
            generation=generation,
            fragment=fragment,
            seq=seq,
            digest=more.pop("digest", f"{learner}/{generation}/{fragment}/{seq}"),
            base_version=self.state.versions[fragment] if base is None else base,
            samples=more.pop("samples", 100),
            cursor=more.pop("cursor", seq * 100),
            norm=more.pop("norm", 1.0),
            **more,
        )
        effects = self.do(event)
        return next((one for one in effects if isinstance(one, (Answer, Refuse, Wait))), Wait())

    def merge(self, fragment: int = 0) -> None:
        """From SEALED to the next OPEN."""
        version = self.state.versions[fragment] + 1
        self.do(MergeDone(now=self.now, fragment=fragment))
        self.do(
            Committed(
                now=self.now, fragment=fragment, theta_sha256=f"t{fragment}.{version}", model_sha256=f"m{version}"
            )
        )
        self.do(Published(now=self.now, fragment=fragment))

    def finish(self) -> None:
        """The end of a run that has drained."""
        self.do(Finished(now=self.now, model_sha256="final"))

    def pass_time(self, seconds: float, *, alive: Sequence[str] = (), step_seconds: float = 0.0) -> None:
        """In small ticks, with heartbeats of those who live."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 1)
            for learner in alive:
                self.beat(learner, step_seconds=step_seconds)
            self.do(Tick(now=self.now))

    def beat(self, learner: str, *, step_seconds: float = 0.0, kept: int | None = None) -> None:
        generation = self.state.members[learner].generation
        event = Heartbeat(
            now=self.now, learner=learner, generation=generation, step_seconds=step_seconds, kept=kept
        )  # fmt: skip
        self.do(event)

    @property
    def stage(self) -> str:
        return self.stage_of(0)

    def stage_of(self, fragment: int) -> str:
        current = self.state.round(fragment)
        return current.stage if current else ""


def kind(effect: Effect) -> str:
    """Of the verdict."""
    assert isinstance(effect, Answer), effect
    return effect.answered.kind


def reason(effect: Effect) -> str:
    """Of the refusal."""
    assert isinstance(effect, Refuse), effect
    return effect.reason
