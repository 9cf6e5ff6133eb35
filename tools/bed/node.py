"""The real node: containerd, kubelet, kube-proxy and the configuration they read."""

from __future__ import annotations

import json
from typing import Any

from tools.bed.layout import PAUSE_IMAGE, Bed
from tools.bed.network import BRIDGE
from tools.bed.processes import Component, probe
from tools.bed.run import ctr
from tools.binaries import binary

PLUGINS = "/usr/lib/cni"
"""Debian's folder of network plugins."""
RUNTIME = "containerd.toml"


def write_settings(bed: Bed) -> None:
    """All configuration files."""
    plugins = bed.settings / "cni"
    plugins.mkdir(parents=True, exist_ok=True)
    _write(bed, "resolv.conf", "")
    _write(bed, RUNTIME, containerd_settings(bed))
    _write_json(bed, "kubelet.json", kubelet_settings(bed))
    _write_json(bed, "kube-proxy.json", proxy_settings(bed))
    _write_json(bed, "cni/10-bed.conflist", network_settings(bed))


def _write_json(bed: Bed, name: str, document: dict[str, Any]) -> None:
    _write(bed, name, json.dumps(document, indent=2) + "\n")


def _write(bed: Bed, name: str, text: str) -> None:
    """Only what changes: kube-proxy ends itself when its file is written, also with the same content."""
    path = bed.settings / name
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def containerd_settings(bed: Bed) -> str:
    """`restrict_oom_score_adj`: without CAP_SYS_RESOURCE no container starts otherwise. `opt` would write to /opt."""
    return f"""\
version = 2
root = "{bed.images}"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{bed.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{PLUGINS}"
    conf_dir = "{bed.settings / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def network_settings(bed: Bed) -> dict[str, Any]:
    """Pods on the bridge, with host ports; `hairpinMode` lets a pod reach itself through its Service."""
    ranges = [[{"subnet": bed.pod_range, "gateway": bed.pod_gateway}]]
    address = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": False, "hairpinMode": True}
    return {
        "cniVersion": "1.0.0",
        "name": "bed",
        "plugins": [{**bridge, "ipam": address}, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def kubelet_settings(bed: Bed) -> dict[str, Any]:
    """`failCgroupV1` off and no groups per class of service: as found on machines with cgroups of version 1."""
    authority = {"clientCAFile": f"{bed.pki / 'ca.crt'}"}
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": authority},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{bed.pki / 'kubelet.crt'}",
        "tlsPrivateKeyFile": f"{bed.pki / 'kubelet.key'}",
        "containerRuntimeEndpoint": f"unix://{bed.containerd_socket}",
        "podLogsDir": f"{bed.pod_logs}",
        "resolvConf": f"{bed.settings / 'resolv.conf'}",
        "clusterDNS": [bed.dns_service],
        "clusterDomain": "cluster.local",
        "failSwapOn": False,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        # With false the eviction manager finds no file system and fails every ten seconds.
        "localStorageCapacityIsolation": True,
        "evictionHard": {"memory.available": "1%", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        "maxPods": 200,
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
    }


def proxy_settings(bed: Bed) -> dict[str, Any]:
    """No sysctl is written: those of connection tracking belong to the host."""
    untouched = {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"}
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{bed.pki / 'kube-proxy.kubeconfig'}", "qps": 50, "burst": 100},
        "mode": "iptables",
        "clusterCIDR": bed.pod_range,
        "hostnameOverride": bed.node,
        "bindAddress": "0.0.0.0",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": untouched,
        "iptables": {"minSyncPeriod": "100ms"},
    }


def containerd(bed: Bed) -> Component:
    """The container runtime."""
    settings = bed.settings / RUNTIME

    def ready() -> str:
        ctr(bed, "version", deadline_seconds=5)
        return ""

    return Component("containerd", ("containerd", f"--config={settings}"), ready=ready, inputs=(settings,))


def kubelet(bed: Bed) -> Component:
    """Ready when its own health endpoint answers; whether the node is Ready the API server knows."""
    settings = bed.settings / "kubelet.json"
    command = (
        f"{binary('kubelet')}", f"--config={settings}", f"--kubeconfig={bed.pki / 'kubelet.kubeconfig'}",
        f"--node-ip={bed.address}", f"--hostname-override={bed.node}", "--root-dir=/var/lib/kubelet",
    )  # fmt: skip
    return Component("kubelet", command, ready=lambda: probe(bed, "http://127.0.0.1:10248/healthz"), inputs=(settings,))


def kube_proxy(bed: Bed) -> Component:
    """Cluster IPs."""
    settings = bed.settings / "kube-proxy.json"
    return Component(
        "kube-proxy", (f"{binary('kube-proxy')}", f"--config={settings}"),
        ready=lambda: probe(bed, "http://127.0.0.1:10256/livez"), inputs=(settings,),
    )  # fmt: skip
