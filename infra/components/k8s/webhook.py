"""Waiting until Kueue's webhooks answer.

Kueue's Deployment is ready a moment before its webhooks can be reached with their certificate, and an API server that
is refused by a webhook refuses the object. Neither chart nor engine retries that, so a Job in the cluster does: it asks
for a ResourceFlavor that is only checked, never stored, until the API server says yes. Queues depend on it.
"""

from __future__ import annotations

from typing import Any

from infra.components.k8s.objects import Objects
from infra.components.k8s.queues import API
from infra.facts import NAMESPACE
from manifests import containers, placing
from manifests.values import env_list
from spec.facts import Site

NAME = "kueue-webhooks-answer"
DEADLINE_SECONDS = 300
PROBE = r"""
import json, os, ssl, sys, time, urllib.error, urllib.request

folder = "/var/run/secrets/kubernetes.io/serviceaccount"
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
url = f"https://{host}:{port}/apis/{os.environ['GKR_API']}/resourceflavors?dryRun=All"
body = json.dumps({
    "apiVersion": os.environ["GKR_API"], "kind": "ResourceFlavor", "metadata": {"name": "gkr-webhook-probe"},
})
trusted = ssl.create_default_context(cafile=f"{folder}/ca.crt")
deadline = time.monotonic() + float(os.environ["GKR_DEADLINE_SECONDS"])
said = "nothing"
while time.monotonic() < deadline:
    with open(f"{folder}/token") as file:
        headers = {"Authorization": f"Bearer {file.read()}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body.encode(), headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10, context=trusted):
            print("Kueue's webhooks answer")
            sys.exit(0)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[-500:]
    except OSError as error:
        said = str(error)
    print(said, flush=True)
    time.sleep(1)
print(f"Kueue's webhooks did not answer in time; the last try: {said}", file=sys.stderr)
sys.exit(1)
"""
"""Python's standard library only: every image of ours runs it."""


def webhook_objects(*, image: str, site: Site, version: str) -> Objects:
    """The Job and its right to ask. `version` is Kueue's: another one is asked anew."""
    labels = {"app.kubernetes.io/name": NAME}
    metadata = {"labels": labels, "name": NAME, "namespace": NAMESPACE}
    rule = {"apiGroups": [API.split("/")[0]], "resources": ["resourceflavors"], "verbs": ["create"]}
    role = f"gkr-{NAME}"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role},
            "rules": [rule],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**metadata, "name": f"{NAME}-{version.replace('.', '-').replace('+', '-').lower()}"},
            "spec": {
                "activeDeadlineSeconds": DEADLINE_SECONDS + 120,
                "backoffLimit": 2,
                "template": {"metadata": {"labels": labels}, "spec": _pod(image, site=site)},
            },
        },
    ]


def _pod(image: str, *, site: Site) -> dict[str, Any]:
    env = {"GKR_API": API, "GKR_DEADLINE_SECONDS": str(DEADLINE_SECONDS)}
    container = {
        "name": "probe",
        "image": image,
        "command": ["python", "-c", PROBE],
        "env": env_list(env),
        "resources": containers.resources(0.05, 64 * 2**20),
        "securityContext": containers.HARDENED,
        "volumeMounts": [
            {"name": one.name, "mountPath": one.mount_path, "readOnly": one.read_only} for one in site.mounts
        ],
    }
    spec: dict[str, Any] = {
        "affinity": placing.off_gpus(),
        "containers": [container],
        "restartPolicy": "Never",
        "serviceAccountName": NAME,
        "volumes": [{"name": one.name, "hostPath": {"path": one.host_path}} for one in site.mounts],
    }
    if site.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in site.image_pull_secrets]
    return spec
