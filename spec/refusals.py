"""Why an experiment cannot run as written, by path; `spec.document` turns paths into file and line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spec.document import Located, M
from spec.errors import ConfigError
from spec.nodes import Path, render_path
from spec.problems import DocumentError, Problem


@dataclass(frozen=True)
class Refusal:
    """One reason."""

    path: Path
    """The value to change."""
    message: str
    hint: str = ""
    also: tuple[Path, ...] = ()
    """Other values that take part in it."""
    key: bool = False
    """Point to the key rather than to its value."""

    def __str__(self) -> str:
        others = f"; see also {', '.join(render_path(one) for one in self.also)}" if self.also else ""
        remedy = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{render_path(self.path) or 'experiment'}: error: {self.message}{others}{remedy}"


class ResolveError(ConfigError):
    """An experiment was refused; all reasons are in `refusals`."""

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals: tuple[Refusal, ...] = tuple(dict.fromkeys(refusals))
        super().__init__("\n".join(str(one) for one in self.refusals))

    def locate(self, document: Located[M]) -> DocumentError:
        """The same reasons with file, line and column."""
        problems = [_located(one, document) for one in self.refusals]
        return DocumentError(sorted(problems, key=lambda one: (one.file, one.line, one.column)))


def _located(refusal: Refusal, document: Located[M]) -> Problem:
    message = f"{render_path(refusal.path)}: {refusal.message}" if refusal.path else refusal.message
    if refusal.also:
        message += f"; see also {', '.join(document.where(one) for one in refusal.also)}"
    return document.problem(refusal.path, message, hint=refusal.hint, key=refusal.key)
