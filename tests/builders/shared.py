"""Shared services of a cluster, one for each case that the manifests must cover."""

from __future__ import annotations

from manifests.shared import HeadState, SharedServices
from spec.services import ServiceConfig, ServiceResources
from tests.builders.plans import bed, gke

ULTRA = gke("us-east5", pools={"a3-ultra": 16, "n2-standard-32": 8})
BED = bed()
GIB = 2**30
LARGE = ServiceResources.model_validate({"cpu": "8", "memory": "64Gi", "gpu": "H200:1"})

SHARED: dict[str, SharedServices] = {
    "ultra": SharedServices(
        cluster=ULTRA.name,
        region=ULTRA.region,
        namespace="gkr-system",
        image=f"us-east5-docker.pkg.dev/p/gkr/services@sha256:{'1' * 64}",
        bucket=ULTRA.bucket,
        services={
            "judge": ServiceConfig(kind="evaluate", replicas=2, resources=LARGE),
            "captions": ServiceConfig(kind="encode"),
        },
        site=ULTRA.site,
        manifest=f"{ULTRA.bucket}/data/portraits/manifest.json",
        first_port=7200,
        head_cores=8.0,
        head_memory=32 * GIB,
        head_state=HeadState(address="10.0.0.3:6379", password_secret="redis"),
        token_secret="gkr-services",
    ),
    "bed": SharedServices(
        cluster=BED.name,
        region=BED.region,
        namespace="gkr-system",
        image=BED.site.image,
        bucket=BED.bucket,
        services={"judge": ServiceConfig(kind="evaluate")},
        site=BED.site,
        first_port=7500,
        head_cores=1.0,
        head_memory=2 * GIB,
    ),
}
"""By name of the golden file."""
