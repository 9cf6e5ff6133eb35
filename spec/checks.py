"""What can be wrong with an experiment whatever the clusters are: rules over more than one field.

Pure; every finding is a `Refusal`, none stops the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from spec import names
from spec.experiment import MODEL_KIND_OF_SOURCE, Experiment, PlacedLearner
from spec.machines import machine_of_gpu, parse_gpu
from spec.nodes import Path
from spec.problems import RemedyError, did_you_mean
from spec.refusals import Refusal

MOST_GROUPS = 7
"""Kueue admits a Ray cluster with at most seven worker groups: groups of nodes and private services together."""
OWNED_ENV = re.compile(r"GKR_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|RAY_ADDRESS")
"""Variables that the launcher sets."""
SECRET_ENV = re.compile(
    r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET_KEY)", re.IGNORECASE
)
"""Variables whose value does not belong in a document."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_LEARNERS = frozenset({"run", "any"})


def check(experiment: Experiment, *, env: Mapping[str, str]) -> list[Refusal]:
    """All findings, in the order of the file as far as it can be known."""
    return [
        *_form(experiment),
        *_learners(experiment.placed_learners()),
        *_worker_groups(experiment),
        *_budgets(experiment),
        *_sync(experiment),
        *_links(experiment),
        *_model(experiment),
        *_services(experiment),
        *_env(experiment, env),
    ]


def _form(experiment: Experiment) -> Iterator[Refusal]:
    if (experiment.train is None) == (experiment.run is None):
        if experiment.train is None:
            yield Refusal(
                (),
                "neither train nor run is given; nothing would be run",
                hint="add train: {recipe: ...} or run: a command",
            )
        else:
            yield Refusal(
                ("run",),
                "both train and run are given; exactly one says what runs",
                hint="remove one of them",
                also=(("train",),),
                key=True,
            )
    if experiment.train is not None and experiment.data is None:
        yield Refusal(
            ("train",), "train needs data.manifest", hint='add data: {manifest: "{bucket}/data/..."}', key=True
        )
    if experiment.learners is None and not experiment.groups:
        yield Refusal(
            (),
            "no learner: neither learners nor groups is given",
            hint="add groups: [{name: trainer, nodes: 1, resources: ...}]",
        )
    if experiment.learners is not None:
        for short in ("groups", "cluster"):
            if getattr(experiment, short) is not None:
                message = f"{short} at the top level is the short form for one learner and learners is given as well"
                yield Refusal((short,), message, hint=f"move {short} into a learner", also=(("learners",),), key=True)
        if not experiment.learners:
            yield Refusal(("learners",), "learners is empty; an experiment has at least one", hint="add a learner")
    if experiment.run is not None and not experiment.run.strip():
        yield Refusal(("run",), "run is empty", hint="write the command")


def _learners(learners: list[PlacedLearner]) -> Iterator[Refusal]:
    seen: dict[str, Path] = {}
    for one in learners:
        name_path = (*one.path, "name")
        if one.name in seen:
            message = f'two learners are called "{one.name}"; logs and checkpoints would mix'
            yield Refusal(name_path, message, hint="give each its own name", also=(seen[one.name],))
        if one.name in _RESERVED_LEARNERS and one.path:
            yield Refusal(name_path, f'"{one.name}" is reserved', hint="call the learner by its region, such as east")
        seen.setdefault(one.name, name_path)
        yield from _groups(one)
        yield from _one_gpu_type(one)


