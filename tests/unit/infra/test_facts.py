"""A region's part and a platform's configuration, made into the facts of a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.facts import (
    KEY,
    NAME,
    NAMESPACE,
    RegionFacts,
    cluster_facts,
    config_map,
    expand,
    full_image,
    read_region,
    site_of,
)
from spec.errors import ConfigError
from spec.facts import ClusterFacts
from spec.stack_platform import Mount
from tests.builders.platforms import outputs, platform, region_facts
from tools.bed import facts as bed_facts

EAST = "prod.us-east5"


def exported(**changes: Any) -> dict[str, Any]:
    return outputs(EAST, **changes)["facts"]


def facts_of(stack: str) -> ClusterFacts:
    config, region = platform(f"{stack}.platform"), region_facts(stack)
    return cluster_facts(config, region=region, site=site_of(config, region=region, environment={}))


def test_what_a_region_exports_survives_the_engine_which_has_only_floats() -> None:
    floats = json.loads(json.dumps(exported()), parse_int=float)
    assert read_region(floats, stack=EAST) == region_facts(EAST)


def test_a_newer_region_is_read_by_an_older_platform() -> None:
    assert read_region({**exported(), "invented_later": {"a": 1}}, stack=EAST) == region_facts(EAST)


def test_every_fault_is_named_at_once() -> None:
    given = exported(bucket=None, pools=[{"machine": "a3-ultra"}])
    with pytest.raises(ConfigError) as refused:
        read_region(given, stack=EAST)
    assert "field pools.0.nodes is missing" in refused.value.message
    assert "field bucket is missing" in refused.value.message
    assert refused.value.where == EAST
    assert f"make up STACK={EAST}" in refused.value.hint


def test_facts_hold_what_placement_needs() -> None:
    facts = facts_of(EAST)
    region = region_facts(EAST)
    assert facts.pools == region.pools
    assert (facts.bucket, facts.registry) == (region.bucket, region.registry)
    assert facts.queues == ["research", "urgent"]
    assert facts.priorities == ["low", "normal", "high"]
    assert facts.namespaces == ["gkr-0", "gkr-1", "gkr-2", "gkr-3"]
    assert facts.syncer is not None
    assert (facts.syncer.control_port, facts.syncer.bulk_port, facts.syncer.host) == (7070, 7071, "10.0.0.9")
    assert facts.site.topology_level == "cloud.google.com/gce-topology-subblock"


def test_no_topology_without_gpus() -> None:
    config, region = platform(f"{EAST}.platform"), region_facts(EAST)
    plain = region.model_copy(update={"pools": region.pools[:1]})
    assert site_of(config, region=plain, environment={}).topology_level == ""


def test_the_config_map_is_where_gkr_and_the_bed_look_for_it() -> None:
    facts = facts_of(EAST)
    found = config_map(facts)
    assert (NAMESPACE, NAME, KEY) == (bed_facts.NAMESPACE, bed_facts.NAME, bed_facts.KEY)
    assert found == bed_facts.config_map(facts)


def test_a_folder_named_twice_is_mounted_once() -> None:
    config, region = platform(f"{EAST}.platform"), region_facts(EAST)
    mounts = [
        Mount(name="usr", host_path="/usr", mount_path="/usr"),
        Mount(name="python", host_path="$PYTHON", mount_path="$PYTHON"),
        Mount(name="code", host_path="$CODE", mount_path="$CODE", read_only=False),
    ]
    given = config.model_copy(update={"site": config.site.model_copy(update={"mounts": mounts})})
    site = site_of(given, region=region, environment={"PYTHON": "/usr", "CODE": "/srv/code"})
    assert [(one.name, one.mount_path, one.read_only) for one in site.mounts] == [
        ("usr", "/usr", True),
        ("code", "/srv/code", False),
    ]


def test_a_variable_that_is_not_set_is_named() -> None:
    assert expand("$HOME_OF/charts", environment={"HOME_OF": "/srv"}) == "/srv/charts"
    with pytest.raises(ConfigError, match=r"\$HOME_OF, which is not set"):
        expand("$HOME_OF/charts", environment={})


@pytest.mark.parametrize(
    ("image", "whole"),
    [("trainer", "docker/gkr/trainer"), ("other/image@sha256:0", "other/image@sha256:0"), ("", "")],
)
def test_an_image_by_name_is_one_of_the_regions_registry(image: str, whole: str) -> None:
    assert full_image(image, registry="docker/gkr/") == whole


def test_a_region_is_asked_for_a_pool_by_name() -> None:
    region: RegionFacts = region_facts(EAST)
    assert region.pool("ultra-1") is not None
    assert region.pool("absent") is None
