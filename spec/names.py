"""Every name we make or accept, within the length budgets of what will carry it.

Names are DNS-1035 labels: lower-case letters, digits and dashes, starting with a letter. A name is never shortened
silently, because a look-up by the long name would then miss; too long is refused, with the excess and a shorter
proposal.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from spec.problems import RemedyError

LONGEST_RAYCLUSTER = 53
"""KubeRay appends head and worker suffixes to it and refuses more."""
LONGEST_RAYJOB = 47
"""KubeRay derives the RayCluster's name from it."""
LONGEST_POD_PREFIX = 50
"""KubeRay cuts `cluster-group` here; we refuse instead."""
SUFFIX = 6
"""Hexadecimal digits of a run that its cluster objects carry."""
LONGEST_NAME = LONGEST_RAYJOB - SUFFIX - 1
"""Of an experiment of one learner."""
RESERVED_GROUPS = frozenset({"head"})
SERVICE_GROUP = "svc-"
"""Start of the worker group of a service's replicas."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RUN = re.compile(r"\d{8}-\d{6}-(?P<suffix>[0-9a-f]{6})")


def check_label(name: str, *, longest: int = LONGEST_NAME) -> str:
    """The name if it is a DNS-1035 label within the budget, else an error with a proposal."""
    if _LABEL.fullmatch(name) is None:
        proposal = propose(name, longest=longest)
        hint = f'"{proposal}" would do' if proposal else "for example portrait-2b"
        raise RemedyError(
            f'"{name}" is not a name: lower-case letters, digits and dashes, starting with a letter', hint=hint
        )
    if len(name) > longest:
        proposal = propose(name, longest=longest)
        raise RemedyError(
            f'"{name}" has {len(name)} characters, {len(name) - longest} too many (at most {longest})',
            hint=f'"{proposal}" would do',
        )
    return name


def propose(name: str, *, longest: int) -> str:
    """The nearest name that would be accepted; empty if nothing of it can be kept."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")
    return cleaned[:longest].strip("-")


def run_id(started: datetime, *, random_hex: str) -> str:
    """`20261130-143755-3fa9c1`: sorts by time, unique by its six random digits. Pure: both come from the caller."""
    if re.fullmatch(r"[0-9a-f]{6,}", random_hex) is None:
        raise ValueError(f"random_hex {random_hex!r}: need at least {SUFFIX} hexadecimal digits")
    return f"{started.astimezone(UTC):%Y%m%d-%H%M%S}-{random_hex[:SUFFIX]}"


def run_suffix(run: str) -> str:
    """The part of a run id that cluster objects carry."""
    match = _RUN.fullmatch(run)
    return match["suffix"] if match else re.sub(r"[^a-z0-9]", "", run.lower())[-SUFFIX:]


def rayjob_name(experiment: str, *, learner: str, run: str) -> str:
    """Name of a learner's RayJob. A learner called like its experiment (the short form) is not named twice."""
    parts = [experiment] if learner == experiment else [experiment, learner]
    return "-".join([*parts, run_suffix(run)])


def rayjob_excess(experiment: str, *, learner: str, longest_group: str) -> int:
    """Characters above the tightest budget of a learner's objects; zero or less is fine."""
    job = len(rayjob_name(experiment, learner=learner, run="0" * SUFFIX))
    cluster = job + SUFFIX  # KubeRay appends a dash and five random characters
    return max(
        job - LONGEST_RAYJOB, cluster - LONGEST_RAYCLUSTER, cluster + 1 + len(longest_group) - LONGEST_POD_PREFIX
    )


def syncer_name(experiment: str, *, run: str) -> str:
    """Name of the experiment's syncer objects."""
    return f"{experiment}-{run_suffix(run)}-syncer"


def node_name(group: str, *, index: int) -> str:
    """Name of one node of a group."""
    return f"{group}-{index}"


def group_resource(group: str) -> str:
    """Ray resource of which each node of a group offers one: one agent takes it."""
    return f"gkr_group_{group}"


def service_resource(service: str) -> str:
    """Ray resource of which each replica of a service takes one; on a cluster a pod offers one."""
    return f"gkr_service_{service}"


Name = Annotated[
    str,
    AfterValidator(check_label),
    WithJsonSchema({"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": LONGEST_NAME}),
]
"""A DNS-1035 label of at most 40 characters."""
