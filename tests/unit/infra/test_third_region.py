"""A region is added by its two stack files, as docs/infrastructure.md says: nothing else in the repository changes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from infra.engine.targets import below, load, members, shipped
from infra.policy import Resource, check
from infra.policy.stacks import settings_for
from infra.programs import program
from infra.review.affected import affected, waves
from spec.problems import DocumentError
from spec.stack import stack_file
from tests.builders.recorded_clouds import ANSWERS, global_outputs
from tests.builders.recorded_stack import RecordedStack, record
from tests.builders.stack_files import NAMES, ROOT

NEW = "prod.europe-west4"
GUIDE = (ROOT / "docs" / "infrastructure.md").read_text(encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The stack files, with those of a third region of production, written by the guide's own commands."""
    shutil.copytree(ROOT / "stacks", tmp_path / "stacks")
    block = GUIDE.partition("## Adding a region")[2].split("```")[1]
    script, last = block.strip().rsplit("\n", 1)
    assert last == f"make preview STACK={NEW} CLOUD=double"
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def declared(root: Path) -> tuple[RecordedStack, RecordedStack]:
    """The new region and its platform."""
    region = record(
        program(NEW, load(NEW, root=root).value), stack=NEW, answers=ANSWERS,
        references={"prod.global": global_outputs("prod.global")},
    )  # fmt: skip
    name = f"{NEW}.platform"
    platform = record(program(name, load(name, root=root).value), stack=name, references={NEW: region.outputs})
    return region, platform


def test_its_two_files_are_checked_with_all_others_and_declare_a_whole_region(root: Path) -> None:
    region, platform = declared(root)
    assert region.outputs["facts"]["name"] == platform.outputs["facts"]["name"] == "europe-west4"
    pools = {one.name: one.inputs for one in region.of("gcp:container/nodePool:NodePool")}
    assert set(pools) == {"cpu", "ultra-1", "ultra-2"}
    assert pools["ultra-1"]["nodeLocations"] == ["europe-west4-a"]
    assert (
        region.one("gcp:compute/network:Network", "rdma").inputs["networkProfile"].endswith("europe-west4-a-vpc-roce")
    )
    for name, recorded in ((NEW, region), (f"{NEW}.platform", platform)):
        resources = [Resource(one.type, one.name, one.inputs, one.protect) for one in recorded.resources if one.custom]
        found = check(resources, settings=settings_for(name, stacks=shipped(root)))
        assert [str(one) for one in found if one.severity == "refuse"] == []


def test_a_pull_request_with_the_two_files_touches_the_new_stacks_alone(root: Path) -> None:
    names = shipped(root)
    assert sorted(set(names) - set(NAMES)) == [NEW, f"{NEW}.platform"]
    for name in NAMES:
        assert (root / stack_file(name)).read_bytes() == (ROOT / stack_file(name)).read_bytes()
    paths = [f"stacks/Pulumi.{NEW}.yaml", f"stacks/Pulumi.{NEW}.platform.yaml"]
    found = affected(paths, stacks=names)
    assert found == [NEW, f"{NEW}.platform"] == members(NEW, known=names)
    assert [one for one in waves(found).values() if one] == [[NEW]]
    assert below(load(f"{NEW}.platform", root=root).value, root=root) == ["prod.global", NEW]


def test_a_copy_that_keeps_an_address_range_is_refused_at_its_line(root: Path) -> None:
    path = root / "stacks" / f"Pulumi.{NEW}.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("10.72.0.0/14", "10.64.0.0/14"), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"(?s)10\.64\.0\.0/14 overlaps 10\.64\.0\.0/14 of prod\.") as refused:
        load(NEW, root=root)
    assert "Pulumi.prod.us-east5.yaml" in str(refused.value)
