"""The buckets of a run's clusters, opened from here with what the cluster's own pods use.

Credentials come from the Secret that the facts name, through the API server, and stay in memory; where the caller may
not read it, the caller's own environment has to do.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping

from gkr.cluster.connection import Connection
from gkr.cluster.fields import part
from spec.errors import NotFoundError, RefusedError
from spec.facts import Site
from spec.plan import LearnerPlan
from storage import Bucket, open_bucket


def bucket_environment(connection: Connection, *, site: Site, namespace: str) -> dict[str, str]:
    """How the bucket of a cluster is reached: our environment, then the site's, then its secret's."""
    return {**os.environ, **site.bucket_env, **_secret(connection, site.bucket_secret, namespace=namespace)}


def run_bucket(connection: Connection, *, learner: LearnerPlan) -> Bucket:
    """The run's own folder in the learner's bucket."""
    environment = bucket_environment(connection, site=learner.site, namespace=learner.namespace)
    return open_bucket(learner.run_uri, environment=environment)


def cluster_bucket(connection: Connection, *, learner: LearnerPlan) -> Bucket:
    """The whole bucket of the learner's cluster, which code and data of many runs share."""
    environment = bucket_environment(connection, site=learner.site, namespace=learner.namespace)
    return open_bucket(bucket_uri(learner.run_uri), environment=environment)


def bucket_uri(run_uri: str) -> str:
    """`s3://gkr/runs/digits/20261130-143755-3fa9c1` lies in `s3://gkr`."""
    bucket, runs, _ = run_uri.rpartition("/runs/")
    if not runs:
        raise ValueError(f"{run_uri!r} is not BUCKET/runs/EXPERIMENT/RUN")
    return bucket


def _secret(connection: Connection, name: str, *, namespace: str) -> Mapping[str, str]:
    if not name:
        return {}
    try:
        data = part(connection.get("Secret", name, namespace=namespace), "data")
    except (RefusedError, NotFoundError):
        return {}  # the caller's own credentials may do; if not, the store says so
    return {key: base64.b64decode(value).decode() for key, value in data.items()}