def _groups(learner: PlacedLearner) -> Iterator[Refusal]:
    groups = learner.config.groups
    seen: dict[str, Path] = {}
    for index, group in enumerate(groups):
        path = learner.group_path(index)
        if group.name in seen:
            message = f'two groups of learner {learner.name} are called "{group.name}"'
            yield Refusal(
                (*path, "name"),
                message,
                hint="give each its own name, or one group more nodes",
                also=(seen[group.name],),
            )
        if group.name in names.RESERVED_GROUPS or group.name.startswith(names.SERVICE_GROUP):
            whose = "the head of the Ray cluster" if group.name in names.RESERVED_GROUPS else "services"
            yield Refusal(
                (*path, "name"), f'group name "{group.name}" is reserved for {whose}', hint="for example trainer"
            )
        seen.setdefault(group.name, (*path, "name"))
        resources = group.resources
        if resources.memory is not None and resources.shm is not None and resources.shm > resources.memory:
            yield Refusal(
                (*path, "resources", "shm"),
                "shm is larger than memory, which contains it",
                hint="raise memory or lower shm",
            )
        if resources.gpu is None:
            continue
        wanted = parse_gpu(resources.gpu)
        row = machine_of_gpu(wanted.gpu)
        assert row is not None
        if wanted.count > row.gpus:
            message = f"{wanted} is more GPUs per node than {row.name} has ({row.gpus})"
            nodes = -(-wanted.count * group.nodes // row.gpus)
            yield Refusal(
                (*path, "resources", "gpu"), message, hint=f"write nodes: {nodes} and gpu: {wanted.gpu}:{row.gpus}"
            )
        if group.ranks is not None and group.ranks != wanted.count:
            message = f"{group.ranks} ranks on a node with {wanted.count} GPUs; with GPUs the ranks are the GPUs"
            yield Refusal((*path, "ranks"), message, hint="remove ranks")


def _one_gpu_type(learner: PlacedLearner) -> Iterator[Refusal]:
    """One job, one GPU type: the transports of two types do not talk to each other inside one communicator."""
    first: tuple[str, Path] | None = None
    for index, group in enumerate(learner.config.groups):
        path = (*learner.group_path(index), "resources")
        kind = parse_gpu(group.resources.gpu).gpu if group.resources.gpu else "no GPU"
        if group.resources.gpu:
            path = (*path, "gpu")
        if first is None:
            first = (kind, path)
        elif kind != first[0]:
            message = f"learner {learner.name} mixes {first[0]} and {kind}; one learner has one GPU type"
            yield Refusal(
                path, message, hint="make each type a learner of its own; they join through sync", also=(first[1],)
            )


def _hosted(experiment: Experiment, *, index: int) -> list[str]:
    """Private services that the learner at this place of the file hosts."""
    name = experiment.placed_learners()[index].name
    return [
        service
        for service, config in experiment.services.items()
        if not config.shared
        and (config.learner == name or (config.learner is None and (config.kind == "encode" or index == 0)))
    ]


def _worker_groups(experiment: Experiment) -> Iterator[Refusal]:
    for index, one in enumerate(experiment.placed_learners()):
        groups, services = len(one.config.groups), len(_hosted(experiment, index=index))
        if groups + services > MOST_GROUPS:
            yield Refusal(
                (*one.path, "groups"),
                f"{groups} groups and {services} services of learner {one.name} are {groups + services} worker groups, "
                f"at most {MOST_GROUPS} fit one job",
                hint="merge equal groups, or let another learner host some services (learner: NAME)",
                key=True,
            )


def _budgets(experiment: Experiment) -> Iterator[Refusal]:
    worst, whose = 0, ("", "")
    for index, one in enumerate(experiment.placed_learners()):
        services = [f"{names.SERVICE_GROUP}{service}" for service in _hosted(experiment, index=index)]
        longest = max([*(group.name for group in one.config.groups), *services], key=len, default="")
        excess = names.rayjob_excess(experiment.name, learner=one.name, longest_group=longest)
        if excess > worst:
            worst, whose = excess, (one.name, longest)
    if worst:
        shorter = names.propose(experiment.name, longest=max(1, len(experiment.name) - worst))
        message = (
            f'"{experiment.name}" with learner "{whose[0]}" and group "{whose[1]}" makes names of cluster objects '
            f"{worst} characters too long"
        )
        yield Refusal(("name",), message, hint=f'"{shorter}" would do, or shorter names of learner and group')


def _sync(experiment: Experiment) -> Iterator[Refusal]:
    sync, learners = experiment.sync, experiment.placed_learners()
    if sync is None:
        return
    if experiment.run is not None:
        yield Refusal(
            ("sync",),
            "sync works with train only; a command of your own does not synchronise",
            hint="remove sync",
            key=True,
        )
    if sync.quorum is not None and sync.quorum > max(1, len(learners)):
        message = f"quorum {sync.quorum} can never be reached with {len(learners)} learners"
        yield Refusal(("sync", "quorum"), message, hint=f"at most {len(learners)}")
    if sync.lease < 2 * sync.heartbeat:
        message = (
            f"lease {sync.lease:g}s is below two heartbeats of {sync.heartbeat:g}s; healthy learners would count as "
            "gone"
        )
        yield Refusal(
            ("sync", "lease"), message, hint=f"at least {2 * sync.heartbeat:g}s", also=(("sync", "heartbeat"),)
        )


def _links(experiment: Experiment) -> Iterator[Refusal]:
    for one in experiment.placed_learners():
        if one.config.link is not None and experiment.run is not None:
            message = "link works with train only; a command of your own has no syncer that a link could lead to"
            yield Refusal((*one.path, "link"), message, hint="remove link", key=True)


def _model(experiment: Experiment) -> Iterator[Refusal]:
    """Data and services that the family of the model has no use for."""
    if experiment.train is None:
        return
    kind, source = experiment.train.model.kind, experiment.data.source if experiment.data else None
    if source is not None and MODEL_KIND_OF_SOURCE[source] != kind:
        message = f"{source} is for a model of kind {MODEL_KIND_OF_SOURCE[source]}; train.model.kind is {kind}"
        fitting = [one for one, of in MODEL_KIND_OF_SOURCE.items() if of == kind]
        yield Refusal(("data", "source"), message, hint=f"sources for {kind}: {', '.join(fitting)}")
    for name, service in experiment.services.items():
        if kind != "dit":
            message = f"a service of kind {service.kind} is for image models; train.model.kind is {kind}"
            yield Refusal(("services", name), message, hint="remove it: nothing would ask it", key=True)


def _services(experiment: Experiment) -> Iterator[Refusal]:
    learner_names = [one.name for one in experiment.placed_learners()]
    for name, service in experiment.services.items():
        path = ("services", name)
        try:
            names.check_label(name)
        except RemedyError as problem:
            yield Refusal(path, f"service {problem}", hint=problem.hint, key=True)
        if service.learner is not None and service.learner not in learner_names:
            hint = did_you_mean(service.learner, learner_names, noun="learners")
            yield Refusal(
                (*path, "learner"),
                f'service {name} names the learner "{service.learner}", which does not exist',
                hint=hint,
            )
        gpu = service.resources.gpu
        if gpu is not None:
            row = machine_of_gpu(parse_gpu(gpu).gpu)
            assert row is not None
            if parse_gpu(gpu).count > row.gpus:
                yield Refusal(
                    (*path, "resources", "gpu"),
                    f"{gpu} is more than one {row.name} has ({row.gpus})",
                    hint="use more replicas",
                )
    train = experiment.train
    kinds = {service.kind for service in experiment.services.values()}
    if train is not None and train.model.embedding_width and "encode" not in kinds:
        message = "train.model.conditioning is text, and no service of kind encode turns captions into embeddings"
        yield Refusal(
            ("services",), message, hint="add services: {encoder: {kind: encode}}, or conditioning: class", key=True
        )
    for kind in sorted(kinds):
        same = [name for name, service in experiment.services.items() if service.kind == kind]
        if len(same) > 1:
            message = f"services {' and '.join(same)} are both of kind {kind}; the trainer would not know which to ask"
            yield Refusal(
                ("services", same[1]),
                message,
                hint="keep one and raise its replicas",
                also=(("services", same[0]),),
                key=True,
            )


def _env(experiment: Experiment, env: Mapping[str, str]) -> Iterator[Refusal]:
    for name, value in experiment.env.items():
        path = ("env", name)
        if _ENV_NAME.fullmatch(name) is None:
            message = (
                f'"{name}" is not a name of an environment variable: letters, digits and underscores, not starting '
                "with a digit"
            )
            yield Refusal(path, message, hint=re.sub(r"[^A-Za-z0-9_]", "_", name).lstrip("0123456789"), key=True)
        elif OWNED_ENV.fullmatch(name):
            yield Refusal(
                path, f"{name} is set by the launcher; yours would break it", hint="choose another name", key=True
            )
        elif value is None and name not in env:
            yield Refusal(
                path,
                f"{name} is to be taken from your environment, where it is not set",
                hint=f"export {name}=... or write a value",
                key=True,
            )
        elif value and SECRET_ENV.fullmatch(name):
            hint = f"leave the value empty ({name}:) to take it from your environment, or use secrets"
            yield Refusal(
                path, f"the value of {name} looks like a secret; it would be kept in plan and logs", hint=hint, key=True
            )
        if name in experiment.secrets:
            yield Refusal(
                path, f"{name} is given in env and in secrets", hint="keep one", also=(("secrets",),), key=True
            )
