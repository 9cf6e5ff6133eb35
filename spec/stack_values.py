"""Values that stack configurations are made of: address ranges, versions, images, paths of reservations, stack names.

Each type refuses what it cannot mean at the place where it was written, with what to write instead. No look-up: whether
a project, an image or a reservation exists is the cloud's to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from spec.names import check_label
from spec.problems import RemedyError

StackKind = Literal["global", "region", "platform"]

GLOBAL = "global"
"""The word that stands in place of the region in the name of a global stack."""
PLATFORM = "platform"
"""Last part of a platform stack's name."""


@dataclass(frozen=True)
class StackName:
    """`prod.global`, `prod.us-east5` or `prod.us-east5.platform`, taken apart."""

    environment: str
    region: str
    """Empty for a global stack."""
    kind: StackKind

    def __str__(self) -> str:
        parts = {
            "global": [self.environment, GLOBAL],
            "region": [self.environment, self.region],
            "platform": [self.environment, self.region, PLATFORM],
        }
        return ".".join(parts[self.kind])


def parse_stack_name(text: str) -> StackName:
    """The parts of a stack's name; a RemedyError says which names there are."""
    parts = text.split(".")
    for one in parts:
        if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one) is None:
            break
    else:
        if len(parts) == 2 and parts[0] not in (GLOBAL, PLATFORM) and parts[1] != PLATFORM:
            is_global = parts[1] == GLOBAL
            return StackName(parts[0], "" if is_global else parts[1], "global" if is_global else "region")
        if len(parts) == 3 and parts[2] == PLATFORM and parts[1] not in (GLOBAL, PLATFORM):
            return StackName(parts[0], parts[1], "platform")
    raise RemedyError(
        f'"{text}" is not the name of a stack', hint="write ENV.global, ENV.REGION or ENV.REGION.platform"
    )


def _check_stack_name(text: str) -> str:
    return str(parse_stack_name(text))


def network_of(text: str) -> IPv4Network:
    """The range that a checked text means."""
    return IPv4Network(text)


def _check_cidr(text: str) -> str:
    try:
        loose = IPv4Network(text, strict=False)
    except ValueError:
        raise RemedyError(f'"{text}" is not an IPv4 range', hint="write for example 10.16.0.0/14") from None
    if "/" not in text:
        raise RemedyError(f'"{text}" has no prefix length', hint=f"write {text}/32 for one address")
    if str(loose) != text:
        raise RemedyError(f'"{text}" has bits set behind its prefix; GKE refuses such a range', hint=f"write {loose}")
    return text


