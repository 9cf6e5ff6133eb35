"""A resolved experiment: everything decided, nothing left to guess.

Written once as `plan.json`; kept with the run and named by digest in every checkpoint. Every process of a run reads
this and only this.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spec.base import Record
from spec.buckets import Bucket
from spec.facts import Site
from spec.limits import RetryConfig, TimeoutConfig
from spec.link import LinkConfig
from spec.services import ServiceKind
from spec.sync import SyncConfig
from spec.train import TrainConfig
from spec.units import StoredBytes


class NodePlan(Record):
    """One machine of a learner."""

    name: str
    group: str
    machine: str
    """Row of the machine catalogue."""
    ranks: int
    gpus: int = 0
    cpu: float
    memory: StoredBytes
    shm: StoredBytes


class ServicePlan(Record):
    """One service as one learner's cluster hosts it."""

    name: str
    kind: ServiceKind
    replicas: int
    cpu: float
    memory: StoredBytes
    gpus: int = 0
    gpu: str | None = None
    """GPU type of a replica."""
    queue_depth: int
    max_batch: int
    queue_bytes: StoredBytes = 0
    """Of one rank at one replica; 0: not counted, as in plans of before."""
    max_delay_ms: int = 0
    model: str = Field(default="", exclude_if=lambda value: not value)
    """URI or path of the folder of its weights; empty: what the service ships with."""
    shared_endpoints: list[str] = []
    """Non-empty: the platform's replicas; nothing is started."""
    shared_secret: str = Field(default="", exclude_if=lambda value: not value)
    """Of a platform's service: the Secret with the token that its replicas and their clients have; empty: none."""
    answers_to: str = ""
    """Name that its replicas know themselves by; empty: its own. A platform's replicas are services of their own under
    one name, and an experiment may have another one for them."""

    @property
    def is_shared(self) -> bool:
        """It is the platform's."""
        return bool(self.shared_endpoints)

    def client(self, who: str, *, run: str) -> str:
        """What a client calls itself: to a platform's replicas, which other runs ask too, with its run."""
        return f"{run}/{who}" if self.is_shared else who


class LearnerPlan(Record):
    """One learner in its cluster."""

    name: str
    cluster: str
    region: str
    gpu: str | None
    """GPU type of all its nodes."""
    nodes: list[NodePlan]
    world_size: int
    services: list[ServicePlan] = []
    data_manifest: str
    """URI of the dataset's manifest in the learner's region."""
    data_more: list[str] = []
    """URIs of the manifests of datasets that are mixed in."""
    data_weights: list[int] = []
    """Share of each dataset, in order; empty for one."""
    data_cache_limit: StoredBytes | None = Field(default=None, exclude_if=lambda value: value is None)
    """Bytes that copies of datasets may take on each node; none: half of what is free there."""
    data_source: str | None = None
    """What `services.prepare` makes the dataset from if the manifest is missing."""
    checkpoints: str
    """URI of the learner's checkpoint folder."""
    job: str = ""
    """Name of its RayJob; not used on the local backend."""
    image: str | None = None
    """Full reference of its image, in the registry of its region."""
    namespace: str = "default"
    queue: str | None = None
    """Queue of its cluster; not used on the local backend."""
    run_uri: str = ""
    """URI of the run's folder in its region: events, logs, code and checkpoints lie under it."""
    site: Site = Site()
    """What its cluster gives every pod."""
    syncer_control: str = ""
    """host:port of the syncer as this learner's pods reach it; empty on the local backend, where it is published."""
    syncer_bulk: str = ""
    link: LinkConfig | None = None
    """What the local backend does to the bytes between this learner and the syncer."""

    @property
    def groups(self) -> list[str]:
        """Names of its groups, in order."""
        return list(dict.fromkeys(node.group for node in self.nodes))

    def group(self, name: str) -> list[NodePlan]:
        """The nodes of one group."""
        return [node for node in self.nodes if node.group == name]


class SyncerPlan(Record):
    """The syncer of the experiment, if it has more than one learner or `sync` is given."""

    cluster: str
    name: str = ""
    """Of its objects; not used on the local backend, as are namespace, image and sizes."""
    namespace: str = "default"
    image: str | None = None
    cpu: float = 1.0
    memory: StoredBytes = 2 * 2**30
    outer_host: str = ""
    """Address at which learners of other clusters reach it; empty when all are in its own."""
    outer_routed: bool = False
    """The platform of its cluster brings what arrives there to it; nothing has to claim the address."""
    control_port: int
    """0 on the local backend: the syncer binds what it gets and publishes it."""
    bulk_port: int
    store: str
    """URI of its state."""
    config: SyncConfig
    target_samples: int
    round_samples: int
    """Samples of one normal round of one learner: inner_steps x batch."""


class Origin(Record):
    """Where an effective value comes from."""

    path: str
    value: str
    origin: Literal["default", "recipe", "file", "flag", "facts"]
    where: str = ""


class Plan(Record):
    """The whole run."""

    version: Literal[1] = 1
    experiment: str
    run: str
    backend: Literal["local", "kubernetes"]
    image: str | None = None
    learners: list[LearnerPlan]
    train: TrainConfig | None = None
    """Our trainer; none when `run` is given."""
    buckets: list[Bucket] = Field(default=[], exclude_if=lambda value: not value)
    """Sizes that images are brought to, with the samples of a batch of each; empty: train.model's, and train.batch."""
    run_script: str | None = Field(default=None)
    """The person's own command, once per node."""
    syncer: SyncerPlan | None = None
    env: dict[str, str] = {}
    """Variables with values that a person wrote."""
    env_from_caller: list[str] = []
    """Variables taken from the caller's environment, by name only: their values are never recorded."""
    secrets: list[str] = []
    priority: str = "normal"
    code: str | None = None
    """Folder that a person named; packed when the run is launched on a cluster."""
    code_sha256: str = ""
    """Digest of the packed folder: it lies at code/<digest>.tar.gz beside the runs of each learner's bucket."""
    timeouts: TimeoutConfig = TimeoutConfig()
    retry: RetryConfig = RetryConfig()
    warnings: list[str] = []
    """What will run, but probably not as meant."""
    origins: list[Origin] = []

    def learner(self, name: str) -> LearnerPlan:
        """The learner of that name."""
        return next(one for one in self.learners if one.name == name)

    @property
    def has_keys(self) -> bool:
        """Its processes prove to each other that they are of one run: learners to the syncer, and to the replicas of
        services of their own."""
        private = any(not service.shared_endpoints for one in self.learners for service in one.services)
        return self.syncer is not None or (self.run_script is not None and private)

    @property
    def home(self) -> LearnerPlan:
        """The first learner: its driver evaluates the merged model."""
        return self.learners[0]
