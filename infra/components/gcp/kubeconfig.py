"""How a cluster is reached, as the text that clients read. Pure.

GKE's DNS endpoint has a public certificate and is open by permission only; its users have `gke-gcloud-auth-plugin`.
A control plane that hands out a client certificate (GKE does not unless asked to) is reached by its address with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a cluster says about itself once it is there."""

    dns_endpoint: str = ""
    address: str = ""
    ca_certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""


def kubeconfig(cluster: str, *, reach: Reach) -> str:
    """JSON, which is YAML too."""
    by_certificate = bool(reach.client_certificate and reach.client_key)
    if by_certificate:
        server: dict[str, Any] = {
            "certificate-authority-data": reach.ca_certificate,
            "server": f"https://{reach.address}",
        }
        user: dict[str, Any] = {
            "client-certificate-data": reach.client_certificate,
            "client-key-data": reach.client_key,
        }
    else:
        server = {"server": f"https://{reach.dns_endpoint}"}
        user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1beta1",
                "command": "gke-gcloud-auth-plugin",
                "installHint": "install google-cloud-cli-gke-gcloud-auth-plugin",
                "interactiveMode": "Never",
                "provideClusterInfo": True,
            }
        }
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": cluster, "cluster": server}],
            "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": cluster}}],
            "current-context": cluster,
            "users": [{"name": cluster, "user": user}],
        },
        indent=2,
    )
