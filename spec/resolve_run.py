"""The parts of `resolve` that look at the whole run: batch against ranks, queues, ports, the local machine's memory,
the syncer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from spec.buckets import MOST_BUCKETS, Bucket, equal_cost, make_sizes
from spec.experiment import DataConfig, Experiment
from spec.facts import ClusterFacts
from spec.names import syncer_name
from spec.placement import Placement
from spec.plan import LearnerPlan, SyncerPlan
from spec.problems import did_you_mean
from spec.refusals import Refusal
from spec.service_placement import ServicePlacement
from spec.sync import SyncConfig
from spec.train import ModelConfig

STORES = ("file:///", "s3://", "gs://")
"""What loaders can read from."""
ROUNDS_FOR_HIGH_MOMENTUM = 100
LOCAL_OVERSUBSCRIPTION = 2.0
"""Cores that local nodes and services may ask for together, as a multiple of the machine's; they are rarely all busy.
"""
TAKEN_PORTS = frozenset({6379, 8265, 10001})
"""Ray's own."""


def check_training(experiment: Experiment) -> Iterator[Refusal]:
    """Batch and shard size against each learner's ranks."""
    train = experiment.train
    if train is None:
        return
    learners = experiment.placed_learners()
    worlds = {one.name: one.world_size for one in learners}
    # With sizes by shape batches differ, and ranks share them as evenly as can be.
    is_even = experiment.data is None or experiment.data.buckets is None
    if is_even and any(train.batch % world for world in worlds.values()):
        step = math.lcm(*worlds.values())
        below, above = train.batch // step * step, (train.batch // step + 1) * step
        odd = [one for one in learners if train.batch % one.world_size]
        whose = " and ".join(f"the {one.world_size} ranks of learner {one.name}" for one in odd)
        message = f"{train.batch} samples cannot be shared evenly by {whose}"
        hint = f"use {below} or {above}" if below else f"use {above}"
        yield Refusal(("train", "batch"), message, hint=hint, also=tuple((*one.path, "groups") for one in odd))
    if train.shard_size is not None and any(world % train.shard_size for world in worlds.values()):
        common = math.gcd(*worlds.values())
        divisors = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        whose = " and ".join(
            f"the {one.world_size} ranks of learner {one.name}" for one in learners if one.world_size % train.shard_size
        )
        yield Refusal(("train", "shard_size"), f"{train.shard_size} does not divide {whose}", hint=f"one of {divisors}")


def buckets_of(experiment: Experiment) -> list[Bucket]:
    """The sizes of `data.buckets` and their batches; none if all images are squares. The file has passed the checks."""
    data, train = experiment.data, experiment.train
    if data is None or data.buckets is None or train is None or not isinstance(train.model, ModelConfig):
        return []
    area = train.model.image_size**2
    sizes = make_sizes(area, step=data.buckets.step, most_aspect=data.buckets.max_aspect)
    return equal_cost(sizes, pixels=train.batch * area)


def check_buckets(experiment: Experiment) -> Iterator[Refusal]:
    """Sizes of `data.buckets` against the model, and their batches against each learner's ranks."""
    data, train = experiment.data, experiment.train
    if data is None or data.buckets is None or train is None:
        return
    model, step, path = train.model, data.buckets.step, ("data", "buckets", "step")
    if not isinstance(model, ModelConfig):
        yield Refusal(("data", "buckets"), f"a model of kind {model.kind} has no images", hint="remove it", key=True)
        return
    if step % model.patch_size or model.image_size % step:
        fitting = [
            size
            for size in range(model.patch_size, model.image_size + 1, model.patch_size)
            if model.image_size % size == 0
        ]
        message = (
            f"{step} is not between the model's patches and its images: train.model.patch_size {model.patch_size} "
            f"has to divide it, and it train.model.image_size {model.image_size}"
        )
        hint = f"one of {', '.join(map(str, fitting))}"
        yield Refusal(path, message, hint=hint, also=(("train", "model", "image_size"),))
        return
    found = buckets_of(experiment)
    if not 1 < len(found) <= MOST_BUCKETS:
        message = f"step {step} and max_aspect {data.buckets.max_aspect:g} make {len(found)} sizes"
        way = "lower step or raise max_aspect" if len(found) == 1 else "raise step or lower max_aspect"
        hint = f"2 to {MOST_BUCKETS} are possible: {way}"
        yield Refusal(("data", "buckets"), message, hint=hint)
    for one in experiment.placed_learners():
        if train.batch < one.world_size:
            message = f"{train.batch} samples cannot be shared by the {one.world_size} ranks of learner {one.name}"
            yield Refusal(("train", "batch"), message, hint=f"at least {one.world_size}")


