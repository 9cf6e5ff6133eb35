"""What prepares GPU nodes for their fabric: NCCL plugins on the node's disk, and the injector that gives pods devices.

A3 Mega gets GPUDirect-TCPXO (plugin, and the injector, because its pods are not privileged); A3 Ultra and A4 get gIB.
Plugin, receive daemon and the profile that pods source belong together: all nodes have one version, and it changes only
while no GPU pod runs. Facts and paths: Google's installers for the two fabrics; not run on such nodes by us yet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes

from infra.components.k8s.objects import SKIP_AWAIT, Objects, declare
from manifests.fabric import TCPXO_PLUGIN
from manifests.placing import ACCELERATOR
from spec.errors import ConfigError
from spec.machines import Machine, machine
from spec.stack_platform import Installers

NAMESPACE = "kube-system"
"""The only namespace whose pods may have the priority that keeps an installer on a full node."""
_GPU_NODE = "cloud.google.com/gke-gpu"
_TCPXO_PREPARE = """\
set -eu
/sbin/iptables -I INPUT -p tcp -m tcp -j ACCEPT
modprobe import-helper
mkdir -p /dev/aperture_devices
for bdf in $(lspci -nn -D | awk '/1ae0:0084/ { print $1 }'); do
  device=$(readlink -f "/sys/bus/pci/devices/$bdf")
  mkdir -p "/dev/aperture_devices/$bdf"
  umount -R "/dev/aperture_devices/$bdf" 2>/dev/null || true
  mount --bind "$device" "/dev/aperture_devices/$bdf"
