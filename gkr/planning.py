"""A plan for a person: where it runs, what it will do, where each value comes from."""

from __future__ import annotations

import json

from gkr.output import result, say, table
from gkr.watch.text import short_count
from spec.plan import LearnerPlan, NodePlan, Plan
from spec.units import format_bytes


def show_plan(plan: Plan, *, output: str) -> None:
    """Print it; warnings go to stderr in every form."""
    for warning in plan.warnings:
        say(f"warning: {warning}")
    if output == "json":
        result(plan.model_dump_json(indent=2))
        return
    if output == "yaml":
        import yaml

        result(yaml.safe_dump(json.loads(plan.model_dump_json()), sort_keys=False, allow_unicode=True).rstrip())
        return
    for line in plan_lines(plan):
        result(line)


def plan_lines(plan: Plan) -> list[str]:
    """The whole plan as text."""
    lines = [f"experiment {plan.experiment}, backend {plan.backend}", ""]
    rows = [_placement_row(learner, node_group) for learner in plan.learners for node_group in _groups(learner)]
    lines += [
        table(rows, header=["LEARNER", "CLUSTER", "GROUP", "NODES", "MACHINE", "RANKS", "GPUS", "CPU", "MEMORY", "SHM"])
    ]
    services = [
        [
            one.name,
            one.kind,
            learner.name,
            "shared" if one.shared_endpoints else f"{one.replicas}",
            f"{one.cpu:g}" if one.cpu else "-",
            format_bytes(one.memory) if one.memory else "-",
        ]
        for learner in plan.learners
        for one in learner.services
    ]
    if services:
        lines += ["", table(services, header=["SERVICE", "KIND", "LEARNER", "REPLICAS", "CPU", "MEMORY"])]
    lines += ["", *_work_lines(plan), "", "values that are not defaults:"]
    written = [one for one in plan.origins if one.origin != "default"]
    lines.append(
        table(
            [[f"  {one.path}", one.value, one.origin, one.where] for one in written],
            header=["  PATH", "VALUE", "ORIGIN", "WHERE"],
        )
    )
    defaults = len(plan.origins) - len(written)
    lines.append(f"and {defaults} defaults; `-o json` lists all, `gkr explain PATH` says what one means")
    return lines


def _work_lines(plan: Plan) -> list[str]:
    lines: list[str] = []
    if plan.train is not None:
        train = plan.train
        steps = f"about {max(1, train.samples // (train.batch * len(plan.learners)))} inner steps per learner"
        lines.append(f"trains on {short_count(train.samples)} samples in batches of {train.batch}: {steps}")
    if plan.buckets:
        sizes = ", ".join(f"{one.width}x{one.height} ({one.batch})" for one in plan.buckets)
        lines.append(f"images in {len(plan.buckets)} sizes (samples of a batch): {sizes}")
    if plan.run_script is not None:
        lines.append("runs your command once per node:")
        lines += [f"  {line}" for line in plan.run_script.rstrip().splitlines()]
    if plan.syncer is not None:
        config = plan.syncer.config
        rounds = -(-plan.syncer.target_samples // (plan.syncer.round_samples * len(plan.learners)))
        lines.append(f"syncs in {config.mode} mode every {config.inner_steps} inner steps: about {rounds} outer rounds")
    return lines


def _groups(learner: LearnerPlan) -> list[list[NodePlan]]:
    names = dict.fromkeys(node.group for node in learner.nodes)
    return [[node for node in learner.nodes if node.group == name] for name in names]


def _placement_row(learner: LearnerPlan, nodes: list[NodePlan]) -> list[str]:
    node = nodes[0]
    gpus = f"{sum(one.gpus for one in nodes)} {learner.gpu}" if learner.gpu else "-"
    ranks = f"{sum(one.ranks for one in nodes)}"
    sizes = [f"{node.cpu:g}", format_bytes(node.memory), format_bytes(node.shm)]
    return [learner.name, learner.cluster, node.group, f"{len(nodes)}", node.machine, ranks, gpus, *sizes]
