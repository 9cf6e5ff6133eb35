"""The bed's object store: an S3 gateway over a folder of the node, and who may use it.

Pods and the host reach it under one address, the node's, so a URI in a plan means the same to both. Keys are made once
per bed and live only in the cluster's secrets.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMESPACE = "bed-system"
"""The bed's own: a stack makes the platform's and takes it away again."""
NAME = "bucket"
SECRET = "gkr-bucket"
PORT = 9000
REGION = "us-east-1"
LABELS = {"app": NAME}
ACCESS, KEY = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"


def bucket_name(cluster: str) -> str:
    """Every bed has a bucket of its own name, as buckets have everywhere: a URI tells whose it is."""
    return f"gkr-{cluster}"


def new_keys() -> dict[str, str]:
    """What a secret of the bucket holds."""
    return {ACCESS: f"bed{secrets.token_hex(8)}", KEY: secrets.token_urlsafe(30)}


def keys_of(data: Mapping[str, str]) -> dict[str, str]:
    """What a Secret of the API server holds, in clear text."""
    return {name: base64.b64decode(value).decode() for name, value in data.items()}


def environment(address: str) -> dict[str, str]:
    """How a client finds the store; not secret."""
    return {"AWS_ENDPOINT_URL": f"http://{address}:{PORT}", "AWS_REGION": REGION, "AWS_ALLOW_HTTP": "true"}


def secret(namespace: str, *, keys: dict[str, str]) -> dict[str, Any]:
    """The keys, for the pods of one namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": namespace},
        "stringData": keys,
    }


def objects(image: str, *, folder: Path, address: str) -> list[dict[str, Any]]:
    """The gateway. It is on the node's own address, so that no rule of a proxy stands between it and its clients."""
    container = {
        "name": NAME,
        "image": image,
        "imagePullPolicy": "Never",
        "args": ["--port", f"{address}:{PORT}", "--health", "/health", "--quiet", "posix", "/data"],
        "env": [_key("ROOT_ACCESS_KEY_ID", ACCESS), _key("ROOT_SECRET_ACCESS_KEY", KEY)],
        "readinessProbe": {"httpGet": {"host": address, "path": "/health", "port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "1Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "hostNetwork": True,
        "containers": [container],
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 2,
        "volumes": [{"name": "data", "hostPath": {"path": str(folder), "type": "Directory"}}],
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": LABELS},
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": LABELS},
                "template": {"metadata": {"labels": LABELS}, "spec": pod},
            },
        }
    ]


def _key(name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}}
