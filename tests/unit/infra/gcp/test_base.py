"""The table of what is hard to lose, and labels."""

from __future__ import annotations

import pytest

from infra.components.base import LOSSES, Kind, stack_labels
from infra.components.gcp.identity import LONGEST_ACCOUNT, node_account_id


@pytest.mark.parametrize(
    ("kind", "protect", "retain", "delete_first"),
    [
        ("key", "always", "always", False), ("data", "configured", "configured", True),
        ("bought", "always", "never", True), ("network", "configured", "never", True),
        ("cluster", "configured", "never", True), ("pool", "configured", "never", True),
        ("other", "never", "never", False),
    ],
)  # fmt: skip
def test_the_table(kind: Kind, protect: str, retain: str, *, delete_first: bool) -> None:
    loss = LOSSES[kind]
    assert (loss.protect, loss.retain, loss.delete_first) == (protect, retain, delete_first)


def test_labels_name_the_stack_and_a_person_has_the_last_word() -> None:
    assert stack_labels("prod.us-east5.platform", configured={"owner": "x", "managed-by": "us"}) == {
        "managed-by": "us", "gkr-stack": "prod-us-east5-platform", "owner": "x",
    }  # fmt: skip


def test_an_accounts_id_fits() -> None:
    assert node_account_id("prod") == "gkr-prod-nodes"
    assert len(node_account_id("a" * 40)) == LONGEST_ACCOUNT
