"""What a learner does with a verdict, and where it takes up its work after a restart (cross-region.md 8.6, design
section 5). Pure.

Every rank keeps the same `LearnerSyncState`, one `FragmentState` per fragment, and its own ranges of the anchor; the
decisions depend on the state only, so all ranks decide alike. Weights never come from a checkpoint when the syncer has
merged something that the checkpoint does not know: it would count twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np

from spec.errors import GkrError, RefusedError
from training.sync.layout import Floats
from training.sync.members import MISTAKES
from training.sync.messages import FragmentPlace, Registration, Verdict

Action = Literal["assign", "rebase", "carry"]
Adopt = Literal["rebase", "overwrite"]
Mode = Literal["exact", "shared", "fresh", "wait"]


class QuarantinedError(GkrError):
    """The learner's contributions are invalid again and again."""


@dataclass(frozen=True, kw_only=True)
class FragmentState:
    """What a learner's checkpoint holds of one fragment besides weights, anchor and optimizer."""

    seq: int = 0
    """Last sequence number used."""
    merged_seq: int = 0
    """Sequence of the last merged contribution."""
    base_version: int = -1
    """Version of the fragment that the anchor is."""
    pending_steps: int = 0
    pending_samples: int = 0
    """Since the anchor, in no merge yet."""
    in_flight: bool = False
    """Contribution `seq` has no answer yet."""
    since_steps: int = 0
    since_samples: int = 0
    """Those of the pending that are not in the contribution in flight."""
    steps_to_due: int = 0
    """Inner steps until the next contribution; zero or less: it is due."""
    discarded_samples: int = 0
    """Given up, over the whole run."""
    cursor: int = 0
    """Samples of the learner's order that count as consumed."""
    invalid_in_row: int = 0

    def ran(self, samples: int) -> FragmentState:
        """After one committed inner step."""
        since = int(self.in_flight)
        return replace(
            self,
            pending_steps=self.pending_steps + 1,
            pending_samples=self.pending_samples + samples,
            since_steps=self.since_steps + since,
            since_samples=self.since_samples + since * samples,
            steps_to_due=self.steps_to_due - 1,
            cursor=self.cursor + samples,
        )

    def snapshot(self, *, inner_steps: int = 0) -> FragmentState:
        """At the boundary where a contribution is made: its number is `seq`, what it holds is what is pending."""
        return replace(self, seq=self.seq + 1, in_flight=True, since_steps=0, since_samples=0, steps_to_due=inner_steps)


