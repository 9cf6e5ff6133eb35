"""What the syncer says when it is asked: which round of each fragment, who is waited for, why, and until when.

The answer of its status call, read leniently; `training.sync.messages` writes it. Asking is here as well, because two
sides of the code do it: `gkr` on the machine of a run, and a process in the syncer's pod for `gkr` elsewhere.
"""

from __future__ import annotations

import http.client

from spec.base import Record
from spec.errors import UnreachableError
from spec.sync_keys import SyncKeys, open_connection


class MemberStatus(Record):
    """One learner as the syncer sees it."""

    learner: str
    generation: int = 0
    state: str = ""
    lease_age_seconds: float | None = None
    """Since its last sign of life."""
    step: int = 0
    step_seconds: float = 0.0
    pending_samples: int = 0
    merged_samples: int = 0
    """The lowest over fragments."""
    discarded_samples: int = 0
    """The highest over fragments."""
    in_flight_steps: int = 0
    """Steps that it made since its oldest unanswered contribution."""
    base_versions: list[int] = []
    """Of each fragment: what its last contribution was based on; -1 if none came."""
    staleness: list[int] = []
    """Of each fragment: versions since that base."""
    blocked_seconds: dict[str, float] = {}
    """How long its training has stood still, by cause."""
    bytes_in: int = 0
    """Received from it."""
    bytes_out: int = 0
    """Weights sent to it."""
    transfer_rate: float = 0.0
    """Bytes per second at which its last merged contribution came."""
    measures: dict[str, float] = {}
    """What else it measures, by name."""


class FragmentStatus(Record):
    """One fragment: its open round, and its last merge."""

    fragment: int
    version: int
    round: int
    """Version that the open round makes."""
    stage: str = ""
    """OPEN, SEALED, MERGED, DURABLE, or empty when no round is open."""
    arrived: list[str] = []
    waiting_for: list[str] = []
    why: str = ""
    """What the round waits for."""
    until: float | None = None
    """Seconds since 1970 at which it may close without them."""
    staleness: dict[str, int] = {}
    """Of the contributions that have arrived."""
    bytes_in: int = 0
    """Of the last merge, as are all that follow."""
    outer_gradient_norm: float = 0.0
    cosine: float | None = None
    """Lowest between two displacements."""
    merge_seconds: float = 0.0
    durable_seconds: float = 0.0
    accumulated: float = 0.0
    """Rounds that are merged since the momentum moved last."""


class SyncStatus(Record):
    """The whole answer."""

    run: str
    mode: str = "barrier"
    state: str
    """SEEDING, SERVING, DRAINING or FINAL; ENDED, as `gkr` tells it, of a run that is over without a final merge."""
    epoch: int = 0
    version: int
    """Merges so far, over all fragments; -1 before the weights were seeded."""
    samples_total: int = 0
    """Merged, in the fragment that has the fewest."""
    target_samples: int = 0
    theta_sha256: str = ""
    model_sha256: str = ""
    final: bool = False
    seed_from: str = ""
    """The learner that has to send the initial weights, while they are missing."""
    alarm: str = ""
    """Why the syncer cannot go on by itself."""
    members: list[MemberStatus] = []
    fragments: list[FragmentStatus] = []
    refusals: dict[str, int] = {}
    """What was refused, and verdicts other than merged, by reason."""


def ask_syncer(address: str, *, run: str, path: str, keys: SyncKeys | None, timeout_seconds: float) -> bytes:
    """The body of one GET of the control port; UnreachableError if there is none."""
    host, _, port = address.rpartition(":")
    try:
        connection = open_connection(host, int(port), timeout_seconds=timeout_seconds, keys=keys)
        try:
            connection.request("GET", f"/v1/{run}/{path}", headers=keys.headers if keys else {})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnreachableError(f"the syncer at {address} does not answer: {error}") from error
    if response.status != http.client.OK:
        raise UnreachableError(f"the syncer at {address} refuses: {body[:500].decode(errors='replace')}")
    return body
