"""Reading a stack file: errors name file, line, path, value, consequence and remedy."""

from __future__ import annotations

import pytest

from spec.problems import DocumentError, Problem
from spec.stack import load_stack
from tests.builders.stack_files import problems_of, shipped, stack_text

REGION = "prod.us-east5"


def _one(text: str, name: str = REGION) -> Problem:
    with pytest.raises(DocumentError) as caught:
        load_stack(text, name)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value.problems[0]


def _changed(old: str, new: str, name: str = REGION) -> str:
    text = stack_text(name)
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


def test_an_error_names_file_line_path_value_consequence_and_remedy() -> None:
    text = _changed("zone: us-east5-a\n        nodes: 320", "zone: us-east5-b\n        nodes: 320")
    with pytest.raises(DocumentError) as caught:
        load_stack(text, REGION)
    found = next(
        one for one in caught.value.problems if one.path == "gpu_pools[0].zone" and "reservation" in one.message
    )
    line = text[: text.index("zone: us-east5-b\n")].count("\n") + 1
    assert (found.file, found.line) == ("stacks/Pulumi.prod.us-east5.yaml", line)
    assert "us-east5-b" in found.snippet
    assert "it would get no machines" in found.message
    assert found.hint == "write us-east5-a"
    assert found.help.startswith("zone: The one zone of its nodes")


def test_an_unknown_key_is_refused_with_the_near_one() -> None:
    found = _one(_changed("max_unavailable: 20", "max_unavailible: 20"))
    assert found.path == "gpu_pools[0].upgrade.max_unavailible"
    assert found.hint == 'did you mean "max_unavailable"?'


def test_a_driver_must_be_installed() -> None:
    found = _one(_changed("        upgrade: {max_", "        driver: INSTALLATION_DISABLED\n        upgrade: {max_"))
    assert found.path == "gpu_pools[0].driver"
    assert "LATEST, DEFAULT" in found.message
    assert "without which nodes have no GPUs" in found.help


def test_the_driver_is_set_when_nobody_says_so() -> None:
    pools = shipped(REGION).value.gpu_pools  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    assert [one.driver for one in pools] == ["LATEST", "LATEST"]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind: region", "kind: regional", 'there is no kind of stack "regional"'),
        ("    kind: region\n", "", 'missing key "kind"'),
        ("gkr:stack:", "gkr:stock:", "there is no gkr:stack"),
    ],
)
def test_the_kind_is_told_first(old: str, new: str, message: str) -> None:
    assert message in _one(_changed(old, new)).message


def test_the_engines_own_settings_are_let_through_and_others_are_not() -> None:
    text = stack_text(REGION)
    kms = "secretsprovider: gcpkms://projects/example/locations/us/keyRings/gkr/cryptoKeys/pulumi\n"
    assert load_stack(kms + text, REGION).value == shipped(REGION).value
    assert _one("gpu_pools: []\n" + text).path == "gpu_pools"


def test_other_configuration_keys_are_the_engines() -> None:
    line = '  pulumi:disable-default-providers: ["*"]\n'
    text = stack_text(REGION)
    assert load_stack(text.replace(line, ""), REGION).value == shipped(REGION).value
    assert load_stack(text.replace(line, f"{line}  gcp:region: us-east5\n"), REGION).value == shipped(REGION).value


@pytest.mark.parametrize("bad", ["", "config: {}", "config: {gkr:stack: 3}", "- a", "config:\n\tgkr:stack: {}"])
def test_a_file_without_configuration_says_what_to_write(bad: str) -> None:
    assert _one(bad).file == "stacks/Pulumi.prod.us-east5.yaml"


@pytest.mark.parametrize(
    ("stack", "change", "path", "hint"),
    [
        (REGION, "region=us-east4", "region", "write region: us-east5, or rename the file"),
        (REGION, "global_stack=dev.global", "global_stack", "write prod.global"),
        (REGION, "global_stack=prod.us-central1", "global_stack", "write prod.global"),
        ("prod.us-east5.platform", "region_stack=prod.us-central1", "region_stack", "write prod.us-east5"),
        ("prod.us-east5.platform", "region_stack=prod.global", "region_stack", "write prod.us-east5"),
    ],
)
def test_the_stacks_name_says_region_and_what_it_builds_on(stack: str, change: str, path: str, hint: str) -> None:
    assert (path, hint) in [(one.path, one.hint) for one in problems_of(stack, change)]


def test_the_files_name_and_the_kind_agree() -> None:
    found = _one(stack_text("prod.global"), "prod.us-east5")
    assert found.path == "kind"
    assert "by its name a region stack" in found.message


def test_a_name_that_no_stack_can_have() -> None:
    assert "is not the name of a stack" in _one(stack_text(REGION), "us-east5").message


def test_every_defect_is_reported_at_once() -> None:
    found = problems_of(
        REGION,
        "gpu_pools.ultra-1.boot_disk.kind=pd-ssd",
        "gpu_pools.ultra-2.local_ssds=16",
        "cpu_pool.zones=[us-east5-a]",
    )
    assert {one.path for one in found} == {"gpu_pools[0].boot_disk.kind", "gpu_pools[1].local_ssds", "cpu_pool.zones"}
