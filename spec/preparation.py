"""What a person asks of the preparation of a dataset of images, and what it and its inspection tell.

`services.prepare` works by these documents; `gkr data` passes the rules on, reads one JSON line per record from it, and
shows the results. The rules are part of
a dataset's recipe: equal sources and equal rules give equal bytes. Nothing here reads or writes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spec.base import Document, Record
from spec.units import ByteSize, parse_bytes

EXAMPLES = 5
"""Places that a report names for each reason."""


class PrepareRules(Document):
    """What is kept, and in which form."""

    min_side: int = Field(default=1, ge=1, le=65535)
    """Pixels that the shorter side of an image must have."""
    max_aspect: float = Field(default=16.0, ge=1)
    """Largest ratio of the longer side to the shorter one."""
    duplicates: Literal["keep", "exact", "near"] = "exact"
    """`exact` drops images with the pixels of an earlier one; `near` also those that look like one."""
    near_bits: int = Field(default=3, ge=0, le=7)
    """With `near`: how many of the 64 bits of the difference hash may differ."""
    need_caption: bool = False
    """Drop images without a caption."""
    labels: Literal["found", "folders"] = "found"
    """Where labels come from: the field `label` beside an image, or the name of the folder it lies in."""
    held_out: float = Field(default=0.01, ge=0, lt=1)
    """Share of the images that is not trained on, chosen by their pixels."""
    shard_bytes: ByteSize = Field(default=parse_bytes("256Mi"), ge=1)
    """A shard is closed when it has so many bytes."""
    embed: Literal["none", "captions"] = "none"
    """What the encoding service computes ahead from texts."""
    latents: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")
    """WIDTHxHEIGHT, such as 512x512: each image is brought to this size, and an autoencoder's latents are computed."""

    @property
    def latent_size(self) -> tuple[int, int] | None:
        """(width, height)"""
        if self.latents is None:
            return None
        width, _, height = self.latents.partition("x")
        return int(width), int(height)


class PrepareProgress(Record):
    """How far a preparation is."""

    kind: Literal["progress"] = "progress"
    files: int
    """Files of the source that were begun."""
    files_total: int
    found: int
    """Images, and places where there should have been one."""
    kept: int
    dropped: int


class PrepareReport(Record):
    """What became of a source."""

    kind: Literal["report"] = "report"
    version: Literal[1] = 1
    source: str
    manifest: str
    """Where the dataset is."""
    digest: str = ""
    """Of the manifest; empty while there is none."""
    recipe: str = ""
    done: bool
    """False: more is to be done; ask again."""
    reused: bool = False
    """The dataset was there already."""
    dry_run: bool = False
    found: int
    train: int
    test: int
    captions: int = 0
    """Kept images that have one."""
    bytes: int
    """Of the shards."""
    dropped: dict[str, int] = {}
    """Reason to count."""
    examples: dict[str, list[str]] = {}
    """Reason to the first places."""
    encoders: dict[str, str] = {}
    """Name of a feature to the fingerprint of what computed it."""


class PrepareError(Record):
    """Why there is no result: the fields of a `GkrError`."""

    kind: Literal["error"] = "error"
    message: str
    hint: str = ""
    where: str = ""
    exit_code: int


class Spread(Record):
    """Of a set of numbers."""

    least: float
    median: float
    most: float


class AspectBin(Record):
    """Images whose width over height lies in a range."""

    least: float
    below: float | None
    """None: no bound."""
    count: int

    @property
    def words(self) -> str:
        """The range."""
        return f"{self.least:.2f} and more" if self.below is None else f"{self.least:.2f} to {self.below:.2f}"


class FeatureSeen(Record):
    """What was found in values that an encoder computed."""

    name: str
    encoder: str
    shape: list[int]
    looked_at: int
    not_finite: int
    """Values with a NaN or infinity."""
    norm: Spread


class Inspection(Record):
    """What a dataset consists of, as `gkr data inspect` found it."""

    kind: Literal["inspection"] = "inspection"
    version: Literal[1] = 1
    manifest: str
    name: str
    digest: str
    format: Literal["raw", "tar"]
    source: str
    recipe: str
    train: int
    test: int
    shards: int
    bytes: int
    labels: list[str]
    width: Spread
    """Of all images, or of four million that are evenly spread; `height` and `aspects` likewise."""
    height: Spread
    aspects: list[AspectBin]
    looked_at: int
    """Images that were decoded: evenly spread over the dataset. The fields below are about these."""
    damaged: int
    duplicates: int
    """With the pixels of another one."""
    near_duplicates: int
    """That look like another one, among the first 20,000."""
    captions: int
    caption_characters: Spread
    features: list[FeatureSeen] = []
    sheet: str = ""
    """Path of the page with the contact sheet."""


Line = Annotated[PrepareProgress | PrepareReport | PrepareError | Inspection, Field(discriminator="kind")]
"""What the processes of `gkr data` print."""


def facts_of(one: Inspection) -> list[tuple[str, str]]:
    """An inspection in words: name and value."""

    def share(count: int) -> str:
        return f"{count} ({100 * count / max(1, one.looked_at):.1f} %)"

    more = f" and {len(one.labels) - 20} more" if len(one.labels) > 20 else ""
    characters = one.caption_characters
    rows = [
        ("manifest", one.manifest),
        ("digest", one.digest),
        ("source", one.source),
        ("recipe", one.recipe),
        ("samples", f"{one.train} to train on, {one.test} held out"),
        ("files", f"{one.shards} shards of format {one.format}, {one.bytes / 2**20:.1f} MiB"),
        ("width", _words(one.width)),
        ("height", _words(one.height)),
        ("labels", ", ".join(one.labels[:20]) + more or "none"),
        ("looked at", f"{one.looked_at}, of which damaged {share(one.damaged)}"),
        ("duplicates", f"{share(one.duplicates)} with equal pixels, {share(one.near_duplicates)} that look alike"),
        ("captions", f"{share(one.captions)}, characters: {_words(characters)}"),
    ]
    return rows + [
        (
            feature.name,
            f"shape {feature.shape} by encoder {feature.encoder[:16]}, lengths {_words(feature.norm)}, "
            f"{feature.not_finite} of {feature.looked_at} not finite",
        )
        for feature in one.features
    ]


def _words(spread: Spread) -> str:
    return f"{spread.least:.4g} to {spread.most:.4g}, median {spread.median:.4g}"
