"""What a plan may ask for that the local backend does not carry out yet; refused before anything is written.

A setting that would be silently ignored is worse than a refusal: the person would read results of another run than the
one asked for.
"""

from __future__ import annotations

from spec.errors import ConfigError
from spec.plan import Plan


def refuse_what_is_not_carried_out(plan: Plan) -> None:
    """ConfigError that names every such setting with its remedy."""
    problems: list[str] = []
    if plan.train is None:
        problems.append("`run` starts a person's own command on clusters only; use `train` here")
    if plan.code is not None:
        problems.append("`code` is packed for clusters only; here the working tree runs as it is: leave it out")
    if plan.secrets:
        problems.append(f"secrets ({', '.join(plan.secrets)}) are mounted on clusters only; use `env` here")
    if any(service.shared_endpoints for learner in plan.learners for service in learner.services):
        problems.append("shared services belong to a platform; leave `shared` out here")
    if problems:
        raise ConfigError(
            "the local backend cannot run this experiment: " + "; ".join(problems),
            hint="`gkr plan` shows the whole plan; change these settings or launch on a cluster",
        )
