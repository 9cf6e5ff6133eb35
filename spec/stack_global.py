"""Configuration of a global stack: what an environment has once, whatever its regions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Document
from spec.stack_common import Bucket, Registry, StackBase
from spec.stack_values import Cidr, CloudName

APIS = (
    "artifactregistry.googleapis.com", "billingbudgets.googleapis.com", "cloudkms.googleapis.com",
    "cloudresourcemanager.googleapis.com", "compute.googleapis.com", "container.googleapis.com",
    "containerfilesystem.googleapis.com", "file.googleapis.com", "gkehub.googleapis.com", "iam.googleapis.com",
    "iamcredentials.googleapis.com", "logging.googleapis.com", "lustre.googleapis.com", "monitoring.googleapis.com",
    "servicenetworking.googleapis.com", "storage.googleapis.com",
)  # fmt: skip
"""Services that the programs need switched on. Container File System streams images."""


class PrimaryNetwork(Document):
    """The one network of all regions of an environment."""

    name: CloudName = "gkr"
    """Its name, to which subnets of regions refer."""
    mtu: int = Field(default=8896, ge=1300, le=8896)
    """Largest packet; one value for all regions."""
    pods: Cidr
    """Every region's pods have their range in here; what a syncer admits. A new region then changes no other."""
    services_access: Cidr | None = None
    """Range for private services access, which Lustre needs; at least a /22."""
    networks_quota: int = Field(default=50, ge=1)
    """The project's quota NETWORKS; an A3 Mega cluster takes eight beside the primary one, an A3 Ultra cluster two."""


class Keys(Document):
    """Encryption keys of our own."""

    ring: CloudName = "gkr"
    """Key ring; it can never be deleted."""
    location: str = "global"
    """Where the ring is."""
    rotate_days: int = Field(default=90, ge=1)
    """Age at which a new version is made."""


class Identity(Document):
    """Who may do what; members as Google Cloud writes them, such as group:research@example.com."""

    researchers: list[str] = []
    """May launch experiments and read buckets and logs."""
    operators: list[str] = []
    """May operate clusters."""
    previewers: list[str] = []
    """May read everything that a preview reads, and change nothing."""


class Budget(Document):
    """A budget with alerts; it stops nothing."""

    billing_account: str = Field(pattern=r"^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$")
    """Id of the billing account."""
    amount: int = Field(ge=1)
    """Whole units of the account's currency in a month."""
    currency: str = Field(default="USD", pattern=r"^[A-Z]{3}$")
    """Currency of the billing account."""
    thresholds: list[float] = [0.5, 0.8, 1.0]
    """Parts of the amount at which an alert is sent."""


class Alerts(Document):
    """Who is told."""

    emails: list[str] = []
    """Mail addresses, of groups rather than of persons."""


class GlobalStack(StackBase):
    """An environment's services, network, identity, registries, buckets, keys and budget."""

    kind: Literal["global"]
    """Kind of stack."""
    apis: list[str] = list(APIS)
    """Services to switch on."""
    network: PrimaryNetwork
    """The network of all regions."""
    identity: Identity = Identity()
    """Who may do what."""
    registries: list[Registry] = []
    """Repositories of images for all regions."""
    buckets: list[Bucket] = []
    """Buckets for all regions, such as a data set that two regions read."""
    keys: Keys | None = None
    """Encryption keys; default: Google's."""
    budget: Budget | None = None
    """Budget; needs a permission on the billing account."""
    alerts: Alerts = Alerts()
    """Who is told."""
