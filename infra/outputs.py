"""What stacks say to the stacks above them: names of outputs, and what a global stack exports.

A region's part is `infra.facts.RegionFacts`. Each kind says everything as one value under one name, read leniently: a
newer writer does not break an older reader, and what is missing fails in the reader with the name of the stack that
should have said it and the command that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.facts import KUBECONFIG_OUTPUT, PLATFORM_OUTPUT, REGION_OUTPUT, read_output
from spec.base import Record

__all__ = ["GLOBAL_OUTPUT", "KUBECONFIG_OUTPUT", "PLATFORM_OUTPUT", "REGION_OUTPUT", "GlobalFacts", "read_global"]

GLOBAL_OUTPUT = "environment"
"""Output of a global stack: `GlobalFacts` as plain data."""


class GlobalFacts(Record):
    """What regions build on."""

    project_number: str
    """By which workload identity names the project."""
    network: str
    """Id of the primary network."""
    network_name: str
    pods: str
    """Range in which the pods of all regions are."""
    node_account: str
    """Mail address of the nodes' service account."""
    researchers: list[str] = []
    """Members who may launch, and write to the regions' buckets."""
    shared_buckets: list[str] = []
    """Names of buckets that pods of all regions read."""
    alert_channels: list[str] = []
    """Ids of who is told."""
    secrets_key: str = ""
    """Id of the key with which stacks may encrypt what is secret in them; empty: none."""


def read_global(value: Mapping[str, Any] | None, *, stack: str) -> GlobalFacts:
    """What a global stack exported; ConfigError names the stack and the command."""
    return read_output(GlobalFacts, value, stack=stack, output=GLOBAL_OUTPUT)
