"""Commands that the guide and the runbooks tell a person to type exist, with the options and variables they are given.

Nothing is run: whether Google's own commands do what is said is for docs/runbooks/first-real-up.md.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from gkr.main import cli
from infra.components.gcp.identity import PREVIEWER_ROLES
from infra.policy.__main__ import main as policy_main
from tests.builders.stack_files import ROOT

PAGES = [ROOT / "docs" / "infrastructure.md", *sorted((ROOT / "docs" / "runbooks").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(page: Path, program: str) -> list[list[str]]:
    """Words of every command of a program, in blocks and in text."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    found = [shlex.split(line, comments=True) for line in lines if re.match(rf"\s*(?:[A-Z_]+=\S* )*{program} ", line)]
    return [words[words.index(program) + 1 :] for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_make_target_takes_the_variables_that_it_is_given(page: Path) -> None:
    for target, *variables in commands(page, "make"):
        recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
        assert recipe, f"make {target}"
        for one in variables:
            assert f"$({one.partition('=')[0]})" in recipe[1], f"make {target} {one}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_gkr_has_the_options_that_it_is_given(page: Path) -> None:
    for words in commands(page, "gkr"):
        command: click.Command = cli
        context = click.Context(cli)
        while isinstance(command, click.Group) and words:
            name, *words = words
            inner = command.get_command(context, name)
            assert inner is not None, f"gkr {name}"
            command = inner
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= options, f"{command.name}: {given - options}"


def test_the_pages_have_commands_to_check() -> None:
    assert len([one for page in PAGES for one in commands(page, "make")]) > 20
    assert len([one for page in PAGES for one in commands(page, "gkr")]) > 15


def test_the_previewers_roles_are_the_ones_that_the_guide_grants_by_hand() -> None:
    row = re.search(r"`\$P` \| (`roles/viewer`.*) \|", PAGES[0].read_text(encoding="utf-8"))
    assert row
    assert set(re.findall(r"roles/[\w.]+", row[1])) == set(PREVIEWER_ROLES)


def test_the_commands_that_grant_roles_are_those_of_the_table() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    for account in ("preview", "deploy"):
        rows = re.search(rf"^\| `gkr-{account}` \|.*\n(?:\| \|.*\n)*", text, re.MULTILINE)
        assert rows
        table = set(re.findall(r"roles/([\w.]+)", rows[0]))
        lines = text.replace("\\\n", " ").splitlines()
        granted = {role for line in lines for role in _words(line, "grant", account)}
        bucket, key = next(found for line in lines if (found := _words(line, "state", account)))
        granted |= {f"storage.{bucket}", f"cloudkms.{key}"}
        bound = rf"billing accounts.*account {account}\) --role=roles/([\w.]+)"
        granted.update(match[1] for line in lines if (match := re.search(bound, line)))
        assert granted == table


def _words(line: str, command: str, account: str) -> list[str]:
    """What a command of the guide's own is given for an account."""
    words = line.split()
    return words[2:] if words[:2] == [command, account] else []


def test_the_rules_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "python -m infra.policy --list" in PAGES[0].read_text(encoding="utf-8")
    assert policy_main(["--list"]) == 0
    assert "gpu-capacity" in capsys.readouterr().out
