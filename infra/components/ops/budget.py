"""A budget with alerts, and who is told. A budget stops nothing; it needs a permission on the billing account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import billing, monitoring

from infra.components.base import options
from spec.stack_global import Budget as Config

MOST_CHANNELS = 5
"""The budget service takes no more."""


@dataclass(frozen=True, kw_only=True)
class AlertChannelsArgs:
    """Who is told."""

    project: str
    emails: Sequence[str]
    labels: dict[str, str]


class AlertChannels(pulumi.ComponentResource):
    """One channel for each mail address."""

    def __init__(self, name: str, args: AlertChannelsArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:ops:AlertChannels", name, None, opts)
        self.channels = [
            monitoring.NotificationChannel(
                email,
                project=args.project,
                display_name=email,
                type="email",
                labels={"email_address": email},
                user_labels=args.labels,
                opts=options(self),
            ).id
            for email in args.emails
        ]
        self.register_outputs({"channels": self.channels})


@dataclass(frozen=True, kw_only=True)
class BudgetArgs:
    """A budget of one project."""

    number: pulumi.Input[str]
    """The project's number; with its id the service would show a difference at every update."""
    name: str
    budget: Config
    channels: Sequence[pulumi.Input[str]]


class Budget(pulumi.ComponentResource):
    """Declares it."""

    def __init__(self, name: str, args: BudgetArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:ops:Budget", name, None, opts)
        wanted = args.budget
        billing.Budget(
            "budget",
            billing_account=wanted.billing_account,
            display_name=args.name,
            amount=billing.BudgetAmountArgs(
                specified_amount=billing.BudgetAmountSpecifiedAmountArgs(
                    currency_code=wanted.currency, units=str(wanted.amount)
                )
            ),
            budget_filter=billing.BudgetBudgetFilterArgs(projects=[pulumi.Output.concat("projects/", args.number)]),
            threshold_rules=[billing.BudgetThresholdRuleArgs(threshold_percent=one) for one in wanted.thresholds],
            all_updates_rule=billing.BudgetAllUpdatesRuleArgs(
                monitoring_notification_channels=list(args.channels)[:MOST_CHANNELS]
            )
            if args.channels
            else None,
            opts=options(self),
        )
        self.register_outputs({"amount": wanted.amount})