def check_data(experiment: Experiment, *, placements: Sequence[Placement]) -> Iterator[Refusal]:
    """The manifests' placeholders and schemes, and that none is there twice."""
    if experiment.data is None:
        return
    seen: set[str] = set()
    for number, written in enumerate(manifests_of(experiment.data)):
        path = ("data", "more", number - 1, "manifest") if number else ("data", "manifest")
        for unknown in re.findall(r"\{(?!bucket\})[^}]*\}?", written):
            yield Refusal(path, f"{unknown} is not a placeholder", hint="{bucket} is the only one")
        if written in seen:
            yield Refusal(path, f'"{written}" is there twice', hint="give it a larger weight instead")
        seen.add(written)
        for one in placements[:1]:
            manifest = written.replace("{bucket}", one.facts.bucket)
            if re.match(r"[a-z][a-z0-9+.-]*://", manifest) is None:
                yield Refusal(path, f'"{manifest}" is not a URI', hint='write "{bucket}/..." or file:///absolute/path')
            elif experiment.train is not None and not manifest.startswith(STORES):
                yield Refusal(path, f"{manifest} is in no store that is known", hint=f"write {', '.join(STORES)}...")


def check_cluster_settings(experiment: Experiment, *, placements: Sequence[Placement]) -> Iterator[Refusal]:
    """Queue, priority, image and ports, where the backend has them."""
    for one in placements:
        facts = one.facts
        if facts.backend == "local":
            continue
        if one.learner.config.link is not None:
            yield Refusal(
                (*one.learner.path, "link"),
                f"the link of learner {one.learner.name} cannot be simulated on cluster {facts.name}: only the local "
                "backend stands between learner and syncer",
                hint="remove link, or launch on local clusters",
                key=True,
            )
        if experiment.queue is not None and experiment.queue not in facts.queues:
            hint = did_you_mean(experiment.queue, facts.queues, noun="queues") or f"{facts.name} has no queue"
            yield Refusal(("queue",), f'cluster {facts.name} has no queue "{experiment.queue}"', hint=hint)
        if experiment.queue is None and not facts.queues:
            yield Refusal(
                one.learner.cluster_path,
                f"cluster {facts.name} has no queue; the job would bypass its quota",
                hint="another cluster",
            )
        if experiment.priority not in facts.priorities:
            hint = did_you_mean(experiment.priority, facts.priorities, noun="priorities")
            yield Refusal(("priority",), f'cluster {facts.name} has no priority "{experiment.priority}"', hint=hint)
        if image_of(experiment, facts) is None:
            yield Refusal((), f"no image is given and {facts.name} runs containers", hint="add image: trainer")
    yield from _check_buckets(placements)
    if placements and experiment.train is not None:
        yield from _check_ports(placements[0])
        yield from _check_reach(placements)


def _check_ports(home: Placement) -> Iterator[Refusal]:
    facts, path = home.facts, home.learner.cluster_path
    if facts.backend == "local":
        return
    if facts.syncer is None:
        yield Refusal(
            path,
            f"the facts of {facts.name} name no ports for a syncer",
            hint="deploy its platform stack again, or put another learner first",
        )
        return
    control, bulk = facts.syncer.control_port, facts.syncer.bulk_port
    if control == bulk:
        yield Refusal(
            path,
            f"control and bulk port of {facts.name}'s syncer are both {control}",
            hint="mend the stack's syncer ports",
        )
    for port in dict.fromkeys((control, bulk)):
        if not 1024 <= port <= 65535:
            yield Refusal(
                path, f"syncer port {port} of {facts.name} is outside 1024..65535", hint="mend the stack's syncer ports"
            )
        elif port in TAKEN_PORTS:
            yield Refusal(
                path, f"syncer port {port} of {facts.name} is one of Ray's", hint="mend the stack's syncer ports"
            )


