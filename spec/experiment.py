"""What a researcher launches: one file, one name, one or more learners.

Fields only; whatever needs more than one field to judge is in `spec.checks` and `spec.resolve`, so that all of it is
reported at once with places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from spec.base import Document
from spec.limits import RetryConfig, TimeoutConfig
from spec.link import LinkConfig
from spec.machines import GpuText, parse_gpu
from spec.names import Name
from spec.nodes import Path
from spec.services import ServiceConfig
from spec.sync import SyncConfig
from spec.train import TrainConfig
from spec.units import ByteSize, Cores

ANY = "any"
DataSource = Literal["sklearn-digits", "python-docstrings"]
MODEL_KIND_OF_SOURCE: Mapping[DataSource, str] = {"sklearn-digits": "dit", "python-docstrings": "lm"}
"""Which family of models can be trained on a source."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Clusters = Annotated[
    list[str],
    BeforeValidator(_as_list),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]
"""One cluster name, a list in order of preference, or `any`."""


class Resources(Document):
    """What one node of a group holds."""

    gpu: GpuText | None = None
    """GPU type and count per node, such as H200:8."""
    cpu: Cores | None = None
    """Cores; default: the node's share by its GPUs, or 1 without GPUs."""
    memory: ByteSize | None = None
    """Memory; default: the node's share by its GPUs, or 2Gi without GPUs."""
    shm: ByteSize | None = None
    """Shared memory, counted inside memory; default: a quarter of memory."""


class GroupConfig(Document):
    """Nodes of one shape inside a learner."""

    name: Name = "trainer"
    """Name of the group; its nodes are name-0, name-1, ..."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of this shape."""
    ranks: int | None = Field(default=None, ge=1)
    """Training processes per node; default: one per GPU, or 1 without GPUs."""
    resources: Resources = Resources()
    """Of one node."""

    @property
    def ranks_per_node(self) -> int:
        """One per GPU, else as asked, else one."""
        return parse_gpu(self.resources.gpu).count if self.resources.gpu else self.ranks or 1


class LearnerConfig(Document):
    """The part of an experiment in one cluster: one GPU type."""

    name: Name
    """Name of the learner, unique in the experiment."""
    cluster: Clusters = [ANY]
    """A cluster name, a list in order of preference, or `any`."""
    groups: list[GroupConfig] = Field(min_length=1)
    """Groups of nodes; all their ranks train together."""
    link: LinkConfig | None = None
    """What the local backend does to the bytes between this learner and the syncer; refused on clusters."""


class MoreData(Document):
    """Another dataset that is mixed in."""

    manifest: str
    """URI of its manifest; {bucket} stands for the bucket of the learner's own region."""
    weight: int = Field(default=1, ge=1, le=10_000)
    """Its share of the samples, relative to the other datasets."""


class BucketsConfig(Document):
    """Images are trained on in sizes near to their own shape, instead of the middle square of each.

    Every size has at most the pixels of a square of train.model.image_size, and all batches cost about the same: those
    of smaller sizes have more samples than train.batch.
    """

    step: int = Field(ge=1)
    """Width and height are multiples of it; it divides train.model.image_size, and train.model.patch_size divides it.
    """
    max_aspect: float = Field(default=2.0, ge=1, le=16)
    """Largest ratio of the longer side to the shorter one; longer images are cropped to it."""


class DataConfig(Document):
    """What to train on."""

    manifest: str
    """URI of the dataset's manifest; {bucket} stands for the bucket of the learner's own region."""
    source: DataSource | None = None
    """What the dataset is made from when the manifest does not exist yet."""
    weight: int = Field(default=1, ge=1, le=10_000)
    """Share of the samples that come from this dataset, relative to those in `more`."""
    more: list[MoreData] = Field(default=[], max_length=63)
    """Datasets that are mixed in; every stretch of samples holds each one's share to within one sample."""
    cache_limit: ByteSize | None = Field(default=None, ge=1)
    """Bytes that copies of datasets may take on each node; default: half of what is free there. What does not fit is
    read where it is.
    """
    buckets: BucketsConfig | None = None
    """Sizes of images by their shapes; default: all are squares of train.model.image_size."""


class Experiment(Document):
    """One experiment file."""

    version: Literal[1]
    """Version of this file's form."""
    name: Name
    """Name of the experiment; its runs are kept under it."""
    image: str | None = None
    """Container image: a name in the cluster's registry, or a full reference by digest. Not used on the local backend.
    """
    learners: list[LearnerConfig] | None = None
    """The learners, one per cluster. For a single learner `groups` and `cluster` at the top level are a short form."""
    groups: list[GroupConfig] | None = None
    """Short form: the groups of the only learner."""
    cluster: Clusters | None = None
    """Short form: the cluster of the only learner."""
    train: TrainConfig | None = None
    """Our trainer: a recipe and changes to it. Exactly one of `train` and `run`."""
    run: str | None = None
    """Any command, once per node, with the GKR_* environment; learners do not synchronise."""
    data: DataConfig | None = None
    """What to train on; needed by `train`."""
    sync: SyncConfig | None = None
    """How learners become one model."""
    services: dict[str, ServiceConfig] = {}
    """Auxiliary services by name."""
    code: str | None = None
    """Folder that is packed by content hash and unpacked beside the image's code."""
    env: dict[str, str | None] = {}
    """Environment of all ranks. An empty value is taken from the caller, and refused if unset there."""
    secrets: list[Name] = []
    """Secrets of the cluster, by name."""
    queue: str | None = None
    """Queue of the cluster; default: the cluster's first."""
    priority: str = "normal"
    """Priority class."""
    timeouts: TimeoutConfig = TimeoutConfig()
    """Longest waits."""
    retry: RetryConfig = RetryConfig()
    """When a learner that stopped is started again."""

    def placed_learners(self) -> list[PlacedLearner]:
        """All learners with their paths, the short form included."""
        if self.learners is not None:
            return [
                PlacedLearner(one, path=("learners", index), cluster_path=("learners", index, "cluster"))
                for index, one in enumerate(self.learners)
            ]
        if not self.groups:
            return []
        only = LearnerConfig(name=self.name, cluster=self.cluster or [ANY], groups=self.groups)
        return [PlacedLearner(only, path=(), cluster_path=("cluster",))]


@dataclass(frozen=True)
class PlacedLearner:
    """A learner and where the document says so."""

    config: LearnerConfig
    path: Path
    cluster_path: Path

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def world_size(self) -> int:
        """Ranks of all its groups."""
        return sum(group.nodes * group.ranks_per_node for group in self.config.groups)

    def group_path(self, index: int) -> Path:
        """Path of one of its groups."""
        return (*self.path, "groups", index)
