"""What every component shares: how hard a resource is to lose, and the labels that tell its cost.

One table says what the engine may do to a kind of thing, so that a component only says what kind its resource is.
Aliases: a rename or a new parent lands with `aliases=` in the same change; the golden of names and parents shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pulumi

from spec.stack_values import parse_stack_name

Kind = Literal["key", "data", "bought", "network", "cluster", "pool", "other"]
"""key: encryption keys. data: buckets, file systems. bought: reservations, which cost money until deleted on purpose.
network: networks and subnets. pool: node pools. other: what can be made again at once.
"""


@dataclass(frozen=True)
class Loss:
    """Rules of one kind."""

    protect: Literal["always", "configured", "never"] = "never"
    retain: Literal["always", "configured", "never"] = "never"
    """Stays in the cloud when it goes from the stack."""
    delete_first: bool = False
    """A replacement is made only after the old one is gone: there cannot be two of what has a fixed name or holds a
    reservation's machines.
    """
    timeout: str = ""
    """Of create, update and delete; empty: the provider's own."""


LOSSES: Mapping[Kind, Loss] = {
    "key": Loss(protect="always", retain="always"),
    "data": Loss(protect="configured", retain="configured", delete_first=True),
    "bought": Loss(protect="always", delete_first=True),
    "network": Loss(protect="configured", delete_first=True),
    "cluster": Loss(protect="configured", delete_first=True, timeout="90m"),
    # Half an hour was too short for a pool of GPU machines (reference note on A3 machines, section 12, item 8).
    "pool": Loss(protect="configured", delete_first=True, timeout="2h"),
    "other": Loss(),
}


def options(
    parent: pulumi.Resource,
    *,
    kind: Kind = "other",
    protect: bool = False,
    ignore_changes: Sequence[str] = (),
    depends_on: Sequence[pulumi.Resource] = (),
    secret_outputs: Sequence[str] = (),
    aliases: Sequence[pulumi.Alias] = (),
) -> pulumi.ResourceOptions:
    """Options of a child. `protect` is what the stack's configuration says."""
    loss = LOSSES[kind]
    timeouts = pulumi.CustomTimeouts(create=loss.timeout, update=loss.timeout, delete=loss.timeout)
    return pulumi.ResourceOptions(
        parent=parent,
        protect=_holds(loss.protect, configured=protect),
        retain_on_delete=_holds(loss.retain, configured=protect),
        delete_before_replace=loss.delete_first or None,
        custom_timeouts=timeouts if loss.timeout else None,
        ignore_changes=list(ignore_changes) or None,
        depends_on=list(depends_on) or None,
        additional_secret_outputs=list(secret_outputs) or None,
        aliases=list(aliases) or None,
    )


def stack_labels(stack: str, *, configured: Mapping[str, str]) -> dict[str, str]:
    """Labels of every resource that takes some, in Google Cloud's narrow set of characters."""
    name = parse_stack_name(stack)
    return {"managed-by": "gkr", "gkr-stack": str(name).replace(".", "-"), **configured}


def _holds(rule: Literal["always", "configured", "never"], *, configured: bool) -> bool:
    return rule == "always" or (rule == "configured" and configured)
