"""A contact sheet: pictures of a dataset side by side with their captions, as a PNG and as a page that stands alone."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spec.preparation import Inspection, facts_of

TILE = 160
"""Pixels of a tile's side; a picture keeps its aspect."""
COLUMNS = 10
_CAPTION_LINES = 2
_LINE = 13
_GAP = 8
_PAPER, _INK, _MAT = (255, 255, 255), (60, 60, 60), (240, 240, 240)


@dataclass(frozen=True)
class Tile:
    """One picture, small."""

    image: Any
    number: int
    size: str
    caption: str
    label: str

    @classmethod
    def of(cls, pixels: NDArray[np.uint8], *, number: int, caption: str, label: str) -> Self:
        """From pixels [height, width, 3]. Tiny pictures are enlarged without smoothing."""
        picture = Image.fromarray(pixels)
        factor = TILE / max(picture.size)
        size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
        way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        return cls(picture.resize(size, way), number, f"{picture.width} x {picture.height}", caption, label)


def draw_sheet(tiles: Sequence[Tile]) -> Any:
    """All tiles as one image, row by row."""
    columns = min(COLUMNS, max(1, len(tiles)))
    rows = -(-len(tiles) // columns) or 1
    high = TILE + (1 + _CAPTION_LINES) * _LINE + _GAP
    sheet = Image.new("RGB", (columns * (TILE + _GAP) + _GAP, rows * high + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(11)
    for place, tile in enumerate(tiles):
        left, top = _GAP + place % columns * (TILE + _GAP), _GAP + place // columns * high
        draw.rectangle((left, top, left + TILE - 1, top + TILE - 1), fill=_MAT)
        sheet.paste(tile.image, (left + (TILE - tile.image.width) // 2, top + (TILE - tile.image.height) // 2))
        said = [f"#{tile.number}  {tile.size}", *_wrapped(tile.caption or tile.label, draw, font)]
        for number, line in enumerate(said):
            draw.text((left, top + TILE + 1 + number * _LINE), line, fill=_INK, font=font)
    return sheet


def write_page(folder: Path, *, inspection: Inspection, sheet: Any) -> None:
    """`sheet.png` and `index.html`, the picture inside it."""
    file = io.BytesIO()
    sheet.save(file, format="PNG")
    (folder / "sheet.png").write_bytes(file.getvalue())
    picture = base64.b64encode(file.getvalue()).decode()
    (folder / "index.html").write_text(_page(inspection, picture=picture), encoding="utf-8")


def _page(one: Inspection, *, picture: str) -> str:
    most = max((part.count for part in one.aspects), default=0) or 1
    bars = "".join(
        f"<tr><td>{part.words}</td><td>{part.count}</td>"
        f'<td><div class="bar" style="width:{300 * part.count // most}px"></div></td></tr>'
        for part in one.aspects
        if part.count
    )
    facts = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in facts_of(one)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(one.name)}</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; color: #333; margin: 2em; max-width: 1720px }}
table {{ border-collapse: collapse; margin: 1em 0 }} td {{ padding: 2px 16px 2px 0; vertical-align: top }}
td:first-child {{ color: #777; white-space: nowrap }} .bar {{ background: #4c78a8; height: 12px; margin-top: 5px }}
img {{ max-width: 100% }} td {{ overflow-wrap: anywhere }}
</style></head><body>
<h1>{html.escape(one.name)}</h1>
<table>{facts}</table>
<h2>Width over height</h2>
<table>{bars}</table>
<h2>Pictures</h2>
<img alt="pictures of the dataset, evenly spread" src="data:image/png;base64,{picture}">
</body></html>
"""


def _wrapped(words: str, draw: Any, font: Any) -> list[str]:
    """The first lines of a caption, each as long as a tile is wide."""
    lines: list[str] = []
    rest = " ".join(words.split())
    while rest and len(lines) < _CAPTION_LINES:
        line = rest
        while draw.textlength(line, font=font) > TILE:
            head, _, _ = line.rpartition(" ")
            line = head or line[:-1]
        lines.append(line)
        rest = rest[len(line) :].lstrip()
    return lines
