"""What Google Cloud adds to what it is given: ids, links, addresses, accounts. Pure; the same inputs give the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

Inputs = Mapping[str, Any]

CLUSTER = "gcp:container/cluster:Cluster"
NODE_POOL = "gcp:container/nodePool:NodePool"
COMPUTE = "https://www.googleapis.com/compute/v1/"

_ACCOUNT = "projects/{project}/serviceAccounts/{accountId}@{project}.iam.gserviceaccount.com"
_IDS: Mapping[str, str] = {
    CLUSTER: "projects/{project}/locations/{location}/clusters/{name}",
    NODE_POOL: "{cluster}/nodePools/{name}",
    "gcp:artifactregistry/repository:Repository": "projects/{project}/locations/{location}/repositories/{repositoryId}",
    "gcp:compute/address:Address": "projects/{project}/regions/{region}/addresses/{name}",
    "gcp:compute/firewall:Firewall": "projects/{project}/global/firewalls/{name}",
    "gcp:compute/globalAddress:GlobalAddress": "projects/{project}/global/addresses/{name}",
    "gcp:compute/network:Network": "projects/{project}/global/networks/{name}",
    "gcp:compute/reservation:Reservation": "projects/{project}/zones/{zone}/reservations/{name}",
    "gcp:compute/router:Router": "projects/{project}/regions/{region}/routers/{name}",
    "gcp:compute/routerNat:RouterNat": "{project}/{region}/{router}/{name}",
    "gcp:compute/subnetwork:Subnetwork": "projects/{project}/regions/{region}/subnetworks/{name}",
    "gcp:kms/cryptoKey:CryptoKey": "{keyRing}/cryptoKeys/{name}",
    "gcp:kms/keyRing:KeyRing": "projects/{project}/locations/{location}/keyRings/{name}",
    "gcp:lustre/instance:Instance": "projects/{project}/locations/{location}/instances/{instanceId}",
    "gcp:projects/service:Service": "{project}/{service}",
    "gcp:serviceaccount/account:Account": _ACCOUNT,
    "gcp:storage/bucket:Bucket": "{name}",
    "gcp:storage/bucketIAMMember:BucketIAMMember": "b/{bucket}/{role}/{member}",
}
"""Type -> form of its id, from its inputs."""


def identity(kind: str, inputs: Inputs, *, urn: str) -> str:
    """The id of a thing. Types without a form of their own get one from everything they are given."""
    form = _IDS.get(kind)
    if form is not None:
        return form.format_map(_Words(inputs))
    return f"{kind.rpartition(':')[2].lower()}-{_digest(urn)[:16]}"


def outputs(kind: str, inputs: Inputs, *, identity: str) -> dict[str, Any]:
    """Everything that is read back: the inputs, and what the cloud adds."""
    found = dict(inputs)
    if kind.startswith("gcp:compute/"):
        found["selfLink"] = COMPUTE + identity
    adds = _ADDS.get(kind)
    return {**found, **(adds(inputs, identity) if adds else {})}


def project_number(project: str) -> str:
    """Twelve digits, always the same for a project."""
    return str(10**11 + int(_digest(project)[:12], 16) % (9 * 10**11))


def looked_up(token: str, arguments: Inputs) -> dict[str, Any] | None:
    """What a look-up answers; None for one that the double does not know."""
    if token == "gcp:organizations/getProject:getProject":
        project = str(arguments.get("projectId", ""))
        return {"id": f"projects/{project}", "number": project_number(project), "projectId": project, "name": project}
    if token == "gcp:storage/getProjectServiceAccount:getProjectServiceAccount":
        project = str(arguments.get("project", ""))
        email = f"service-{project_number(project)}@gs-project-accounts.iam.gserviceaccount.com"
        return {"id": email, "emailAddress": email, "member": f"serviceAccount:{email}", "project": project}
    return None


def _account(inputs: Inputs, identity: str) -> dict[str, Any]:
    email = identity.rpartition("/")[2]
    return {"email": email, "member": f"serviceAccount:{email}", "name": identity, "uniqueId": _digest(email)[:21]}


def _address(inputs: Inputs, identity: str) -> dict[str, Any]:
    number = int(_digest(identity)[:4], 16)
    internal = inputs.get("addressType") == "INTERNAL"
    return {"address": inputs.get("address") or f"{'10.0.0' if internal else '203.0.113'}.{number % 250 + 2}"}


def _cluster(inputs: Inputs, identity: str) -> dict[str, Any]:
    """As GKE answers without a bed: names that nothing has, and no client certificate."""
    digest = _digest(identity)
    endpoints = dict(inputs.get("controlPlaneEndpointsConfig") or {})
    dns = dict(endpoints.get("dnsEndpointConfig") or {})
    dns["endpoint"] = f"gke-{digest[:24]}.{inputs['location']}.gke.invalid"
    endpoints["dnsEndpointConfig"] = dns
    return {
        "endpoint": f"192.0.2.{int(digest[:2], 16) % 250 + 2}",
        "controlPlaneEndpointsConfig": endpoints,
        "masterAuth": {"clusterCaCertificate": "", "clientCertificate": "", "clientKey": ""},
        "masterVersion": inputs.get("minMasterVersion"),
    }


_ADDS: Mapping[str, Callable[[Inputs, str], dict[str, Any]]] = {
    CLUSTER: _cluster,
    "gcp:artifactregistry/repository:Repository": lambda inputs, _: {"name": inputs["repositoryId"]},
    "gcp:compute/address:Address": _address,
    "gcp:compute/globalAddress:GlobalAddress": _address,
    "gcp:monitoring/notificationChannel:NotificationChannel": lambda inputs, identity: {
        "name": f"projects/{inputs.get('project')}/notificationChannels/{identity}"
    },
    "gcp:serviceaccount/account:Account": _account,
    "gcp:storage/bucket:Bucket": lambda inputs, _: {"url": f"gs://{inputs['name']}"},
}


class _Words(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "-"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