def _check_buckets(placements: Sequence[Placement]) -> Iterator[Refusal]:
    """A bucket's name is unique: two clusters may share one bucket, but not one name for two buckets."""
    first: dict[str, Placement] = {}
    for one in placements:
        other = first.setdefault(one.facts.bucket, one)
        if other.facts.site.bucket_env != one.facts.site.bucket_env:
            yield Refusal(
                one.learner.cluster_path,
                f"{other.facts.name} and {one.facts.name} call two different buckets {one.facts.bucket}: events and "
                "checkpoints of one learner would be taken for the other's",
                hint="give each cluster's bucket a name of its own in its stack",
                also=(other.learner.cluster_path,),
            )


def _check_reach(placements: Sequence[Placement]) -> Iterator[Refusal]:
    """Learners of other clusters need an address of the home cluster's syncer."""
    home = placements[0].facts
    if home.backend == "local" or home.syncer is None or home.syncer.host:
        return
    for one in placements[1:]:
        if one.facts.name != home.name:
            yield Refusal(
                one.learner.cluster_path,
                f"pods of {one.facts.name} cannot reach a syncer in {home.name}: its facts name no host",
                hint=f"put all learners in {home.name}, or set the syncer's host in its platform stack",
            )


def check_local_machine(
    experiment: Experiment, *, placements: Sequence[Placement], services: ServicePlacement
) -> tuple[list[Refusal], list[str]]:
    """All local clusters are one machine: its memory limits everything together, its cores are worth a warning."""
    local = [one for one in placements if one.facts.backend == "local"]
    if not local:
        return [], []
    plans = [one for name in (place.learner.name for place in local) for one in services.by_learner[name]]
    nodes = [node for one in local for node in one.nodes]
    cpu = sum(one.cpu for one in nodes) + sum(one.cpu * one.replicas for one in plans)
    memory = sum(one.memory for one in nodes) + sum(one.memory * one.replicas for one in plans)
    has_cpu = max(pool.node_cpu for one in local for pool in one.facts.pools)
    has_memory = max(pool.node_memory for one in local for pool in one.facts.pools)
    refusals: list[Refusal] = []
    warnings: list[str] = []
    if memory > has_memory:
        path = ("learners",) if experiment.learners is not None else ("groups",)
        message = (
            f"nodes and services together ask for {memory / 2**30:.3g}Gi, this machine has {has_memory / 2**30:.3g}Gi"
        )
        refusals.append(Refusal(path, message, hint="lower memory of the groups, or fewer nodes or replicas", key=True))
    if cpu > has_cpu * LOCAL_OVERSUBSCRIPTION:
        warnings.append(
            f"nodes and services ask for {cpu:g} cores, this machine has {has_cpu:g}; everything will be slow"
        )
    return refusals, warnings


def manifest_of(experiment: Experiment, facts: ClusterFacts) -> str:
    """The dataset's manifest in the learner's own region."""
    return experiment.data.manifest.replace("{bucket}", facts.bucket) if experiment.data else ""


def more_data_of(experiment: Experiment, facts: ClusterFacts) -> tuple[list[str], list[int]]:
    """Manifests of the datasets that are mixed in, in the learner's own region, and the weights of all."""
    data = experiment.data
    if data is None or not data.more:
        return [], []
    found = [one.replace("{bucket}", facts.bucket) for one in manifests_of(data)[1:]]
    return found, [data.weight, *(one.weight for one in data.more)]


