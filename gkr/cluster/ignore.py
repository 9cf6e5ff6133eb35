"""What `.gkrignore`, else `.gitignore`, leaves out: git's rules, read from the files themselves.

No git needed, because a folder of experiments is often none. Later rules win over earlier ones, `!` takes back, a slash
at the end means folders only, a slash elsewhere ties a rule to its file's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OWN, _GIT = ".gkrignore", ".gitignore"


@dataclass(frozen=True)
class Rule:
    """One line."""

    pattern: re.Pattern[str]
    takes_back: bool
    folders_only: bool


@dataclass(frozen=True)
class Rules:
    """The rules that hold in a folder: those from above, then its own."""

    file: str
    root: Path
    rules: tuple[Rule, ...] = ()

    def below(self, folder: Path) -> Rules:
        """With the rules of a file deeper down, which hold there only."""
        base = folder.relative_to(self.root).as_posix() if folder != self.root else ""
        text = (folder / self.file).read_text(encoding="utf-8", errors="replace")
        return Rules(self.file, self.root, (*self.rules, *parse(text, base=base)))

    def ignores(self, path: str, *, folder: bool) -> bool:
        """A path relative to the root. Files inside an ignored folder are not asked for."""
        answer = False
        for rule in self.rules:
            if (folder or not rule.folders_only) and rule.pattern.fullmatch(path):
                answer = not rule.takes_back
        return answer


def read_rules(root: Path) -> Rules:
    """The rules of a folder and, as they are met, of those below it."""
    name = _OWN if (root / _OWN).exists() else _GIT
    rules = Rules(name, root)
    return rules.below(root) if (root / name).exists() else rules


def parse(text: str, *, base: str = "") -> list[Rule]:
    """The rules of one file in the folder `base`."""
    found: list[Rule] = []
    for line in text.splitlines():
        rule = line.rstrip("\r")
        rule = rule if rule.endswith("\\ ") else rule.rstrip(" ")
        if not rule or rule.startswith("#"):
            continue
        takes_back = rule.startswith("!")
        rule = rule[1:] if takes_back or rule.startswith(("\\#", "\\!")) else rule
        folders_only = rule.endswith("/")
        rule = rule.rstrip("/")
        tied = "/" in rule
        if rule:
            prefix = f"{re.escape(base)}/" if base else ""
            middle = "" if tied else "(?:.*/)?"
            found.append(Rule(re.compile(prefix + middle + _translate(rule.lstrip("/"))), takes_back, folders_only))
    return found


def _translate(rule: str) -> str:
    """A glob as a regular expression in which `*` and `?` stop at slashes."""
    text, at = "", 0
    while at < len(rule):
        if rule.startswith("**/", at):
            text, at = text + "(?:.*/)?", at + 3
        elif rule.startswith("**", at):
            text, at = text + ".*", at + 2
        elif rule[at] == "*":
            text, at = text + "[^/]*", at + 1
        elif rule[at] == "?":
            text, at = text + "[^/]", at + 1
        elif rule[at] == "[" and (end := rule.find("]", at + 2)) > 0:
            inside = rule[at + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            inside = f"^{inside[1:]}" if inside[0] in "!^" else inside
            text, at = f"{text}[{inside}]", end + 1
        elif rule[at] == "\\" and at + 1 < len(rule):
            text, at = text + re.escape(rule[at + 1]), at + 2
        else:
            text, at = text + re.escape(rule[at]), at + 1
    return text
