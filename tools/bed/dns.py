"""CoreDNS: names of Services for the bed's pods, and for nothing outside.

There is no `forward`, so a name that is not the cluster's is answered NXDOMAIN at once instead of leaving the machine
or hanging until a time-out.
"""

from __future__ import annotations

from typing import Any

NAMESPACE = "kube-system"
NAME = "coredns"
LABELS = {"k8s-app": "kube-dns"}
COREFILE = """\
cluster.local:53 in-addr.arpa:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        ttl 5
    }
    reload
}
.:53 {
    template ANY ANY {
        rcode NXDOMAIN
    }
}
"""
"""In two blocks, because `template` answers before `kubernetes` where both are in one."""


def objects(image: str, *, address: str) -> list[dict[str, Any]]:
    """Everything CoreDNS needs; `address` is what kubelet tells every pod as its name server."""
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named()},
        _role(),
        _binding(),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _named(), "data": {"Corefile": COREFILE}},
        _service(address),
        _deployment(image),
    ]


def _named() -> dict[str, Any]:
    return {"name": NAME, "namespace": NAMESPACE, "labels": LABELS}


def _role() -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "system:coredns"},
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["endpoints", "services", "pods", "namespaces"],
                "verbs": ["list", "watch"],
            },
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }


def _binding() -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "system:coredns"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
    }


def _service(address: str) -> dict[str, Any]:
    ports = [{"name": f"dns-{protocol.lower()}", "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": NAMESPACE, "labels": LABELS},
        "spec": {"selector": LABELS, "clusterIP": address, "ports": ports},
    }


def _deployment(image: str) -> dict[str, Any]:
    container = {
        "name": NAME,
        "image": image,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 10, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "170Mi"}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
    }
    pod = {
        "serviceAccountName": NAME,
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        "securityContext": {"runAsUser": 0},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": NAME}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _named(),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        },
    }
