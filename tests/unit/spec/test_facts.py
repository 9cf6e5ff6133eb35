"""Facts are read leniently, and a laptop has some too."""

from __future__ import annotations

from spec.facts import ClusterFacts, local_facts
from tests.builders.experiments import GIB, regions


def test_local_clusters_stand_for_regions_on_one_machine() -> None:
    facts = local_facts(2, memory_bytes=24 * GIB, bucket_root_uri="file:///w/.gkr/buckets/", count=3)
    assert [(one.name, one.region, one.backend) for one in facts] == [
        (f"local-{n}", f"local-{n}", "local") for n in range(3)
    ]
    assert facts[1].bucket == "file:///w/.gkr/buckets/local-1"
    assert {(one.pools[0].node_cpu, one.pools[0].node_memory) for one in facts} == {(2.0, 24 * GIB)}


def test_facts_of_a_newer_writer_are_read() -> None:
    facts = regions()[0]
    newer = facts.write_json().replace('"pools":[{', '"later":1,"pools":[{"later":2,', 1)
    assert ClusterFacts.read_json(newer) == facts


def test_a_pool_takes_its_size_from_the_catalogue_unless_it_says_otherwise() -> None:
    pool = regions()[0].pools[1]
    assert (pool.node_cpu, pool.node_memory) == (220, 2800 * GIB)
    assert pool.model_copy(update={"memory": GIB}).node_memory == GIB
