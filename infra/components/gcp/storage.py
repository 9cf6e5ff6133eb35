"""Where data, checkpoints and images are: buckets, image registries, file systems.

Buckets and file systems are never emptied by a stack that is protected: they also stay in the cloud when they go from
its configuration. Access is granted for each bucket, to whom is named, and never to a whole project.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pulumi
from pulumi_gcp import artifactregistry, lustre, storage

from infra.components.base import options
from spec.stack_common import Bucket, Registry
from spec.stack_region import Lustre

READ = ("roles/storage.objectViewer", "roles/storage.legacyBucketReader")
WRITE = ("roles/storage.objectUser", "roles/storage.legacyBucketReader")
"""On one bucket. The second role reads the bucket's own settings, which mounts and clients ask for first."""
ABANDONED_DAYS = 7
KEEP_ANYWAY = "2592000s"
"""Age below which no image is cleaned up."""
LONGEST_FILESYSTEM = 8
"""Characters of a Lustre file system's name."""


@dataclass(frozen=True)
class Grant:
    """Who may do what with every bucket of a component."""

    name: str
    """Short, for the resource's name."""
    member: pulumi.Input[str]
    roles: Sequence[str]


@dataclass(frozen=True)
class Key:
    """An encryption key of our own, usable in one location."""

    location: str
    id: pulumi.Input[str]
    ready: pulumi.Resource
    """The right of the storage service to use it."""


@dataclass(frozen=True, kw_only=True)
class StorageArgs:
    """What one stack keeps."""

    project: str
    location: str
    """Where everything is that names no location."""
    labels: dict[str, str]
    protect: bool
    buckets: Sequence[Bucket] = ()
    grants: Sequence[Grant] = ()
    registries: Sequence[Registry] = ()
    image_readers: Mapping[str, pulumi.Input[str]] = field(default_factory=dict[str, "pulumi.Input[str]"])
    """Short name to member."""
    lustre: Sequence[Lustre] = ()
    network: pulumi.Input[str] | None = None
    """Id of the primary network, which file systems are reached through."""
    key: Key | None = None
    elsewhere: Mapping[str, Grant] = field(default_factory=dict[str, Grant])
    """Grants on buckets of other stacks, by name."""


