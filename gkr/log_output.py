"""Prints lines of logs: the same form for files and for pods, filtered by a pattern."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from gkr.cluster.logs import Line
    from gkr.logs import LogFile


@dataclass(frozen=True)
class Printer:
    """Where lines go."""

    as_json: bool = False
    pattern: re.Pattern[str] | None = None

    def file_line(self, log: LogFile, text: str) -> None:
        """A line of a file, which has no time of its own."""
        fields: dict[str, object] = {
            "learner": log.learner,
            "attempt": log.attempt,
            "role": log.role,
            "index": log.index,
        }
        self._print(log.prefix, fields, text)

    def pod_line(self, line: Line) -> None:
        """A line of a pod."""
        source = line.source
        fields: dict[str, object] = {
            "learner": source.learner,
            "attempt": source.attempt,
            "role": source.role,
            "index": source.index,
        }
        self._print(source.prefix, {**fields, "pod": source.pod, "time": line.stamp}, line.text)

    def _print(self, prefix: str, fields: dict[str, object], text: str) -> None:
        if self.pattern is not None and self.pattern.search(text) is None:
            return
        click.echo(json.dumps({**fields, "line": text}, ensure_ascii=False) if self.as_json else f"{prefix} | {text}")
