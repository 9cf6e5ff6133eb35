"""Single values of stack configurations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.problems import RemedyError
from spec.stack_values import StackName, gke_version, parse_reservation, parse_stack_name
from tests.builders.stack_files import problems_of

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize("text", ["prod.global", "prod.us-east5", "dev.us-east4.platform", "local.bed-a"])
def test_stack_names_come_back_as_written(text: str) -> None:
    assert str(parse_stack_name(text)) == text


def test_the_parts_of_stack_names() -> None:
    assert parse_stack_name("prod.global") == StackName("prod", "", "global")
    assert parse_stack_name("prod.us-east5") == StackName("prod", "us-east5", "region")
    assert parse_stack_name("prod.us-east5.platform") == StackName("prod", "us-east5", "platform")


@pytest.mark.parametrize(
    "text",
    ["", "global", "us-east5", "prod.", "Prod.global", "prod.global.platform", "a.b.c", "a.b.c.d", "prod.platform"],
)
def test_other_names_are_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(RemedyError) as caught:
        parse_stack_name(text)
    assert "ENV.REGION.platform" in caught.value.hint


@given(
    st.tuples(st.integers(1, 2), st.integers(0, 99), st.integers(0, 99), st.integers(0, 10**7)),
    st.tuples(st.integers(1, 2), st.integers(0, 99), st.integers(0, 99), st.integers(0, 10**7)),
)
def test_versions_compare_as_numbers(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    first, second = (gke_version("{}.{}.{}-gke.{}".format(*parts)) for parts in (one, two))
    assert (first < second) == (one < two)


def test_a_reservation_path_is_taken_apart() -> None:
    whole = parse_reservation("projects/some-owner/reservations/r")
    block = parse_reservation("projects/some-owner/reservations/r/reservationBlocks/b")
    part = parse_reservation("projects/some-owner/reservations/r/reservationBlocks/b/reservationSubBlocks/s")
    assert part.reservation == block.reservation == "projects/some-owner/reservations/r"
    assert whole.contains(block)
    assert block.contains(part)
    assert not part.contains(block)
    assert not block.contains(parse_reservation("projects/some-owner/reservations/r/reservationBlocks/b2"))
    assert not whole.contains(parse_reservation("projects/else-owner/reservations/r"))


RESERVED = "gpu_pools.ultra-1.capacity.reservation"


@pytest.mark.parametrize(
    ("stack", "change", "message", "hint"),
    [
        # single value in affinity and full path
        (
            "prod.us-east5",
            f"{RESERVED}=ultra-east5",
            "not the full path of one reservation",
            "projects/P/reservations/R",
        ),
        ("prod.us-east5", f"{RESERVED}=ultra-east5/reservationBlocks/b", "full path", "projects/P/reservations/R"),
        ("prod.us-east5", f"{RESERVED}=[a, b]", "expected a text", ""),
        # ranges
        ("prod.us-east5", "network.nodes=10.0.0.1/20", "bits set behind its prefix", "write 10.0.0.0/20"),
        ("prod.us-east5", "network.nodes=10.0.0.0", "has no prefix length", "10.0.0.0/32"),
        ("prod.us-east5", "network.nodes=fd00::/64", "is not an IPv4 range", "10.16.0.0/14"),
        # exact versions
        ("prod.us-east5", "cluster.version=latest", "not an exact GKE version", "1.33.5-gke.1080000"),
        ("prod.us-east5", 'cluster.version="1.34"', "not an exact GKE version", "1.33.5-gke.1080000"),
        ("prod.us-east5.platform", "kueue.chart.version=latest", "kueue.chart.version", ""),
        # images
        ("prod.us-east5.platform", "shared.image=a/services:v1", "is not given by digest", "sha256"),
        ("prod.us-east5.platform", "installers.gib_plugin=a/gib:latest", "is not given by digest", "sha256"),
        ("prod.us-east5.platform", "installers.gib_plugin=a/gib", "is not given by digest", "sha256"),
        # names
        ("prod.us-east5", "project=Prod", "is not a project id", "not its number"),
        ("prod.us-east5", f"cluster.name={'c' * 41}", "1 too many (at most 40)", "would do"),
        ("prod.us-east5", f"gpu_pools.ultra-1.name={'p' * 41}", "1 too many (at most 40)", "would do"),
        ("prod.us-east5", "gpu_pools.ultra-1.name=Ultra_1", "is not a name", "ultra-1"),
        ("prod.us-east5", "gpu_pools.ultra-1.name_prefix=ultra", "unknown key", ""),
        ("prod.us-east5", "bucket.name=A", "is not the name of a bucket", "project's id"),
        ("prod.us-east5", "labels={Owner: me}", "would be refused by the cloud", "lower-case"),
        ("prod.us-east5", "cluster.maintenance.window_start=monday", "is not a time in UTC", "2026-11-30T02:00:00Z"),
        ("prod.us-east5", "cluster.maintenance.window_hours=2", "at least 4", ""),
        ("prod.us-east5", "gpu_pools.ultra-1.capacity.max_run=30d", "must be at most 604800", ""),
    ],
)
def test_a_value_that_cannot_be_meant(stack: str, change: str, message: str, hint: str) -> None:
    found = problems_of(stack, change)
    assert len(found) == 1, found
    assert message in found[0].message
    assert hint in found[0].hint


@pytest.mark.parametrize(
    "image",
    [f"a/gib@{DIGEST}", f"a/gib:v1.1.1@{DIGEST}", "a/gib:v1.1.1", "a/gib:1.0.25-gke.6", "localhost/gkr/gib:dev"],
)
def test_images_that_stay_the_same(image: str) -> None:
    assert problems_of("prod.us-east5.platform", f'installers.gib_plugin="{image}"') == []
