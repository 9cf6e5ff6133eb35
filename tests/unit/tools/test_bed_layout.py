"""Names and addresses on which all parts of a bed, and two beds, must agree."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from spec.errors import ConfigError
from tools.bed.layout import Bed, bed, beds, state_root


def networks(one: Bed) -> list[ipaddress.IPv4Network]:
    pair = ipaddress.ip_network(f"{one.address}/30", strict=False)
    return [ipaddress.IPv4Network(text) for text in (str(pair), one.pod_range, one.service_range, one.fake_range)]


def test_no_range_of_all_possible_beds_overlaps_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    every: list[Bed] = []
    for first in ("0", "2", "4", "6"):
        monkeypatch.setenv("GKR_BED_FIRST", first)
        every += beds(2, root=tmp_path)
    found = [network for one in every for network in networks(one)]
    assert len(found) == 32
    for index, network in enumerate(found):
        assert not any(network.overlaps(other) for other in found[index + 1 :]), network


def test_addresses_lie_in_their_ranges(tmp_path: Path) -> None:
    for one in beds(2, root=tmp_path):
        pair, pods, services, _ = networks(one)
        assert ipaddress.IPv4Address(one.host_address) in pair.hosts()
        assert ipaddress.IPv4Address(one.address) in pair.hosts()
        assert ipaddress.IPv4Address(one.pod_gateway) in pods
        assert {ipaddress.IPv4Address(one.api_service), ipaddress.IPv4Address(one.dns_service)} <= set(services.hosts())


def test_both_ends_of_a_link_are_in_one_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for first in ("0", "2", "4", "6"):
        monkeypatch.setenv("GKR_BED_FIRST", first)
        ends = [ipaddress.ip_interface(f"{one.link_address}/30") for one in beds(2, root=tmp_path)]
        assert ends[0].network == ends[1].network
        assert {end.ip for end in ends} == set(ends[0].network.hosts())


def test_the_first_region_is_named_as_people_call_it(tmp_path: Path) -> None:
    one, other = beds(2, root=tmp_path)
    assert (one.name, other.name) == ("bed", "bed-1")
    assert (one.region, other.region) == ("bed-a", "bed-b")
    assert one.folder == tmp_path / "0"


def test_device_names_are_short_enough_for_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GKR_BED_FIRST", "6")
    assert len(bed(1, root=tmp_path).host_device) <= 15


def test_a_first_index_that_would_split_a_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GKR_BED_FIRST", "3")
    with pytest.raises(ConfigError, match=r'GKR_BED_FIRST: "3"'):
        bed(0)


def test_the_state_folder_is_the_one_given_else_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GKR_BED", f"{tmp_path}/own")
    assert state_root() == tmp_path / "own"
    monkeypatch.delenv("GKR_BED")
    monkeypatch.setenv("XDG_STATE_HOME", f"{tmp_path}/state")
    assert state_root() == tmp_path / "state" / "gkr" / "bed"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", f"{tmp_path}")
    assert state_root() == tmp_path / ".local" / "state" / "gkr" / "bed"
