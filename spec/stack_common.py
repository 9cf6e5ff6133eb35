"""What several kinds of stack say: buckets, registries, and the base of all kinds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spec.base import Document
from spec.problems import RemedyError
from spec.stack_values import BucketName, CloudName, ProjectId
from spec.units import Seconds


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-_")
        if (
            not key
            or not key[0].isalpha()
            or set(key) - allowed
            or set(value) - allowed
            or max(len(key), len(value)) > 63
        ):
            raise RemedyError(
                f"label {key}: {value} would be refused by the cloud",
                hint="use at most 63 lower-case letters, digits, dashes and underscores; a key begins with a letter",
            )
    return labels


Labels = Annotated[dict[str, str], AfterValidator(_check_labels)]
"""Resource labels, in Google Cloud's narrow set of characters."""


class Bucket(Document):
    """A bucket."""

    name: BucketName
    """Its name, shared with the whole world."""
    location: str = ""
    """Region, dual-region or multi-region; default: the stack's region."""
    data_locations: list[str] = Field(default=[], max_length=2)
    """The two regions of a dual-region bucket, or the zone of a zonal one."""
    storage_class: Literal["STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "RAPID"] = "STANDARD"
    """Class of new objects; RAPID is zonal and needs hierarchical_namespace."""
    hierarchical_namespace: bool = True
    """Folders with an atomic rename; can be chosen only when the bucket is made."""
    soft_delete: Seconds = 0.0
    """How long deleted objects are kept and paid for. Checkpoints churn, so nothing by default."""
    versioning: bool = False
    """Keep overwritten objects."""
    delete_after_days: int | None = Field(default=None, ge=1)
    """Age at which objects below `delete_below` are deleted; default: never."""
    delete_below: list[str] = ["runs/"]
    """Prefixes of what is deleted at that age: a dataset in the same bucket is older and stays. Empty: everything."""
    uri: str = ""
    """Where it is reached when that is not gs://NAME, such as s3://gkr on a test bed."""

    @property
    def address(self) -> str:
        """URI without a slash at the end."""
        return (self.uri or f"gs://{self.name}").rstrip("/")


class Registry(Document):
    """A repository of container images."""

    name: CloudName
    """Repository id."""
    location: str = ""
    """Region or multi-region; default: the stack's region, so that image streaming pulls locally."""
    mirror_of: str = ""
    """Host of an outside registry whose images it fetches and keeps; empty: it holds our own."""
    keep_versions: int = Field(default=50, ge=1)
    """Newest versions of an image that cleaning leaves."""
    uri: str = ""
    """Prefix of images when that is not LOCATION-docker.pkg.dev/PROJECT/NAME, such as localhost/gkr on a test bed."""


class StackBase(Document):
    """What every stack says."""

    project: ProjectId
    """Google Cloud project that the stack's resources are in."""
    labels: Labels = {}
    """Labels of every resource, beside those that the program sets."""
    protect: bool = True
    """Refuse to delete or replace what holds data, machines or addresses. Off only where nothing would be lost."""
