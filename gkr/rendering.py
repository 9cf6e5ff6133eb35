"""A plan's objects as text that `kubectl apply -f -` takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manifests.render import render
from spec.errors import ConfigError, GkrError, NotFoundError
from spec.plan import Plan


class _UsageError(GkrError):
    exit_code = 2


def rendered(plan: Plan, *, only: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of one cluster, and what `gkr launch` would do beside applying them."""
    if plan.backend == "local":
        raise ConfigError(
            "this plan is for this machine, which has no Kubernetes objects",
            hint="name a cluster: --cluster NAME (`gkr clusters list`), or --facts FILE",
        )
    remarks: list[str] = []
    if plan.code is not None:
        from gkr.cluster.code import pack

        archive = pack(Path(plan.code))
        plan = plan.model_copy(update={"code_sha256": archive.sha256})
        remarks.append(f"not uploaded here: the code of {plan.code}, as {archive.key} into each bucket")
    if plan.env_from_caller:
        names = ", ".join(plan.env_from_caller)
        remarks.append(f"not in the output: the secret with your values of {names}")
    by_cluster = render(plan)
    if only is None and len(by_cluster) > 1:
        raise _UsageError(
            f"the objects go to {len(by_cluster)} clusters: {', '.join(by_cluster)}",
            hint=f"one at a time: --only {next(iter(by_cluster))}",
        )
    chosen = only or next(iter(by_cluster))
    if chosen not in by_cluster:
        raise NotFoundError(f"no learner is placed on {chosen}", hint=f"placed on: {', '.join(by_cluster)}")
    return by_cluster[chosen], remarks


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """A stream of documents."""
    import yaml

    return yaml.dump_all(objects, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=10_000).rstrip()


def as_json(objects: Sequence[dict[str, Any]]) -> str:
    """One List."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}, ensure_ascii=False, indent=1)


def _dumper() -> Any:
    """Texts of several lines as they were written, so that scripts stay readable, and no anchors."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> yaml.ScalarNode:
        block = "\n" in value and not any(line.endswith(" ") for line in value.split("\n"))
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if block else None)

    Dumper.add_representer(str, text)
    return Dumper
