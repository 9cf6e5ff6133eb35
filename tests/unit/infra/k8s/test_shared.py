"""The platform's shared services are told where the data of their own region is."""

from __future__ import annotations

import json
from typing import cast

from infra.components.k8s.shared import shared_services
from manifests.shared import shared_objects
from spec.facts import Site
from spec.stack_platform import PlatformStack
from tests.builders.platforms import region_facts
from tests.builders.stack_files import shipped

EAST = "prod.us-east5"


def test_services_load_the_dataset_that_the_stack_names_from_the_regions_bucket() -> None:
    config = cast(PlatformStack, shipped(f"{EAST}.platform").value)
    assert config.shared is not None
    objects = shared_objects(shared_services(config.shared, region=region_facts(EAST), site=Site()))
    [files] = [one for one in objects if one["kind"] == "ConfigMap"]
    [learner] = json.loads(files["data"]["plan.json"])["learners"]
    assert learner["data_manifest"] == "gs://example-gkr-prod-us-east5/data/portraits/manifest.json"
