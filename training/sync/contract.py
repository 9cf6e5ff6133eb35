"""The part of a plan that learners and syncer must agree on before they may exchange a single weight."""

from __future__ import annotations

import hashlib
import json

from spec.errors import ConfigError
from spec.plan import Plan


def contract_hash(plan: Plan) -> str:
    """Digest over mode, steps, outer optimizer, averages and wire of the plan's sync; times and quorums may change."""
    if plan.syncer is None:
        raise ConfigError(
            f"the plan of run {plan.run} has no syncer", hint="give the experiment a second learner or a `sync` section"
        )
    config = plan.syncer.config
    agreed = {
        "experiment": plan.experiment,
        "mode": config.mode,
        "adopt": config.adopt,
        "inner_steps": config.inner_steps,
        "round_samples": plan.syncer.round_samples,
        "outer_learning_rate": config.outer_learning_rate,
        "outer_momentum": config.outer_momentum,
        "weighting": config.weighting,
        "fragments": config.fragments,
        "codec": config.codec,
        "ema": config.ema,
    }
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