def gke_version(text: str) -> tuple[int, int, int, int]:
    """`1.33.5-gke.1080000` as numbers that compare."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)-gke\.(\d+)", text)
    if match is None:
        raise RemedyError(
            f'"{text}" is not an exact GKE version; anything else would make a preview upgrade every node',
            hint="write it in full, such as 1.33.5-gke.1080000",
        )
    major, minor, patch, build = (int(one) for one in match.groups())
    return major, minor, patch, build


def _check_version(text: str) -> str:
    gke_version(text)
    return text


def _check_project(text: str) -> str:
    if re.fullmatch(r"[a-z][-a-z0-9]{4,28}[a-z0-9]", text) is None:
        raise RemedyError(
            f'"{text}" is not a project id: 6 to 30 lower-case letters, digits and dashes',
            hint="not its number or name",
        )
    return text


_RESERVATION = re.compile(
    r"projects/(?P<project>[a-z][-a-z0-9]{4,28}[a-z0-9])/reservations/(?P<name>[a-z]([-a-z0-9]*[a-z0-9])?)"
    r"(/reservationBlocks/(?P<block>[-a-z0-9]+)(/reservationSubBlocks/(?P<sub_block>[-a-z0-9]+))?)?"
)


@dataclass(frozen=True)
class ReservationPath:
    """Which part of which reservation."""

    project: str
    name: str
    block: str = ""
    sub_block: str = ""

    @property
    def reservation(self) -> str:
        """Path of the whole reservation."""
        return f"projects/{self.project}/reservations/{self.name}"

    def contains(self, other: ReservationPath) -> bool:
        """Whether machines of `other` are machines of this."""
        mine = [part for part in (self.project, self.name, self.block, self.sub_block) if part]
        theirs = [other.project, other.name, other.block, other.sub_block]
        return theirs[: len(mine)] == mine


def parse_reservation(text: str) -> ReservationPath:
    """A full path, taken apart."""
    match = _RESERVATION.fullmatch(text)
    if match is None:
        raise RemedyError(
            f'"{text}" is not the full path of one reservation; a short name is looked up in the wrong project or not'
            " found",
            hint="write projects/P/reservations/R, and /reservationBlocks/B/reservationSubBlocks/S for a part of it",
        )
    return ReservationPath(match["project"], match["name"], match["block"] or "", match["sub_block"] or "")


def _check_reservation(text: str) -> str:
    parse_reservation(text)
    return text


def _check_image(text: str) -> str:
    if re.fullmatch(r"[a-z0-9][-a-z0-9._/:]*@sha256:[0-9a-f]{64}", text) is None and not text.startswith("localhost/"):
        raise RemedyError(
            f'image "{text}" is not given by digest; what a tag names can change under a running fleet',
            hint="write name@sha256:... as the registry shows it",
        )
    return text


def _check_fixed_image(text: str) -> str:
    tag = re.fullmatch(r"[a-z0-9][-a-z0-9._/:]*:v?(?P<version>\d[-.\w]*)(@sha256:[0-9a-f]{64})?", text)
    return text if tag else _check_image(text)


def _check_date_time(text: str) -> str:
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", text) is None:
        raise RemedyError(f'"{text}" is not a time in UTC', hint="write it as 2026-11-30T02:00:00Z")
    return text


def _check_bucket(text: str) -> str:
    if re.fullmatch(r"[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]", text) is None:
        raise RemedyError(
            f'"{text}" is not the name of a bucket: 3 to 63 lower-case letters, digits, dashes and underscores',
            hint="begin with the project's id, since names are shared with the whole world",
        )
    return text


def _text(pattern: str, description: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "description": description})


Cidr = Annotated[str, AfterValidator(_check_cidr), _text(r"^[0-9.]+/[0-9]{1,2}$", "an IPv4 range such as 10.16.0.0/14")]
"""An IPv4 range without bits behind its prefix."""
Version = Annotated[str, AfterValidator(_check_version), _text(r"^\d+\.\d+\.\d+-gke\.\d+$", "an exact GKE version")]
"""`1.33.5-gke.1080000`; never a look-up of the latest."""
ProjectId = Annotated[str, AfterValidator(_check_project), _text(r"^[a-z][-a-z0-9]{4,28}[a-z0-9]$", "a project's id")]
"""Id of a Google Cloud project."""
ReservationText = Annotated[
    str, AfterValidator(_check_reservation), _text(r"^projects/.+/reservations/.+$", "full path of a reservation")
]
"""Full path of a reservation, of one of its blocks or sub-blocks."""
Image = Annotated[str, AfterValidator(_check_image), _text("^.+@sha256:[0-9a-f]{64}$|^localhost/", "image by digest")]
"""Image by digest; `localhost/...` for what a test bed loads by hand."""
FixedImage = Annotated[
    str,
    AfterValidator(_check_fixed_image),
    _text("^.+(@sha256:[0-9a-f]{64}|:v?[0-9].*)$", "image by digest or version"),
]
"""Image of somebody else: by digest, or by a version that its owner does not move."""
UtcTime = Annotated[str, AfterValidator(_check_date_time), _text(r"^\d{4}-.+Z$", "a time in UTC")]
"""`2026-11-30T02:00:00Z`."""
BucketName = Annotated[str, AfterValidator(_check_bucket), _text("^[a-z0-9][-_a-z0-9]{1,61}[a-z0-9]$", "a bucket")]
"""Name of a bucket."""
StackText = Annotated[str, AfterValidator(_check_stack_name), _text(r"^[-a-z0-9]+(\.[-a-z0-9]+){1,2}$", "a stack")]
"""Name of a stack."""
LONGEST_CLOUD_NAME = 40
"""Of a cluster and of a node pool (not verified against the service)."""
CloudName = Annotated[
    str,
    AfterValidator(lambda text: check_label(text, longest=LONGEST_CLOUD_NAME)),
    WithJsonSchema({"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": LONGEST_CLOUD_NAME}),
]
"""Name of a cluster, a pool or a network: always written in full, never a prefix that the cloud completes."""