@dataclass(frozen=True, kw_only=True)
class LearnerSyncState:
    """All fragments of a learner. They run the same steps, so their cursors are one."""

    fragments: tuple[FragmentState, ...]

    @property
    def cursor(self) -> int:
        """Samples of the learner's order that count as consumed."""
        return self.fragments[0].cursor

    @property
    def kept(self) -> int:
        """Samples that are merged or will be, in the fragment that has the fewest."""
        return min(one.cursor - one.discarded_samples for one in self.fragments)

    @property
    def in_flight(self) -> list[int]:
        """Fragments whose contribution has no answer yet."""
        return [index for index, one in enumerate(self.fragments) if one.in_flight]

    def ran(self, samples: int) -> LearnerSyncState:
        """After one committed inner step."""
        return LearnerSyncState(fragments=tuple(one.ran(samples) for one in self.fragments))

    def due(self) -> int | None:
        """The fragment whose contribution is to be made now. Never a second one of a fragment that is in flight."""
        due = [(one.steps_to_due, index) for index, one in enumerate(self.fragments) if not one.in_flight]
        steps, index = min(due, default=(1, 0))
        return index if steps <= 0 else None

    def change(self, fragment: int, state: FragmentState) -> LearnerSyncState:
        """With one fragment's new state."""
        return LearnerSyncState(fragments=(*self.fragments[:fragment], state, *self.fragments[fragment + 1 :]))

    def spread(self, *, inner_steps: int) -> LearnerSyncState:
        """With contributions that come in turn: one every `inner_steps` / fragments steps, the oldest version first.

        So all learners of a barrier have the same fragment next, whenever they came back.
        """
        count = len(self.fragments)
        return self._give_due([(place + 1) * inner_steps // count for place in range(count)])

    def in_order(self) -> LearnerSyncState:
        """The same moments, taken by the fragments in the order of their versions."""
        return self._give_due(sorted(one.steps_to_due for one in self.fragments))

    def hurry(self) -> LearnerSyncState:
        """What comes next is due now. A slow learner that was late has progress to give, and would be late again after
        another round of steps: so it is in step with the others once more.
        """
        least = min(one.steps_to_due for one in self.fragments)
        return LearnerSyncState(
            fragments=tuple(replace(one, steps_to_due=one.steps_to_due - least) for one in self.fragments)
        )

    def _give_due(self, moments: list[int]) -> LearnerSyncState:
        order = sorted(range(len(self.fragments)), key=lambda index: (self.fragments[index].base_version, index))
        given = dict(zip(order, moments, strict=True))
        changed = (replace(one, steps_to_due=given[index]) for index, one in enumerate(self.fragments))
        return LearnerSyncState(fragments=tuple(changed))

    def to_dict(self) -> dict[str, Any]:
        """For the checkpoint's JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LearnerSyncState:
        """From the checkpoint's JSON; fields of newer versions are ignored."""
        return msgspec.convert(values, cls)


def choose(state: FragmentState, *, verdict: Verdict, pending_limit: int, mode: Adopt = "rebase") -> Action:
    """What becomes of the weights of a fragment whose contribution is answered.

    `pending_limit`: samples above which a late learner gives its progress up, twice a normal round.
    """
    if verdict.kind == "fenced":
        raise RefusedError(
            f"this process may not go on: {verdict.reason}",
            hint="a newer process of this learner has taken over, or will",
        )
    if verdict.kind == "merged":
        return "rebase" if state.since_steps and mode == "rebase" else "assign"
    if verdict.kind == "late":
        return "assign" if verdict.final or state.pending_samples > pending_limit else "carry"
    # A process that was taken again after a quarantine has less patience left than it knows of.
    if verdict.quarantined or state.invalid_in_row + 1 >= MISTAKES:
        raise QuarantinedError(
            f"too many contributions in a row were invalid, the last because {verdict.reason}",
            hint="look for diverging loss or failing hardware in this learner before it joins again",
        )
    return "assign"


def settle(state: FragmentState, *, verdict: Verdict, action: Action) -> FragmentState:
    """The fragment's state once the action was applied; steps may have run since it was chosen."""
    answered = replace(state, in_flight=False, since_steps=0, since_samples=0, base_version=verdict.version)
    mistakes = 0
    if verdict.kind == "merged":
        pending = {"pending_steps": state.since_steps, "pending_samples": state.since_samples}
        answered, keeps = replace(answered, merged_seq=state.seq, **pending), action == "rebase"
    elif verdict.kind == "late":
        keeps, mistakes = action == "carry" or verdict.final, state.invalid_in_row
    else:
        keeps, mistakes = False, state.invalid_in_row + 1
    if not keeps:  # the next contribution is a whole round away again
        answered = replace(_discard(answered), steps_to_due=state.steps_to_due + state.since_steps)
    return replace(answered, invalid_in_row=mistakes)


def decide(
    state: FragmentState, *, verdict: Verdict, pending_limit: int, mode: Adopt = "rebase"
) -> tuple[FragmentState, Action]:
    """Choose and settle at once: for who applies the answer where it finds it."""
    action = choose(state, verdict=verdict, pending_limit=pending_limit, mode=mode)
    return settle(state, verdict=verdict, action=action), action


def catch_up(
    state: FragmentState, *, version: int, pending_limit: int, final: bool = False
) -> tuple[FragmentState, Action]:
    """Take up a newer version without having contributed to it: keep the progress, unless it has grown too old.

    Of a final version nothing can be contributed any more: hold exactly its weights, and say truthfully what stayed
    pending.
    """
    newer = replace(state, base_version=version)
    if final:
        return newer, "assign"
    if state.pending_samples > pending_limit:
        return _discard(newer), "assign"
    return newer, "carry"


def apply_action(
    theta: Floats, *, action: Action, anchor: Floats, shared: Floats, snapshot: Floats | None = None
) -> tuple[Floats, Floats]:
    """The new (weights, anchor) of these ranges. Assigning instead of adding keeps all learners bit-equal."""
    base = moves_from(action, anchor=anchor, snapshot=snapshot)
    return (shared.copy() if base is None else rebase(theta, onto=shared, base=base)), shared


def moves_from(action: Action, *, anchor: Floats, snapshot: Floats | None) -> Floats | None:
    """What the progress that is kept counts from; none: nothing is kept, the shared weights replace all."""
    if action == "assign":
        return None
    base = anchor if action == "carry" else snapshot
    assert base is not None, "a contribution that was merged had a snapshot"
    return base


def rebase(theta: Floats, *, onto: Floats, base: Floats) -> Floats:
    """Progress since `base`, moved onto other weights; a no-op where both are equal."""
    return np.add(theta, onto - base, dtype=np.float32)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """How a learner takes up its work."""

    mode: Mode
    """`exact`: everything from the checkpoint. `shared`: weights from the syncer, optimizer from the checkpoint,
    samples from `state.cursor`. `fresh`: weights from the syncer (or the seed), nothing else. `wait`: until the version
    advances, then register again."""
    state: LearnerSyncState
    catch_up: tuple[int, ...] = ()
    """Exact, but the syncer has gone on with these fragments: fetch and apply `catch_up` before the first step."""


def places(registration: Registration) -> list[FragmentPlace]:
    """The learner's place in every fragment."""
    if registration.fragments:
        return registration.fragments
    fields = {name: getattr(registration, name) for name in FragmentPlace.__struct_fields__}
    return [FragmentPlace(**fields)]


def restart(state: LearnerSyncState | None, *, registration: Registration, inner_steps: int = 0) -> Restart:
    """Where to go on; `state` is that of the newest checkpoint that verified, if there is one.

    A contribution that was in flight when the checkpoint was made counts by its sequence number: if the syncer has
    merged it, the checkpoint's weights hold its samples a second time and are not used; if not, its samples are still
    pending on the checkpoint's anchor, and the process that could have sent it is fenced.
    """
    found = places(registration)
    saved = state.fragments if state else (FragmentState(),) * len(found)
    cursor = min(place.cursor for place in found)
    shared = LearnerSyncState(
        fragments=tuple(
            FragmentState(
                seq=max(place.last_seq, one.seq),
                merged_seq=place.last_seq,
                base_version=place.version,
                discarded_samples=place.discarded_samples,
                cursor=cursor,
            )
            for one, place in zip(saved, found, strict=True)
        )
    ).spread(inner_steps=inner_steps)
    if any(place.contribution_pending for place in found):
        return Restart(mode="wait", state=shared)
    if state is None:
        return Restart(mode="shared" if any(place.last_seq for place in found) else "fresh", state=shared)
    pairs = list(zip(saved, found, strict=True))
    for one, place in pairs:
        if one.base_version > place.version or one.merged_seq > place.last_seq:
            raise RefusedError(
                f"the checkpoint is based on version {one.base_version} and contribution {one.merged_seq}, "
                f"the syncer only has version {place.version} and contribution {place.last_seq}",
                hint="the syncer's store was lost or belongs to another run; restore it, or start a new run",
            )
    if any(one.merged_seq < place.last_seq for one, place in pairs):
        return Restart(mode="shared", state=shared)
    if any(one.base_version < 0 for one in saved):
        return Restart(mode="fresh", state=shared)
    exact = LearnerSyncState(fragments=tuple(_resume(one, place) for one, place in pairs))
    behind = tuple(index for index, (one, place) in enumerate(pairs) if one.base_version < place.version)
    return Restart(mode="exact", state=exact, catch_up=behind)


def _resume(state: FragmentState, place: FragmentPlace) -> FragmentState:
    discarded = max(state.discarded_samples, place.discarded_samples)
    return replace(state, in_flight=False, since_steps=0, since_samples=0, discarded_samples=discarded)


def _discard(state: FragmentState) -> FragmentState:
    return replace(
        state,
        discarded_samples=state.discarded_samples + state.pending_samples,
        pending_steps=0,
        pending_samples=0,
    )
