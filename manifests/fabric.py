"""What a pod needs to reach the GPUs of other machines over the fabric of its machine row.

One function per fabric. Only pods that take a whole machine get it: the receive path of GPUDirect-TCPXO and the RDMA
devices of gIB serve one pod per machine. Versions of plugin and receive daemon belong together; the installer that the
region's stack runs must be that of `TCPXO_DAEMON`. Sources: Google's pages and manifests for A3 Mega and A3 Ultra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spec.machines import Fabric as FabricName
from spec.machines import Machine
from spec.stack_pods import interface_annotations

TCPXO_DAEMON = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21"
TCPXO_PLUGIN = "v1.0.15"
"""Version of the NCCL plugin that the daemon goes with."""
PROFILE = "GKR_NCCL_PROFILE"
"""Environment variable of start.sh: the file with NCCL's settings for this fabric."""
_NVIDIA = "/usr/local/nvidia"
_LIBRARIES = f"{_NVIDIA}/lib64"
_HEALTH = "/run/health-check"
"""Written by the daemon when it is ready; it takes no name with an underscore."""
_DEVICES = (*(f"/dev/nvidia{index}" for index in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm",
            "/dev/dmabuf_import_helper")  # fmt: skip


@dataclass(frozen=True)
class PodFabric:
    """Additions to a pod."""

    annotations: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    mounts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    volumes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    sidecars: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Native sidecars (init containers that keep running), so that the pod can end."""


CONTROL_ENV = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
"""Control traffic stays on the pod's first interface; the others have no route to anything but their own kind."""


def pod_fabric(row: Machine, *, gpus: int) -> PodFabric:
    """Additions for a trainer pod with that many of the machine's GPUs; nothing for part of a machine."""
    if gpus == 0:
        return PodFabric()
    make = FABRICS.get(row.fabric)
    if gpus < row.gpus or make is None:
        return PodFabric(env=dict(CONTROL_ENV))
    return make(row)


def is_built(row: Machine) -> bool:
    """Whether pods of this machine can reach each other over its fabric."""
    return row.fabric == "none" or row.fabric in FABRICS


def _tcpxo(row: Machine) -> PodFabric:
    """A3 Mega: a daemon beside the trainer receives into GPU memory; NCCL finds it through the plugin's profile."""
    libraries = {"name": "nvidia-install-dir-host", "mountPath": _NVIDIA}
    daemon = {
        "name": "tcpxo-daemon",
        "image": TCPXO_DAEMON,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c"],
        "args": [
            "set -e; chmod 755 /fts/entrypoint_rxdm_container.sh; "
            "exec /fts/entrypoint_rxdm_container.sh --num_hops=2"
        ],
        "env": [
            {"name": "HEALTH_CHECK_LOG_FILE", "value": _HEALTH},
            {"name": "LD_LIBRARY_PATH", "value": _LIBRARIES},
        ],
        "securityContext": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
        # Its buffers take about 30 s; later containers start only when it is ready.
        "startupProbe": {
            "exec": {"command": ["cat", _HEALTH]}, "initialDelaySeconds": 1, "periodSeconds": 5, "failureThreshold": 36,
        },
        "volumeMounts": [
            libraries,
            {"name": "sys", "mountPath": "/hostsysfs"},
            {"name": "proc-sys", "mountPath": "/hostprocsysfs"},
        ],
    }  # fmt: skip
    devices = "".join(f"- path: {path}\n" for path in _DEVICES)
    return PodFabric(
        annotations={"devices.gke.io/container.tcpxo-daemon": devices, **interface_annotations(row)},
        env={
            **CONTROL_ENV,
            "LD_LIBRARY_PATH": _LIBRARIES,
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
            PROFILE: f"{_LIBRARIES}/nccl-env-profile.sh",
        },
        mounts=[
            {"name": "aperture-devices", "mountPath": "/dev/aperture_devices"},
            {**libraries, "readOnly": True},
        ],
        volumes=[
            _host("aperture-devices", "/dev/aperture_devices"),
            _host("nvidia-install-dir-host", "/home/kubernetes/bin/nvidia"),
            _host("proc-sys", "/proc/sys"),
            _host("sys", "/sys"),
        ],
        sidecars=[daemon],
    )


def _gib(row: Machine) -> PodFabric:
    """A3 Ultra and A4: RDMA devices in the pod, NCCL's gIB plugin from the node. No daemon, no privilege."""
    return PodFabric(
        annotations=interface_annotations(row),
        env={
            **CONTROL_ENV,
            "LD_LIBRARY_PATH": _LIBRARIES,
            # Without it NCCL falls back to TCP when the plugin does not load, at a hundredth of the speed.
            "NCCL_NET": "gIB",
            PROFILE: "/usr/local/gib/scripts/set_nccl_env.sh",
        },
        mounts=[
            {"name": "gib", "mountPath": "/usr/local/gib", "readOnly": True},
            {"name": "nvidia-install-dir-host", "mountPath": _NVIDIA, "readOnly": True},
        ],
        volumes=[
            _host("gib", "/home/kubernetes/bin/gib"),
            _host("nvidia-install-dir-host", "/home/kubernetes/bin/nvidia"),
        ],
    )


FABRICS: Mapping[FabricName, Callable[[Machine], PodFabric]] = {"tcpxo": _tcpxo, "rdma": _gib}


def _host(name: str, path: str) -> dict[str, Any]:
    """A folder of the node that must be there: a pod whose node was not prepared says so instead of running slowly."""
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
