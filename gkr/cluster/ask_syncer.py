"""Asks the syncer of a run on clusters, by a process in its pod.

Its ports let in only processes with the run's keys, and those are in the run's pods and nowhere else. So the question
is asked there, through the API server's exec, by whoever may exec.
"""

from __future__ import annotations

from contextlib import closing

from gkr.cluster.connection import connect
from gkr.cluster.execute import Target, choose_pod
from gkr.cluster.logs import PodRef, pod_ref
from gkr.cluster.places import read_places
from gkr.runs import Run
from manifests.labels import ROLE, RUN
from spec.errors import RefusedError

_ROLE = "syncer"
_MODULE = "training.sync.ask"
_SECONDS = 30.0
_LONGEST_REASON = 400


def ask_cluster_syncer(run: Run, *, path: str) -> bytes:
    """The answer of its control port; an error of `spec.errors` that says why there is none."""
    places = read_places(run.path)
    if places.syncer is None:
        raise RefusedError(f"run {run.name} has no syncer")
    with closing(connect(places.clusters[places.syncer.cluster])) as connection:
        labels = {RUN: places.run, ROLE: _ROLE}
        found = connection.list("Pod", namespace=places.syncer.namespace, labels=labels)
        pods: list[PodRef] = [pod_ref(one, cluster=places.syncer.cluster, container=None) for one in found]
        pod = choose_pod(pods, target=Target(role=_ROLE), learners=[], run=run.name)
        with connection.translate(f"ask the syncer in pod {pod.name}"):
            done = connection.client.exec(
                pod.name,
                namespace=pod.namespace,
                container=pod.container,
                command=["python", "-m", _MODULE, path],
                stdout=True,
                stderr=True,
                timeout=_SECONDS,
            )
    if done.exit_code:
        said = " ".join(str(done.stderr or "").split())[-_LONGEST_REASON:]
        raise RefusedError(f"pod {pod.name} cannot ask its syncer: {said or f'exit code {done.exit_code}'}")
    return str(done.stdout or "").encode()
