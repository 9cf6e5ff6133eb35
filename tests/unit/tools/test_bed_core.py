"""The pure parts of the bed's core: groups, components, settings, refusals, command line."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from spec.errors import EXIT_CONFIG, EXIT_NOT_FOUND, EXIT_REFUSED, ConfigError, RefusedError
from tools.bed import __main__ as cli
from tools.bed import lifecycle, network, node, requirements
from tools.bed.groups import Hierarchy, hierarchies
from tools.bed.holder import last_lines
from tools.bed.layout import Bed, Wanted
from tools.bed.processes import Component

BED = Bed(index=1, folder=Path("/state/1"))

HYBRID = """\
tmpfs /sys/fs/cgroup tmpfs rw,relatime,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,nodev,noexec,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,xattr,release_agent=/usr/lib/agent,name=systemd 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime,nsdelegate 0 0
"""


def test_trees_of_control_groups_are_mounted_again_as_they_were() -> None:
    assert [one.mount for one in hierarchies(HYBRID)] == [
        ["mount", "-t", "cgroup", "-o", "cpu,cpuacct", "cgroup", "/sys/fs/cgroup/cpu,cpuacct"],
        ["mount", "-t", "cgroup", "-o", "none,name=systemd", "cgroup", "/sys/fs/cgroup/systemd"],
        ["mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup/unified"],
    ]


def test_version_two_is_one_tree() -> None:
    text = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate,memory_recursiveprot 0 0\n"
    assert hierarchies(text) == [Hierarchy(Path("/sys/fs/cgroup"), "cgroup2")]


def component(**changes: object) -> Component:
    return replace(Component("etcd", ("/bin/etcd", "--one"), ready=lambda: ""), **changes)


def test_what_decides_a_component_decides_its_mark(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("one")
    marks = {
        component().mark,
        component(command=("/bin/etcd", "--two")).mark,
        component(environment={"A": "1"}).mark,
        component(inputs=(file,)).mark,
    }
    file.write_text("two")
    marks.add(component(inputs=(file,)).mark)
    assert len(marks) == 5
    assert all(mark.startswith("etcd:") for mark in marks)
    assert component().mark == component(deadline_seconds=5.0).mark


def test_the_end_of_a_log_is_short_in_both_directions() -> None:
    shown = last_lines("\n".join([*(f"line {number}" for number in range(40)), "", "x" * 1000]), count=3, width=20)
    assert shown == f"\n    line 38\n    line 39\n    {'x' * 20} ..."


def test_containerd_reads_the_settings_that_this_machine_needs() -> None:
    settings = tomllib.loads(node.containerd_settings(BED))
    cri = settings["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is True
    assert settings["root"] == "/state/1/containerd"
    assert len(settings["grpc"]["address"]) < 108
    assert cri["containerd"]["runtimes"]["runc"]["options"] == {"SystemdCgroup": False}


def test_pods_get_addresses_of_their_region_and_kubelet_its_name_server() -> None:
    bridge, ports = node.network_settings(BED)["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "172.30.1.0/24", "gateway": "172.30.1.1"}]]
    assert bridge["hairpinMode"] is True
    assert ports["capabilities"] == {"portMappings": True}
    assert node.kubelet_settings(BED)["clusterDNS"] == ["10.97.0.10"]
    assert node.kubelet_settings(BED)["localStorageCapacityIsolation"] is True
    json.dumps(node.kubelet_settings(BED))


def test_cluster_addresses_have_a_route_before_anything_starts() -> None:
    lines = network.inner_lines(BED)
    assert "route replace 10.97.0.0/16 dev bed0 src 172.30.1.1" in lines
    assert "route replace unreachable 10.211.0.0/16" in lines
    assert not any("default" in line for line in lines)


def test_the_last_rule_refuses_whatever_the_rules_before_it_accept() -> None:
    table, chain, *rule = network.REFUSALS[-1]
    assert (table, chain, rule[-1]) == ("mangle", "POSTROUTING", "DROP")


@pytest.mark.parametrize(("platform", "user"), [("darwin", 0), ("linux", 1000)])
def test_a_refusal_names_both_ways_out(platform: str, user: int) -> None:
    with pytest.raises(RefusedError) as caught:
        requirements.check(platform=platform, user=user)
    assert "kind" in caught.value.hint
    assert "KUBECONFIG" in caught.value.hint
    assert caught.value.exit_code == EXIT_REFUSED


def test_missing_programs_become_packages_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirements, "SYSTEM_PATH", "")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert requirements.missing_packages(["ip", "tc", "wget"]) == ["iproute2", "wget"]


def test_what_is_not_given_stays_as_it_is() -> None:
    before = Wanted(fake={"a3-ultra": 4}, gpus=8, regions=2)
    parse = cli.parser().parse_args
    assert cli.wanted(parse(["up"]), before=before) == before
    assert cli.wanted(parse(["up", "--fake", ""]), before=before) == replace(before, fake={})
    assert cli.wanted(parse(["up", "--regions", "1", "--gpus", "0"]), before=before) == replace(
        before, gpus=0, regions=1
    )


def test_a_cluster_for_stacks_gets_its_gpu_nodes_from_them() -> None:
    before = Wanted(fake={"a3-ultra": 4}, gpus=8, regions=2)
    parse = cli.parser().parse_args
    stacks = cli.wanted(parse(["up", "--for", "stacks"]), before=before)
    assert stacks == Wanted(regions=2, for_stacks=True)
    assert cli.wanted(parse(["up"]), before=stacks) == stacks
    assert cli.wanted(parse(["up", "--for", "experiments"]), before=stacks) == Wanted(regions=2)
    for more in (["--fake", "a3-ultra=4"], ["--gpus", "8"]):
        with pytest.raises(ConfigError, match="come from the stacks' pools"):
            cli.wanted(parse(["up", *more]), before=stacks)


def test_a_cluster_that_is_up_for_one_use_is_refused_to_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GKR_BED", f"{tmp_path}")
    monkeypatch.setattr(lifecycle, "holder", str)
    lifecycle.remember(Wanted(for_stacks=True))
    lifecycle.check_use(Wanted(for_stacks=True))
    with pytest.raises(RefusedError, match="brought up for stacks") as refused:
        lifecycle.check_use(Wanted())
    assert "make cluster FOR=experiments" in refused.value.hint


def test_errors_end_with_the_codes_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GKR_BED", f"{tmp_path}")
    monkeypatch.setenv("GKR_BED_FIRST", "6")
    assert cli.main(["up", "--fake", "nonsense"]) == EXIT_CONFIG
    assert cli.main(["kubeconfig"]) == EXIT_NOT_FOUND
    assert cli.main(["logs", "etcd"]) == EXIT_NOT_FOUND
    said = capsys.readouterr()
    assert said.out == ""
    assert "make cluster" in said.err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["up", "--regions", "9"])
