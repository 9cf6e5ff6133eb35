"""What the review is made of: reading, folding, the table of fields, counting, masking, gating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pulumi_gcp
import pytest

from infra.policy.resource import Settings
from infra.review import read_preview, review
from infra.review.__main__ import main
from infra.review.affected import affected, waves
from infra.review.capacity import gpus_by_place, nodes
from infra.review.changes import changes, forcing
from infra.review.fields import CLUSTER, NODE_POOL, TABLE, effect_of, replaces
from infra.review.losses import losses
from infra.review.preview import State, urn_parts
from infra.review.secrets import masked, shown
from spec.errors import ConfigError
from tests.builders.previews import POOL, around, digest, replaced, step, ultra_pool, urn
from tests.builders.review_cases import CASES

STACKS = ["dev.global", "dev.us-east4", "dev.us-east4.platform", "local.bed-a", "prod.global", "prod.us-central1",
          "prod.us-central1.platform", "prod.us-east5", "prod.us-east5.platform"]  # fmt: skip


# Fields


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("nodeCount", "in place"),
        ("nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion", "replaces"),
        ("nodeConfig.bootDisk.diskType", "recreates nodes"),
        ("nodeConfig.reservationAffinity.values[0]", "replaces"),
        ("networkConfig.additionalNodeNetworkConfigs[3].subnetwork", "replaces"),
        ("networkConfig.enablePrivateNodes", "in place"),
        ("nodeConfig.imageType", "recreates nodes"),
        ("nodeConfig.gpudirectStrategy", "not applied"),
        ("nodeConfig", None),
        ("nodeConfigs.imageType", None),
        ("somethingNew", None),
    ],
)
def test_the_table_knows_what_a_change_of_a_pool_does(path: str, want: str | None) -> None:
    assert effect_of(NODE_POOL, path) == want


def test_a_longer_entry_wins_and_other_names_are_other_objects() -> None:
    assert replaces("gcp:compute/reservation:Reservation", "specificReservation.instanceProperties.machineType")
    assert not replaces("gcp:compute/reservation:Reservation", "specificReservation.count")
    assert replaces("kubernetes:apps/v1:DaemonSet", "metadata.namespace")
    assert replaces("kubernetes:core/v1:ConfigMap", 'data["facts.json"]')
    assert not replaces("kubernetes:core/v1:ConfigMap", "metadata.labels.a")
    assert not replaces("gcp:unknown:Type", "name")


def _arguments(module: Any, name: str) -> set[str]:
    kind = getattr(module, f"{name}Args")
    return {key for key in dir(kind) if isinstance(getattr(kind, key, None), property)}


def _snake(word: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in word)


@pytest.mark.parametrize(
    ("token", "module", "name"),
    [
        (NODE_POOL, pulumi_gcp.container, "NodePool"),
        (CLUSTER, pulumi_gcp.container, "Cluster"),
        ("gcp:compute/network:Network", pulumi_gcp.compute, "Network"),
        ("gcp:compute/subnetwork:Subnetwork", pulumi_gcp.compute, "Subnetwork"),
        ("gcp:compute/reservation:Reservation", pulumi_gcp.compute, "Reservation"),
        ("gcp:storage/bucket:Bucket", pulumi_gcp.storage, "Bucket"),
        ("gcp:artifactregistry/repository:Repository", pulumi_gcp.artifactregistry, "Repository"),
        ("gcp:kms/cryptoKey:CryptoKey", pulumi_gcp.kms, "CryptoKey"),
        ("gcp:lustre/instance:Instance", pulumi_gcp.lustre, "Instance"),
    ],
)
def test_every_field_of_the_table_is_an_argument_of_the_installed_provider(token: str, module: Any, name: str) -> None:
    known = _arguments(module, name)
    unknown = {path for path in TABLE[token].rows() if _snake(path.split(".")[0]) not in known}
    assert not unknown


def test_every_node_config_field_of_the_table_is_an_argument_of_the_installed_provider() -> None:
    known = _arguments(pulumi_gcp.container, "NodePoolNodeConfig")
    paths = [path.split(".") for path in TABLE[NODE_POOL].rows()]
    unknown = {parts[1] for parts in paths if parts[0] == "nodeConfig" and _snake(parts[1]) not in known}
    assert not unknown


# Reading


def test_a_replacement_in_three_steps_is_one_change() -> None:
    preview = read_preview(digest(replaced(POOL, "ultra-1", old=ultra_pool(), new=ultra_pool(nodes=1), reasons=["x"])))
    assert [one.kind for one in preview.steps] == ["replace"]
    assert preview.steps[0].old is not None
    assert preview.steps[0].new is not None


def test_names_with_colons_and_parents_are_taken_apart() -> None:
    assert urn_parts(urn(POOL, "a::b")) == ("prod.us-east5", POOL, "a::b")


def test_the_engines_own_things_and_components_are_not_counted() -> None:
    preview = read_preview(CASES["new-region"]().text)
    stack = {"op": "create", "urn": "urn:pulumi:prod.us-east5::gkr::gkr:gcp:Cluster::us-east5", "newState": {}}
    more = read_preview(digest([*json.loads(CASES["new-region"]().text)["steps"], stack]))
    counts = review(more, settings=Settings()).counts
    assert counts == review(preview, settings=Settings()).counts == {"create": 6}


@pytest.mark.parametrize("text", ["", "Updating (prod)", "[]", "{}", '{"version": 3}'])
def test_what_is_no_preview_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_preview(text, where="preview.json")
    assert "pulumi preview --json" in raised.value.hint


def test_an_unknown_step_of_a_newer_engine_is_passed_over() -> None:
    preview = read_preview(digest([*around(), {"op": "extend-parameterize", "urn": urn(POOL, "x")}]))
    assert len(preview.steps) == len(around())


# Changes


def test_a_value_known_only_after_the_update_is_no_difference_by_itself() -> None:
    old, new = ultra_pool(), ultra_pool()
    new["cluster"] = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
    preview = read_preview(digest([step("update", POOL, "ultra-1", old=old, new=new)]))
    assert changes(preview.steps[0]) == []


def test_floats_of_the_wire_and_whole_numbers_are_equal() -> None:
    preview = read_preview(
        digest([step("update", POOL, "p", old={"nodeCount": 8.0, "a": 1}, new={"nodeCount": 8, "a": 2.0})])
    )
    assert [str(one) for one in changes(preview.steps[0])] == ["`a` 1 -> 2"]


def test_the_engine_says_which_field_forces_and_other_changes_do_not() -> None:
    old, new = ultra_pool(), ultra_pool(nodes=8, driver="DEFAULT")
    path = "nodeConfig.guestAccelerators[0].gpuDriverInstallationConfig.gpuDriverVersion"
    diff = {"nodeCount": "update", path: "update-replace"}
    steps = replaced(POOL, "ultra-1", old=old, new=new, diff=diff, reasons=["nodeConfig"])
    assert [one.path for one in forcing(read_preview(digest(steps)).steps[0])] == [path]


def test_a_reason_that_no_difference_shows_is_still_named() -> None:
    steps = replaced(POOL, "ultra-1", old=ultra_pool(), new=ultra_pool(), reasons=["provider"])
    assert [one.path for one in forcing(read_preview(digest(steps)).steps[0])] == ["provider"]


# Counting


def test_nodes_count_per_zone_and_an_autoscaler_by_its_most() -> None:
    assert nodes(State({"nodeCount": 3.0, "nodeLocations": ["a", "b", "c"]})) == 9
    assert nodes(State({"nodeCount": 0, "nodeLocations": ["a"]})) == 0
    assert nodes(State({"autoscaling": {"maxNodeCount": 4}, "nodeLocations": ["a", "b"]})) == 8
    assert nodes(State({"autoscaling": {"totalMaxNodeCount": 5, "maxNodeCount": 4}})) == 5


def test_the_total_is_the_same_whatever_the_order_of_the_steps() -> None:
    steps = json.loads(CASES["new-region"]().text)["steps"]
    one, other = gpus_by_place(read_preview(digest(steps))), gpus_by_place(read_preview(digest(steps[::-1])))
    assert list(one) == list(other)
    assert {place: count.after for place, count in one.items()} == {
        place: count.after for place, count in other.items()
    }


def test_a_deleted_reservation_says_how_many_gpus_go() -> None:
    inputs = {"specificReservation": {"count": 64, "instanceProperties": {"machineType": "a3-megagpu-8g"}}}
    preview = read_preview(digest([step("delete", "gcp:compute/reservation:Reservation", "mega", old=inputs)]))
    assert "512 GPUs" in losses(preview)[0].text


# Masking


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("stringData.token", "abc"),
        ("spec.values.redisPassword", "abc"),
        ("data.anything", "abc"),
        ("kubeconfig", "apiVersion: v1"),
        ("spec.template.spec.containers[0].env[3].value", "abc"),
        ("plain", "[secret]"),
        ("plain", {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270", "ciphertext": "v1:abc"}),
    ],
)
def test_a_secret_is_masked_by_its_place_or_its_form(path: str, value: Any) -> None:
    assert shown(value, path=path) == "[secret]"


@pytest.mark.parametrize(
    "secret",
    [
        "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "ya29.a0AfH6SMBx-y_z",
        "hf_ABCDEFGHIJKLMNOPQRSTUVWX",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF-_123",
    ],
)
def test_a_secret_inside_a_text_is_masked(secret: str) -> None:
    assert secret not in masked(f"provider failed: {secret} was refused")
    assert secret not in shown(f"x {secret}", path="metadata.annotations.note")


@pytest.mark.parametrize(
    "text", ["password: hunter2", 'api_key="hunter2"', "REDIS_TOKEN=hunter2", "https://u:hunter2@h/x"]
)
def test_an_assigned_secret_is_masked(text: str) -> None:
    assert "hunter2" not in masked(text)


def test_what_only_names_a_secret_is_shown() -> None:
    assert shown("gkr-redis", path="spec.passwordSecret") == "gkr-redis"
    assert shown(8, path="nodeCount") == "8"


# Which stacks, in which order


def test_a_stack_file_touches_its_stack_and_its_platform() -> None:
    assert affected(["stacks/Pulumi.prod.us-east5.yaml"], stacks=STACKS) == ["prod.us-east5", "prod.us-east5.platform"]
    assert affected(["stacks/Pulumi.prod.us-east5.platform.yaml"], stacks=STACKS) == ["prod.us-east5.platform"]
    assert affected(["stacks/Pulumi.prod.global.yaml"], stacks=STACKS) == ["prod.global"]


def test_code_touches_every_stack_but_the_local_ones_and_texts_touch_none() -> None:
    every = [name for name in STACKS if not name.startswith("local.")]
    for path in ("infra/components/gcp/cluster.py", "spec/machines.py", "requirements/infra.txt", "Pulumi.yaml"):
        assert affected([path], stacks=STACKS) == every
    assert affected(["docs/infrastructure.md", "gkr/main.py", "infrastructure.txt"], stacks=STACKS) == []
    assert affected(["stacks/Pulumi.local.bed-a.yaml"], stacks=STACKS) == []


def test_production_waits_for_the_rest_and_goes_region_by_region() -> None:
    assert waves(STACKS) == {
        "other-global": ["dev.global"],
        "other-regions": ["dev.us-east4"],
        "prod-global": ["prod.global"],
        "prod-first": ["prod.us-central1"],
        "prod-rest": ["prod.us-east5"],
    }
    assert waves(["prod.us-east5.platform"])["prod-first"] == ["prod.us-east5"]


# The command


def test_the_command_prints_the_comment_and_says_whether_the_change_may_land(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["order-of-networks-changed"]().text)
    assert main([str(file)]) == 6
    printed = capsys.readouterr()
    assert printed.out.startswith("<!-- gkr review of prod.us-east5 -->")
    assert "label allow-loss allows it" in printed.err
    assert main([str(file), "--label", "allow-loss"]) == 6
    assert main([str(file), "--label", "allow-loss", "--label", "allow-policy"]) == 0
    assert main([str(file), "--report-only"]) == 0


def test_no_label_lifts_what_could_not_work(tmp_path: Path) -> None:
    file = tmp_path / "preview.json"
    container = {"image": "us-docker.pkg.dev/example/gkr/services@sha256:" + "0" * 64}
    deployment = {"spec": {"template": {"spec": {"containers": [container]}}}}
    file.write_text(digest([step("create", "kubernetes:apps/v1:Deployment", "judge", new=deployment)]))
    assert main([str(file)]) == 0
    assert main([str(file), "--before-up", "--label", "allow-loss", "--label", "allow-policy"]) == 6


def test_no_label_lifts_a_failed_preview(tmp_path: Path) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["failed"]().text)
    assert main([str(file), "--label", "allow-loss", "--label", "allow-policy"]) == 6


WAITS = "error: prod.us-east5: stack prod.us-east5 has no output facts: it was never brought up, or has been taken down"


def failing(*messages: str) -> str:
    """A preview whose program ended with these errors, as the engine writes it."""
    diagnostics = [{"severity": "error", "message": one} for one in messages]
    return json.dumps({"steps": [], "diagnostics": diagnostics, "changeSummary": {}})


def test_a_platform_whose_region_is_not_up_waits_for_it_and_its_pull_request_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new region lands with its two files: the second cannot be previewed before the first is up."""
    file = tmp_path / "preview.json"
    file.write_text(failing(WAITS, WAITS.replace("error:", "error: an unhandled error occurred:"), "preview failed"))
    call = [f"{file}", "--stack", "prod.us-east5.platform", "--engine-code", "255"]
    assert main(call) == 0
    said = capsys.readouterr().out
    assert "prod.us-east5.platform: can be previewed once prod.us-east5 is up" in said
    assert "Blocked" not in said
    assert main([*call, "--before-up"]) == 6
    assert main([*call, "--expect-no-changes"]) == 6


