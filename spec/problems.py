"""What is wrong with a document, as data.

A `Problem` has a place; an error that carries problems prints all of them at once, so that a person mends a file in one
go. Nothing here reads files: the source lines are handed in.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from spec.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing to mend. `line` and `column` count from 1; 0 means the place is not in a file (a `--set` flag, an empty
    file).
    """

    file: str
    line: int
    column: int
    path: str
    """Where in the document, such as learners[0].groups[0].nodes."""
    message: str
    hint: str = ""
    """The remedy."""
    help: str = ""
    """What the field means."""
    snippet: str = ""
    """The source line and a caret under the place."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        lines = [f"{place}: error: {self.message}"]
        if self.snippet:
            lines.append(self.snippet)
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | int]:
        """For `-o json`."""
        return asdict(self)


class DocumentError(ConfigError):
    """A document cannot be accepted; every reason is in `problems`, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(one) for one in self.problems))


class RemedyError(ValueError):
    """Raised by a field's validator that knows the remedy; the reader prints it as the hint."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


_WIDEST = 120
"""Characters of a source line that are shown; of a longer one, those around the place."""


def snippet(lines: Sequence[str], *, line: int, column: int, width: int) -> str:
    """The source line with its number and a caret line under it; empty when there is no such line."""
    if not 1 <= line <= len(lines):
        return ""
    text = lines[line - 1].replace("\t", " ").rstrip()
    start = min(column, len(text) + 1) - 1
    if len(text) > _WIDEST:
        left = max(0, min(start - _WIDEST // 2, len(text) - _WIDEST))
        before, after = "..." * (left > 0), "..." * (left + _WIDEST < len(text))
        text, start = f"{before}{text[left : left + _WIDEST]}{after}", start - left + len(before)
    marks = "^" * max(1, min(width, len(text) - start))
    return f"{line:>4} | {text}\n     | {' ' * start}{marks}"


def near(word: str, candidates: Iterable[str], *, aliases: Mapping[str, str] | None = None) -> str:
    """The candidate that was probably meant, or an empty text. Other tools' words for the same thing count as
    candidates.
    """
    known = list(candidates)
    spelled = {one.lower(): one for one in known}
    spelled.update({alias: target for alias, target in (aliases or {}).items() if target in known})
    if word.lower() in spelled:
        return spelled[word.lower()]
    found = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else ""


def did_you_mean(
    word: str, candidates: Iterable[str], *, aliases: Mapping[str, str] | None = None, noun: str = "known"
) -> str:
    """A hint: the near word, or the list of all when none is near."""
    known = sorted(candidates)
    guess = near(word, known, aliases=aliases)
    if guess:
        return f'did you mean "{guess}"?'
    return f"{noun}: {', '.join(known)}" if known else ""
