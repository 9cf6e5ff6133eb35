"""The docstrings of Python's own standard library, as text for a language model: they lie on every machine we run on.

Each docstring is taken once, in the order of file and place. All of them, separated by an empty line, are cut into
windows of CONTEXT + 1 bytes that share one byte with their neighbour, so that every byte but the first is predicted
once. Most docstrings are shorter than a window, so what is held out are runs of RUN windows, by a hash of their number:
only the ends of a run lie beside training text. Another version of Python is another dataset; the recipe names it.
Tests are left out, and packages that are programs of their own.
"""

from __future__ import annotations

import ast
import platform
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from services.prepare.packing import Samples
from spec.errors import ConfigError
from spec.shards import Sample, Shape

NAME = "docstrings"
CONTEXT = 64
SHAPE = Shape(1, CONTEXT + 1, 1)
LABELS = ("text",)
RECIPE = (
    f"docstrings/1: Python {platform.python_version()}, windows of {SHAPE.width} bytes, a sixteenth held out by runs"
)
RUN = 16
_HELD_OUT_SHARE = 16
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "ensurepip")
)
_LEAST_BYTES = 500_000


def load() -> Samples:
    """Read, parse and cut: a few seconds."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n\n".join(dict.fromkeys(_docstrings(folder))).encode()
    if len(text) < _LEAST_BYTES:
        raise ConfigError(
            f"the standard library in {folder} has only {len(text)} bytes of docstrings: its sources are not installed",
            hint="use a Python whose standard library comes as .py files, or another data.source",
        )
    return split(text)


def split(text: bytes) -> Samples:
    """All whole windows of a text, in order."""
    train: list[Sample] = []
    test: list[Sample] = []
    for number in range((len(text) - 1) // CONTEXT):
        window = text[number * CONTEXT : number * CONTEXT + SHAPE.width]
        sample = Sample(id=number, label=0, caption="", pixels=window)
        (test if _is_held_out(number // RUN) else train).append(sample)
    return Samples(train=train, test=test)


def _is_held_out(run: int) -> bool:
    return blake2b(f"held-out/1\0{run}".encode(), digest_size=1).digest()[0] % _HELD_OUT_SHARE == 0


def _docstrings(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node)
                    if text:
                        yield text
