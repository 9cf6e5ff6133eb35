"""KWOK, which plays kubelet for the fake nodes: one process beside the cluster's own components.

Its stages are upstream's fast ones with one addition: a pod of a Job that carries the annotation `gkr/run-for: 20s`
runs that long before it completes, instead of completing at once.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from tools.bed import fake_nodes
from tools.bed.layout import Bed
from tools.bed.processes import Component, probe
from tools.bed.rendered import Objects, only, render
from tools.binaries import binary

NAME = "kwok"
MODULE = "sigs.k8s.io/kwok"
RUN_FOR = "gkr/run-for"
PORT = 10247
LEASE_SECONDS = 40


def stages() -> Objects:
    """What happens to fake nodes and their pods."""
    return adapt(render("kwok", module=MODULE, folder="kustomize/stage/fast"))


def adapt(upstream: Objects) -> Objects:
    """Upstream's stages, with a run time that a pod can choose."""
    result = copy.deepcopy(upstream)
    delay: dict[str, Any] = {"durationFrom": {"expressionFrom": f'.metadata.annotations["{RUN_FOR}"]'}}
    only(result, kind="Stage", name="pod-complete")["spec"]["delay"] = delay
    return result


def component(bed: Bed) -> Component:
    """The process, with its stages written to where it reads them."""
    file = bed.settings / "kwok-stages.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    # JSON documents are YAML documents; without the separator all but one would be dropped silently.
    text = "\n---\n".join(json.dumps(stage) for stage in stages()) + "\n"
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    return Component(name=NAME, command=command(bed), ready=lambda: probe(bed, f"{_url(bed)}/healthz"), inputs=(file,))


def command(bed: Bed) -> tuple[str, ...]:
    """It manages the nodes that carry the annotation, and nothing else."""
    return (
        str(binary("kwok")),
        f"--kubeconfig={bed.kubeconfig}",
        f"--config={bed.settings / 'kwok-stages.yaml'}",
        f"--manage-nodes-with-annotation-selector={fake_nodes.MANAGED}=fake",
        f"--node-lease-duration-seconds={LEASE_SECONDS}",
        f"--cidr={bed.fake_range}",
        f"--node-ip={bed.address}",
        f"--node-port={PORT}",
        f"--server-address={bed.pod_gateway}:{PORT}",
    )


def _url(bed: Bed) -> str:
    return f"http://{bed.pod_gateway}:{PORT}"
