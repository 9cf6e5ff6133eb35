"""The clusters that gkr knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gkr.cluster.registry import (
    ClusterEntry,
    add_entry,
    cached_facts,
    config_folder,
    known_names,
    read_registry,
    remove_entry,
    use_entry,
)
from spec.errors import ConfigError, NotFoundError, RefusedError
from tests.builders.cluster_runs import facts

EAST = ClusterEntry("east", "/k/config", "gke-east")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GKR_CONFIG", f"{tmp_path / 'gkr'}")
    return tmp_path / "gkr"


def test_nothing_was_added() -> None:
    assert read_registry().entries == {}
    assert known_names() == []


def test_entry_is_read_back_and_completed(tmp_path: Path) -> None:
    add_entry(EAST, facts=facts(tmp_path))
    assert read_registry().entries == {"east": EAST}
    assert known_names() == ["east"]


def test_adding_does_not_change_where_files_are_launched(tmp_path: Path) -> None:
    add_entry(EAST, facts=facts(tmp_path))
    assert read_registry().default == ""
    assert use_entry("east").default == "east"
    assert use_entry("").default == ""


def test_name_that_is_taken_needs_replace(tmp_path: Path) -> None:
    add_entry(EAST, facts=facts(tmp_path))
    other = ClusterEntry("east", "/k/config", "gke-other")
    with pytest.raises(RefusedError, match="context gke-east"):
        add_entry(other, facts=facts(tmp_path))
    add_entry(EAST, facts=facts(tmp_path))
    assert add_entry(other, facts=facts(tmp_path), replace=True).entries["east"].context == "gke-other"


def test_facts_have_the_name_and_namespace_that_were_chosen_here(tmp_path: Path) -> None:
    entry = ClusterEntry("mine", "/k", "c", namespace="team-a")
    add_entry(entry, facts=facts(tmp_path, name="theirs"))
    found = cached_facts(entry)
    assert (found.name, found.namespaces) == ("mine", ["team-a"])


def test_removed_entry_is_forgotten_and_no_default_any_more(tmp_path: Path) -> None:
    add_entry(EAST, facts=facts(tmp_path))
    use_entry("east")
    assert remove_entry("east").default == ""
    assert known_names() == []
    with pytest.raises(NotFoundError):
        remove_entry("east")


def test_unknown_name_comes_with_the_near_one(tmp_path: Path) -> None:
    add_entry(EAST, facts=facts(tmp_path))
    with pytest.raises(NotFoundError) as caught:
        use_entry("eats")
    assert caught.value.hint == 'did you mean "east"?'


@pytest.mark.parametrize("text", ["[1, 2", "clusters: 3", "clusters: {east: {context: x}}", "just a text"])
def test_damaged_list_is_named(config: Path, text: str) -> None:
    config.mkdir()
    (config / "clusters.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_registry()
    assert caught.value.where == f"{config_folder() / 'clusters.yaml'}"


def test_configuration_folder_that_is_none_is_named(config: Path) -> None:
    config.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_registry()
