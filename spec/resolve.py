"""An experiment and the facts of the clusters become a plan.

All arithmetic and every refusal happens here, once: placement, world sizes, names, ports, memory, one GPU type per
learner. Pure: no file, no clock, no network; the run's id and the caller's environment come in. All refusals are
collected before any is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spec import names
from spec.checks import check
from spec.document import Located
from spec.experiment import Experiment
from spec.facts import ClusterFacts
from spec.nodes import render_path
from spec.placement import Placement, Usage, place
from spec.plan import LearnerPlan, Origin, Plan
from spec.refusals import Refusal, ResolveError
from spec.resolve_run import (
    buckets_of,
    check_buckets,
    check_cluster_settings,
    check_data,
    check_local_machine,
    check_training,
    image_of,
    manifest_of,
    more_data_of,
    syncer_addresses,
    syncer_of,
    training_warnings,
)
from spec.service_placement import ServicePlacement, place_services


def resolve(
    experiment: Experiment,
    facts: Sequence[ClusterFacts],
    *,
    run: str,
    env: Mapping[str, str],
    run_uri: str | None = None,
    origins: Sequence[Origin] = (),
) -> Plan:
    """The plan of one run. `run_uri` is the run's folder; without it, a prefix in the first learner's bucket.

    Raises ResolveError with every refusal; paths in it are those of the experiment document.
    """
    refusals = check(experiment, env=env)
    placements, problems = _place_all(experiment, facts)
    refusals.extend(problems)
    services = place_services(experiment, placements=placements)
    refusals.extend(services.refusals)
    refusals.extend(check_training(experiment))
    refusals.extend(check_data(experiment, placements=placements))
    refusals.extend(check_buckets(experiment))
    refusals.extend(check_cluster_settings(experiment, placements=placements))
    oversize, warnings = check_local_machine(experiment, placements=placements, services=services)
    refusals.extend(oversize)
    if refusals:
        raise ResolveError(refusals)
    home = placements[0].facts
    base = run_uri or f"{home.bucket}/runs/{experiment.name}/{run}"
    learners = [
        _learner(
            experiment, placement=one, services=services, run=run, run_uri=run_uri, home=home,
            namespace=_namespace(one.facts, place=_place_in_cluster(placements, index=index)),
        )
        for index, one in enumerate(placements)
    ]  # fmt: skip
    return Plan(
        experiment=experiment.name,
        run=run,
        backend=home.backend,
        image=experiment.image,
        learners=learners,
        train=experiment.train,
        buckets=buckets_of(experiment),
        run_script=experiment.run,
        syncer=syncer_of(experiment, learners=learners, home=home, base=base, run=run),
        env={name: value for name, value in experiment.env.items() if value is not None},
        env_from_caller=[name for name, value in experiment.env.items() if value is None],
        secrets=experiment.secrets,
        priority=experiment.priority,
        code=experiment.code,
        timeouts=experiment.timeouts,
        retry=experiment.retry,
        warnings=[*warnings, *services.warnings, *training_warnings(experiment, placements=placements)],
        origins=_origins(origins, placements, learners),
    )


def resolve_located(
    document: Located[Experiment],
    facts: Sequence[ClusterFacts],
    *,
    run: str,
    env: Mapping[str, str],
    run_uri: str | None = None,
) -> Plan:
    """The same, with every refusal at its file, line and column (DocumentError) and every origin in the plan."""
    try:
        return resolve(document.value, facts, run=run, env=env, run_uri=run_uri, origins=document.origins())
    except ResolveError as error:
        raise error.locate(document) from None


def _place_all(experiment: Experiment, facts: Sequence[ClusterFacts]) -> tuple[list[Placement], list[Refusal]]:
    placements: list[Placement] = []
    refusals: list[Refusal] = []
    usage = Usage()
    for learner in experiment.placed_learners():
        placement, problems = place(learner, facts=facts, usage=usage)
        refusals.extend(problems)
        if placement is None:
            continue
        usage = placement.usage
        placements.append(placement)
        first = placements[0]
        if placement.facts.backend != first.facts.backend:
            message = (
                f"{placement.facts.name} is a {placement.facts.backend} cluster and {first.facts.name} a "
                f"{first.facts.backend} one"
            )
            refusals.append(
                Refusal(
                    learner.cluster_path,
                    message,
                    hint="all learners on one backend",
                    also=(first.learner.cluster_path,),
                )
            )
    return placements, refusals


def _learner(
    experiment: Experiment,
    *,
    placement: Placement,
    services: ServicePlacement,
    run: str,
    run_uri: str | None,
    home: ClusterFacts,
    namespace: str,
) -> LearnerPlan:
    facts, name = placement.facts, placement.learner.name
    own_base = run_uri or f"{facts.bucket}/runs/{experiment.name}/{run}"
    control, bulk = syncer_addresses(experiment, facts=facts, home=home, run=run)
    more, weights = more_data_of(experiment, facts)
    return LearnerPlan(
        name=name,
        cluster=facts.name,
        region=facts.region,
        gpu=placement.gpu,
        nodes=placement.nodes,
        world_size=placement.learner.world_size,
        services=services.by_learner[name],
        data_manifest=manifest_of(experiment, facts),
        data_more=more,
        data_weights=weights,
        data_cache_limit=experiment.data.cache_limit if experiment.data else None,
        data_source=experiment.data.source if experiment.data else None,
        checkpoints=f"{own_base}/checkpoints/{name}",
        job=names.rayjob_name(experiment.name, learner=name, run=run),
        image=image_of(experiment, facts),
        namespace=namespace,
        queue=experiment.queue or (facts.queues[0] if facts.queues else None),
        run_uri=own_base,
        site=facts.site,
        syncer_control=control,
        syncer_bulk=bulk,
        link=placement.learner.config.link,
    )


def _place_in_cluster(placements: Sequence[Placement], *, index: int) -> int:
    """How many learners before this one are in the same cluster."""
    return sum(one.facts.name == placements[index].facts.name for one in placements[:index])


def _namespace(facts: ClusterFacts, *, place: int) -> str:
    return facts.namespaces[place % len(facts.namespaces)]


def _origins(
    written: Sequence[Origin], placements: Sequence[Placement], learners: Sequence[LearnerPlan]
) -> list[Origin]:
    """What was written or defaulted, and what the facts decided, in that order; a default that facts filled is shown
    once.
    """
    found: dict[str, Origin] = {one.path: one for one in written}
    for placement, learner in zip(placements, learners, strict=True):
        where = f"facts of {placement.facts.name}"
        prefix = placement.learner.path
        decided: dict[str, str] = {
            render_path((*prefix, "placed")): learner.cluster,
            render_path((*prefix, "region")): learner.region,
            render_path((*prefix, "world_size")): str(learner.world_size),
            render_path((*prefix, "data_manifest")): learner.data_manifest,
        }
        for index, group in enumerate(placement.learner.config.groups):
            path = (*placement.learner.group_path(index), "resources")
            node = next(one for one in placement.nodes if one.group == group.name)
            decided[render_path((*placement.learner.group_path(index), "machine"))] = node.machine
            dumped = node.model_dump(mode="json")
            for key in ("cpu", "memory", "shm"):
                if getattr(group.resources, key) is None:
                    decided[render_path((*path, key))] = str(dumped[key])
        found.update(
            {path: Origin(path=path, value=value, origin="facts", where=where) for path, value in decided.items()}
        )
    return list(found.values())
