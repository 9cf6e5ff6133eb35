"""`gkr queues`: quota, who uses it and who waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gkr.options import clusters_option, output_option

if TYPE_CHECKING:
    from gkr.cluster.connection import Connection
    from gkr.cluster.queues import Claim, Queue


@click.command(name="queues")
@clusters_option
@output_option()
def command(*, clusters: tuple[str, ...], output: str) -> int:
    """Show the queues of every cluster: quota and use by machine, who holds it, and who waits in which place."""
    from gkr.cluster.asking import ask, chosen_clusters
    from gkr.cluster.asking_output import report_failures
    from gkr.output import result, result_json

    answers = ask(chosen_clusters(clusters), _read)
    if output == "json":
        result_json({name: [_fields(queue) for queue in queues] for name, queues in answers.found.items()})
        return report_failures(answers)
    now = time.time()
    blocks = ["\n".join(_lines(name, queue, now=now)) for name, queues in answers.found.items() for queue in queues]
    if blocks:
        result("\n\n".join(blocks))
    return report_failures(answers)


def _read(connection: Connection) -> list[Queue]:
    from gkr.cluster.explain_reading import read_cluster_queues
    from gkr.cluster.registry import cached_facts, read_registry
    from spec.errors import GkrError

    try:
        namespaces = cached_facts(read_registry().get(connection.name)).namespaces
    except GkrError:
        namespaces = [connection.namespace]
    return read_cluster_queues(connection, namespaces=namespaces)


def _lines(cluster: str, queue: Queue, *, now: float) -> list[str]:
    from gkr.output import table

    state = "" if queue.active else f"  NOT ACTIVE: {queue.message}"
    names = ", ".join(one + (f" ({message})" if message else "") for one, message in sorted(queue.local.items()))
    head = [f"{cluster}: queue {queue.name}{state}", f"  open to {names or 'no namespace'}"]
    quotas = [
        [one.flavor, one.resource, _amount(one.resource, one.nominal), _amount(one.resource, one.used),
         _amount(one.resource, one.free)]
        for one in queue.quotas
        if one.nominal or one.used
    ]  # fmt: skip
    parts = [table(quotas, header=["MACHINE", "RESOURCE", "QUOTA", "USED", "FREE"])] if quotas else []
    claims = [_row(one, now=now) for one in (*queue.holding, *queue.waiting)]
    if claims:
        parts.append(table(claims, header=["PLACE", "WHO", "NAMESPACE", "GPUS", "PRIORITY", "FOR", "REASON"]))
    return [*head, *("  " + line for part in parts for line in part.splitlines())]


def _row(one: Claim, *, now: float) -> list[str]:
    from gkr.watch.text import short_duration

    holds = one.admitted is not None
    place = "holds" if holds else f"waits {one.position}" if one.position else "waits"
    since = short_duration(now - (one.admitted if one.admitted is not None else one.created))
    priority = one.priority_class or str(one.priority)
    return [place, one.who, one.namespace, f"{one.gpus:g}", priority, since, one.reason[:80]]


def _amount(resource: str, value: float) -> str:
    return f"{value / 2**30:,.0f}Gi" if resource in {"memory", "ephemeral-storage"} else f"{value:g}"


def _fields(queue: Queue) -> dict[str, object]:
    from dataclasses import asdict

    def claim(one: Claim) -> dict[str, object]:
        own = {key: value for key, value in asdict(one).items() if key != "by_flavor"}
        held = [{"flavor": at[0], "resource": at[1], "amount": amount} for at, amount in one.by_flavor.items()]
        return {**own, "holds": held}

    return {
        "name": queue.name,
        "active": queue.active,
        "message": queue.message,
        "local": dict(queue.local),
        "quotas": [asdict(one) for one in queue.quotas],
        "holding": [claim(one) for one in queue.holding],
        "waiting": [claim(one) for one in queue.waiting],
    }