class Storage(pulumi.ComponentResource):
    """Declares them, with their grants."""

    def __init__(self, name: str, args: StorageArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:Storage", name, None, opts)
        self.buckets = {one.name: self._bucket(args, one) for one in args.buckets}
        self.registries = {one.name: self._registry(args, one) for one in args.registries}
        for name, grant in args.elsewhere.items():
            self._grant(name, name, grant)
        for one in args.lustre:
            self._lustre(args, one)
        self.register_outputs({"buckets": list(self.buckets), "registries": list(self.registries)})

    def _bucket(self, args: StorageArgs, wanted: Bucket) -> storage.Bucket:
        location = wanted.location or args.location
        key = args.key if args.key and args.key.location.upper() == location.upper() else None
        bucket = storage.Bucket(
            wanted.name,
            name=wanted.name,
            project=args.project,
            location=location.upper(),
            storage_class=wanted.storage_class,
            uniform_bucket_level_access=True,
            public_access_prevention="enforced",
            hierarchical_namespace=storage.BucketHierarchicalNamespaceArgs(enabled=True)
            if wanted.hierarchical_namespace
            else None,
            custom_placement_config=storage.BucketCustomPlacementConfigArgs(data_locations=wanted.data_locations)
            if wanted.data_locations
            else None,
            soft_delete_policy=storage.BucketSoftDeletePolicyArgs(retention_duration_seconds=int(wanted.soft_delete)),
            versioning=storage.BucketVersioningArgs(enabled=True) if wanted.versioning else None,
            lifecycle_rules=_lifecycle(wanted),
            encryption=storage.BucketEncryptionArgs(default_kms_key_name=key.id) if key else None,
            labels=args.labels,
            force_destroy=not args.protect,
            opts=options(self, kind="data", protect=args.protect, depends_on=[key.ready] if key else ()),
        )
        for grant in args.grants:
            self._grant(wanted.name, bucket.name, grant)
        return bucket

    def _grant(self, name: str, bucket: pulumi.Input[str], grant: Grant) -> None:
        for role in grant.roles:
            storage.BucketIAMMember(
                f"{name}-{grant.name}-{role.rsplit('.', 1)[-1].lower()}",
                bucket=bucket,
                role=role,
                member=grant.member,
                opts=options(self),
            )

    def _registry(self, args: StorageArgs, wanted: Registry) -> artifactregistry.Repository:
        location = wanted.location or args.location
        repository = artifactregistry.Repository(
            wanted.name,
            repository_id=wanted.name,
            project=args.project,
            location=location,
            format="DOCKER",
            mode="REMOTE_REPOSITORY" if wanted.mirror_of else "STANDARD_REPOSITORY",
            remote_repository_config=_mirror(wanted.mirror_of) if wanted.mirror_of else None,
            cleanup_policies=_cleaning(wanted.keep_versions),
            labels=args.labels,
            opts=options(self, kind="data", protect=args.protect),
        )
        for reader, member in args.image_readers.items():
            artifactregistry.RepositoryIamMember(
                f"{wanted.name}-{reader}",
                project=args.project,
                location=location,
                repository=repository.name,
                role="roles/artifactregistry.reader",
                member=member,
                opts=options(self),
            )
        return repository

    def _lustre(self, args: StorageArgs, wanted: Lustre) -> None:
        assert args.network is not None, "a file system needs the network it is reached through"
        lustre.Instance(
            wanted.name,
            instance_id=wanted.name,
            project=args.project,
            location=wanted.zone,
            filesystem=re.sub(r"[^a-z0-9]", "", wanted.name)[:LONGEST_FILESYSTEM],
            capacity_gib=str(wanted.capacity_gib),
            per_unit_storage_throughput=str(wanted.throughput),
            network=args.network,
            labels=args.labels,
            opts=options(self, kind="data", protect=args.protect),
        )


def image_prefix(registry: Registry, *, project: str, location: str) -> str:
    """What stands before the name of an image."""
    return registry.uri or f"{registry.location or location}-docker.pkg.dev/{project}/{registry.name}"


def cluster_pods(cluster: str, *, project: str, number: str, location: str) -> str:
    """The member that is every pod of one cluster, by workload identity.

    Not a namespace and account: those mean the same pods in every cluster of the project, so that a pod of a
    development cluster could write where production keeps its checkpoints.
    """
    pool = f"iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/{project}.svc.id.goog"
    path = f"https://container.googleapis.com/v1/projects/{project}/locations/{location}/clusters/{cluster}"
    return f"principalSet://{pool}/kubernetes.cluster/{path}"


def _lifecycle(wanted: Bucket) -> list[storage.BucketLifecycleRuleArgs]:
    """Uploads that never ended are in no listing and on every bill."""
    abandoned = storage.BucketLifecycleRuleArgs(
        action=storage.BucketLifecycleRuleActionArgs(type="AbortIncompleteMultipartUpload"),
        condition=storage.BucketLifecycleRuleConditionArgs(age=ABANDONED_DAYS),
    )
    if wanted.delete_after_days is None:
        return [abandoned]
    old = storage.BucketLifecycleRuleArgs(
        action=storage.BucketLifecycleRuleActionArgs(type="Delete"),
        condition=storage.BucketLifecycleRuleConditionArgs(
            age=wanted.delete_after_days, matches_prefixes=wanted.delete_below or None
        ),
    )
    return [abandoned, old]


def _mirror(host: str) -> artifactregistry.RepositoryRemoteRepositoryConfigArgs:
    common = artifactregistry.RepositoryRemoteRepositoryConfigCommonRepositoryArgs(uri=f"https://{host}")
    return artifactregistry.RepositoryRemoteRepositoryConfigArgs(common_repository=common)


def _cleaning(keep: int) -> list[artifactregistry.RepositoryCleanupPolicyArgs]:
    """Both are needed: what is to be kept counts only against something that deletes."""
    policy = artifactregistry.RepositoryCleanupPolicyArgs
    newest = artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(keep_count=keep)
    old = artifactregistry.RepositoryCleanupPolicyConditionArgs(tag_state="ANY", older_than=KEEP_ANYWAY)
    return [
        policy(id="delete-old", action="DELETE", condition=old),
        policy(id="keep-newest", action="KEEP", most_recent_versions=newest),
    ]