done
chmod -R a+r /dev/aperture_devices
chmod a+rw /dev/aperture_devices/*/resource*
"""
"""Runs on the node itself: the kernel module behind dmabuf, and the NICs' windows where pods may read them."""
_TCPXO_INSTALL = """\
set -eux
chmod 755 /scripts/container_entry.sh
/scripts/container_entry.sh install --install-nccl
mkdir -p /usr/local/nvidia/lib64
cp -r /var/lib/tcpxo/lib64/. /usr/local/nvidia/lib64
"""
_GIB_PREPARE = """\
set -eu
for nic in 0 1 2 3 4 5 6 7; do
  path=/proc/sys/net/ipv4/conf/gpu${nic}rdma0/log_martians
  if [ -w "$path" ]; then echo 0 > "$path"; fi
done
"""
"""Every packet of the RDMA networks is a martian to the kernel, which would log each."""
_GIB_INSTALL = """\
set -eux
/scripts/container_entry.sh install
cp -r /var/lib/gib/lib64/. /usr/local/home/kubernetes/bin/nvidia/lib64
cp -r /var/lib/gib/. /usr/local/home/kubernetes/bin/gib
"""
"""Without NCCL itself: experiments bring their own, which the locks pin."""


def installer_objects(installers: Installers, *, machines: Sequence[str]) -> Objects:
    """DaemonSets for the machine types of a cluster; ConfigError for one whose images are not configured."""
    rows = [machine(name) for name in dict.fromkeys(machines)]
    found: Objects = []
    tcpxo = [row for row in rows if row.fabric == "tcpxo"]
    if tcpxo:
        found += _tcpxo(installers, tcpxo)
    rdma = [row for row in rows if row.fabric == "rdma"]
    if rdma:
        found.append(_gib(installers, rdma))
    return found


def _tcpxo(installers: Installers, rows: Sequence[Machine]) -> Objects:
    plugin = _needed(installers.tcpxo_plugin, field="tcpxo_plugin", rows=rows)
    injector = _needed(installers.nri_injector, field="nri_injector", rows=rows)
    _check_plugin(plugin)
    prepare = {
        "name": "prepare",
        "image": plugin,
        "command": ["nsenter", "-at", "1", "--", "sh", "-c", _TCPXO_PREPARE],
        "securityContext": {"privileged": True},
    }
    install = {
        "name": "install",
        "image": plugin,
        "command": ["/bin/sh", "-c", _TCPXO_INSTALL],
        "resources": {"requests": {"cpu": "150m"}},
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "bin", "mountPath": "/usr/local"},
            {"name": "var-lib", "mountPath": "/var/lib"},
        ],
    }
    volumes = [_host("bin", "/home/kubernetes/bin"), _host("var-lib", "/var/lib")]
    inject = {
        "name": "injector",
        "image": injector,
        "resources": {"requests": {"cpu": "150m"}},
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "dev", "mountPath": "/dev"}, {"name": "nri", "mountPath": "/var/run/nri"}],
    }
    return [
        _daemon_set(
            "nccl-tcpxo-installer", where=_on(rows), init=[prepare, install],
            containers=[{"name": "pause", "image": installers.pause}], volumes=volumes,
        ),
        _daemon_set(
            "device-injector", where=[{"key": _GPU_NODE, "operator": "Exists"}], init=[],
            containers=[inject], volumes=[_host("dev", "/dev"), _host("nri", "/var/run/nri")],
        ),
    ]  # fmt: skip


def _gib(installers: Installers, rows: Sequence[Machine]) -> dict[str, Any]:
    plugin = _needed(installers.gib_plugin, field="gib_plugin", rows=rows)
    prepare = {
        "name": "prepare",
        "image": plugin,
        "command": ["/bin/sh", "-c", _GIB_PREPARE],
        "securityContext": {"privileged": True},
    }
    install = {
        "name": "install",
        "image": plugin,
        "command": ["/bin/sh", "-c", _GIB_INSTALL],
        "resources": {"requests": {"cpu": "150m"}},
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "gib", "mountPath": "/usr/local/home/kubernetes/bin/gib"},
            {"name": "libraries", "mountPath": "/usr/local/home/kubernetes/bin/nvidia/lib64"},
        ],
    }
    volumes = [
        _host("gib", "/home/kubernetes/bin/gib"),
        _host("libraries", "/home/kubernetes/bin/nvidia/lib64"),
    ]
    return _daemon_set(
        "nccl-rdma-installer", where=_on(rows), init=[prepare, install],
        containers=[{"name": "pause", "image": installers.pause}], volumes=volumes,
    )  # fmt: skip


def _needed(image: str | None, *, field: str, rows: Sequence[Machine]) -> str:
    if image is None:
        raise ConfigError(
            f"{', '.join(row.name for row in rows)} needs installers.{field}, which is not configured; its GPUs would "
            "talk over plain TCP at a small part of the speed",
            hint=f"add installers: {{{field}: IMAGE@sha256:...}} to the platform stack",
        )
    return image


def _check_plugin(plugin: str) -> None:
    """Pods are rendered with the daemon of one plugin; a wrong pair fails inside NCCL, on hundreds of nodes at once."""
    tag = re.search(r":(?P<tag>[\w.-]+)(@|$)", plugin)
    if tag and tag["tag"] != TCPXO_PLUGIN:
        raise ConfigError(
            f"installers.tcpxo_plugin is {tag['tag']}, but pods are rendered with the receive daemon of {TCPXO_PLUGIN}",
            hint="change both together (manifests/fabric.py), while no GPU pod runs",
        )


def _on(rows: Sequence[Machine]) -> list[dict[str, Any]]:
    return [{"key": ACCELERATOR, "operator": "In", "values": sorted(row.accelerator for row in rows)}]


def _daemon_set(
    name: str,
    *,
    where: list[dict[str, Any]],
    init: list[dict[str, Any]],
    containers: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
) -> dict[str, Any]:
    labels = {"k8s-app": name}
    terms = {"nodeSelectorTerms": [{"matchExpressions": where}]}
    spec: dict[str, Any] = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "containers": containers,
        "hostNetwork": True,
        "hostPID": True,
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "volumes": volumes,
    }
    if init:
        spec["initContainers"] = init
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        # One broken node of a thousand must not fail the stack; a pod on a node that was not prepared says so itself.
        "metadata": {"annotations": {SKIP_AWAIT: "true"}, "labels": labels, "name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
            "updateStrategy": {"type": "RollingUpdate"},
        },
    }


def _host(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": path}}


@dataclass(frozen=True, kw_only=True)
class GpuDirectInstallersArgs:
    """Installers of a cluster."""

    provider: kubernetes.Provider
    installers: Installers
    machines: Sequence[str]
    """Machine types of its pools."""


class GpuDirectInstallers(pulumi.ComponentResource):
    """Declares them. Pods that need them are gated on the machine: start.sh refuses a node without the profile."""

    def __init__(self, name: str, args: GpuDirectInstallersArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:GpuDirectInstallers", name, None, opts)
        objects = installer_objects(args.installers, machines=args.machines)
        declare(objects, parent=self, provider=args.provider)
        self.register_outputs({"daemon_sets": [one["metadata"]["name"] for one in objects]})