def manifests_of(data: DataConfig) -> list[str]:
    """All manifests as they are written."""
    return [data.manifest, *(one.manifest for one in data.more)]


def image_of(experiment: Experiment, facts: ClusterFacts) -> str | None:
    """Full reference of the image in the registry of the learner's own region."""
    image = experiment.image or facts.site.image or None
    if image is None or "/" in image or not facts.registry:
        return image
    return f"{facts.registry.rstrip('/')}/{image}"


def syncer_addresses(experiment: Experiment, *, facts: ClusterFacts, home: ClusterFacts, run: str) -> tuple[str, str]:
    """Control and bulk address as pods of one learner's cluster reach them; empty where ports are not planned."""
    if experiment.train is None or home.syncer is None or facts.backend == "local":
        return "", ""
    own = facts.name == home.name
    host = f"{syncer_name(experiment.name, run=run)}.{home.namespaces[0]}" if own else home.syncer.host
    return f"{host}:{home.syncer.control_port}", f"{host}:{home.syncer.bulk_port}"


def syncer_of(
    experiment: Experiment, *, learners: Sequence[LearnerPlan], home: ClusterFacts, base: str, run: str
) -> SyncerPlan | None:
    """The syncer in the first learner's cluster: every run of our trainer has one (decision 0006)."""
    train = experiment.train
    if train is None:
        return None
    config = sync_config(experiment, learners=len(learners))
    crosses = any(one.cluster != home.name for one in learners)
    return SyncerPlan(
        cluster=home.name,
        name=syncer_name(experiment.name, run=run),
        namespace=home.namespaces[0],
        image=image_of(experiment, home),
        outer_host=home.syncer.host if home.syncer and crosses else "",
        outer_routed=bool(home.syncer and crosses and home.syncer.routed),
        control_port=home.syncer.control_port if home.syncer else 0,
        bulk_port=home.syncer.bulk_port if home.syncer else 0,
        store=f"{base}/sync",
        config=config,
        target_samples=train.samples,
        round_samples=config.inner_steps * train.batch,
    )


def training_warnings(experiment: Experiment, *, placements: Sequence[Placement]) -> Iterator[str]:
    """What will run, but probably not as meant."""
    train = experiment.train
    if any(one.facts.backend == "local" for one in placements):
        unused = [
            name for name, value in (("queue", experiment.queue), ("image", experiment.image)) if value is not None
        ]
        if unused:
            yield f"the local backend does not use {' and '.join(unused)}"
    for one in placements:
        partial = [node.name for node in one.nodes if node.gpus]
        if one.gpu and len(partial) > 1 and any(node.gpus < 8 for node in one.nodes):
            yield (
                f"learner {one.learner.name} uses part of each of {len(one.nodes)} machines; whole machines share "
                "the fast fabric"
            )
    if train is None:
        return
    kinds = {service.kind for service in experiment.services.values()}
    if not {"sample", "evaluate"} <= kinds:
        missing = " and ".join(sorted({"sample", "evaluate"} - kinds))
        yield f"no service of kind {missing}: the merged model will not be evaluated"
    if experiment.sync is not None and len(placements) < 2:
        yield "sync with one learner: outer rounds have nothing to merge with"
    config = sync_config(experiment, learners=len(placements))
    per_round = config.inner_steps * train.batch * len(placements)
    rounds = train.samples // per_round
    if rounds < 1:
        yield f"samples {train.samples} end the run before its first outer round of {per_round} samples is over"
    elif config.outer_momentum >= 0.9 and rounds < ROUNDS_FOR_HIGH_MOMENTUM:
        yield (
            f"outer_momentum {config.outer_momentum:g} with about {rounds} rounds; below 100 rounds 0.5 to 0.7 works "
            "better"
        )


def sync_config(experiment: Experiment, *, learners: int) -> SyncConfig:
    """What the file says; without a word, a single learner's outer step is taking its own weights back."""
    if experiment.sync is not None:
        return experiment.sync
    return SyncConfig() if learners > 1 else SyncConfig(outer_learning_rate=1.0, outer_momentum=0.0)
