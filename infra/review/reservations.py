"""Reservations as the cloud shows them, against the pools that a preview binds to them.

A pool that differs from its reservation in one property gets no machines, and says so an hour later with a message
about something else. The look-up is optional: a reservation that cannot be read is said and blocks nothing, so that a
preview never hangs on somebody else's project.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from infra.policy.gpus import NODE_POOL
from infra.policy.resource import Finding, items, look
from infra.review.capacity import nodes
from infra.review.preview import Preview, State
from spec.stack_values import ReservationPath, parse_reservation

RULE = "reservation"
SECONDS = 60.0
"""Of one look-up."""

Described = Mapping[str, Any]
Describe = Callable[[ReservationPath, str], Described | str]
"""A reservation in a zone, as the cloud's API gives it; a text says why it could not be read."""


@dataclass(frozen=True)
class _Bound:
    """A pool that takes its machines from a reservation."""

    name: str
    state: State
    part: ReservationPath
    zone: str


def check_reservations(preview: Preview, *, describe: Describe) -> list[Finding]:
    """What would keep pools from their machines. Each reservation is asked for once."""
    pools = list(_bound(preview))
    found: list[Finding] = []
    for key in dict.fromkeys((one.part.reservation, one.zone) for one in pools):
        mine = [one for one in pools if (one.part.reservation, one.zone) == key]
        described = describe(mine[0].part, mine[0].zone)
        if isinstance(described, str):
            remedy = "look at it by hand, or let the account read it: roles/compute.viewer on its project"
            found.append(_finding(mine[0], f"{key[0]} could not be read: {described}", remedy, severity="warn"))
            continue
        for one in mine:
            found += [_finding(one, *fault) for fault in _faults(one, described)]
        wanted = sum(nodes(one.state) for one in mine)
        count = int(look(described, "specificReservation.count") or 0)
        if wanted > count:
            message = f"{key[0]} holds {count} machines and its pools want {wanted}; the rest never comes"
            found.append(_finding(mine[-1], message, "lower nodes, or write the count that was bought"))
    return found


def by_gcloud(part: ReservationPath, zone: str) -> Described | str:
    """What `gcloud` is told of it, as whoever is logged in."""
    command = ["gcloud", "compute", "reservations", "describe", part.name, f"--project={part.project}",
               f"--zone={zone}", "--format=json", "--quiet"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
        return cast("Described", json.loads(done.stdout)) if done.returncode == 0 else done.stderr.strip()[-300:]
    except FileNotFoundError:
        return "gcloud is not installed"
    except subprocess.TimeoutExpired:
        return f"gcloud did not answer within {SECONDS:.0f} s"
    except ValueError as error:
        return f"gcloud answered with something else than JSON: {error}"


def _bound(preview: Preview) -> Iterator[_Bound]:
    for step in preview.steps:
        if step.type != NODE_POOL or step.new is None or step.kind == "delete":
            continue
        path = look(step.new.inputs, "nodeConfig.reservationAffinity.values[0]")
        zone = look(step.new.inputs, "nodeLocations[0]")
        if isinstance(path, str) and isinstance(zone, str):
            yield _Bound(step.name, step.new, parse_reservation(path), zone)


def _faults(pool: _Bound, described: Described) -> Iterator[tuple[str, str]]:
    """Message and remedy of each difference."""
    inputs, name = pool.state.inputs, pool.part.reservation
    if described.get("specificReservationRequired") is not True:
        yield (
            f"{name} is not specific: machines that name it are refused, and others may take its own",
            "ask its owner for a reservation with specificReservationRequired",
        )
    if described.get("status") != "READY" and nodes(pool.state):
        yield (
            f"{name} is {described.get('status')}; a pool that asks it for machines fails",
            "write delivered: false until it is READY",
        )
    pairs = (
        ("machine type", "nodeConfig.machineType", "machineType", "machine"),
        ("maintenance interval", "nodeConfig.hostMaintenancePolicy.maintenanceInterval", "maintenanceInterval",
         "maintenance_interval"),
    )  # fmt: skip
    for word, ours, theirs, field in pairs:
        mine, its = look(inputs, ours), look(described, f"specificReservation.instanceProperties.{theirs}")
        if its is not None and mine != its:
            yield (
                f"{word} is {mine or 'not set'} and that of {name} is {its}; the pool would get no machines",
                f"write {field}: as the reservation shows it",
            )
    ssds = items(look(described, "specificReservation.instanceProperties.localSsds"))
    mine = int(look(inputs, "nodeConfig.ephemeralStorageLocalSsdConfig.localSsdCount") or 0)
    if ssds and len(ssds) != mine:
        yield (
            f"{name} has {len(ssds)} local SSDs for each machine and the pool {mine}; it would get no machines",
            "the machine's row says how many it has; ask the owner for a reservation like it",
        )


def _finding(pool: _Bound, message: str, remedy: str, *, severity: str = "refuse") -> Finding:
    level = "warn" if severity == "warn" else "refuse"
    return Finding(RULE, level, NODE_POOL, pool.name, message, remedy)