@pytest.mark.parametrize(
    ("stack", "messages"),
    [
        ("prod.us-east5.platform", [WAITS, "error: a chart could not be pulled"]),
        ("prod.us-central1.platform", [WAITS]),
        ("prod.us-east5", [WAITS]),
    ],
)
def test_any_other_error_fails_it(stack: str, messages: list[str], tmp_path: Path) -> None:
    file = tmp_path / "preview.json"
    file.write_text(failing(*messages))
    assert main([f"{file}", "--stack", stack]) == 6


def test_an_engine_that_failed_without_a_word_blocks_the_change(tmp_path: Path) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["no-change"]().text)
    assert main([str(file)]) == 0
    assert main([str(file), "--engine-code", "255"]) == 6


def test_drift_is_any_change_at_all(tmp_path: Path) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["nodes-added"]().text)
    assert main([str(file)]) == 0
    assert main([str(file), "--expect-no-changes"]) == 6
    file.write_text(CASES["no-change"]().text)
    assert main([str(file), "--expect-no-changes"]) == 0


def test_json_carries_the_same_for_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["pool-removed-and-allowed"]().text)
    assert main([str(file), "-o", "json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert found["losses"][0]["gpus"] == 2560
    assert found["gpus"] == [
        {"region": "us-east5", "gpu": "H200", "before": 2560, "after": 0,
         "capacity": "projects/example-gkr-prod/reservations/ultra-east5/reservationBlocks/ultra-east5-block-0001"}
    ]  # fmt: skip


def test_json_says_which_pools_are_drained_and_what_the_rules_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "preview.json"
    file.write_text(CASES["image-type-changed"]().text)
    assert main([str(file), "-o", "json"]) == 6
    restarts = json.loads(capsys.readouterr().out)["restarts"]
    assert restarts == [{"resource": "ultra-1", "gpus": 2560, "fields": ["nodeConfig.imageType"]}]
    file.write_text(CASES["against-policy"]().text)
    assert main([str(file), "-o", "json"]) == 6
    policy = json.loads(capsys.readouterr().out)["policy"]
    assert {"rule", "severity", "resource", "type", "message", "remedy"} == set(policy[0])


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_preview_that_cannot_be_read_is_an_error_of_configuration(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "preview.json"
    if content is not None:
        file.write_text(content)
    assert main([str(file), "--stack", "prod.us-east5"]) == 3
    assert "preview.json" in capsys.readouterr().err
