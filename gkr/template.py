"""The file that `gkr init` writes. A test loads and resolves it on the local backend, so that it cannot go stale."""

from __future__ import annotations

from pathlib import Path

from spec.errors import ConfigError, RefusedError
from spec.names import check_label
from spec.problems import RemedyError

TEMPLATE = """\
# An experiment: one file, one name, one or more learners. `gkr explain FIELD` says what a field means.
version: 1
name: {name}

# One learner per cluster. Each takes many steps of its own; a syncer merges their weights (see sync below).
# On this machine the clusters local-0, local-1, ... stand for regions.
learners:
  - name: east
    cluster: local-0
    groups:
      # With GPUs a group says only what it wants: {{name: trainer, nodes: 2, resources: {{gpu: H200:8}}}}
      - {{name: trainer, nodes: 1, ranks: 2, resources: {{cpu: 1, memory: 2Gi, shm: 256Mi}}}}
  - name: west
    cluster: local-1
    groups:
      - {{name: trainer, nodes: 1, ranks: 2, resources: {{cpu: 1, memory: 2Gi, shm: 256Mi}}}}

# Our trainer: a recipe, and what differs from it. Instead of train, `run:` takes any command.
train:
  recipe: digits
  samples: 51200          # over all learners
  batch: 64               # of one step of one learner, over all its ranks

data:
  manifest: "{{bucket}}/data/digits/manifest.json"   # {{bucket}} is the learner's own region's
  source: sklearn-digits                           # made from this when the manifest does not exist yet

sync: {{mode: barrier, inner_steps: 20, outer_learning_rate: 0.7, outer_momentum: 0.5}}

services:
  encoder: {{kind: encode, resources: {{cpu: 250m, memory: 1Gi}}}}     # captions to embeddings
  sampler: {{kind: sample, resources: {{cpu: 250m, memory: 1Gi}}}}     # images from the merged model
  judge: {{kind: evaluate, resources: {{cpu: 250m, memory: 1Gi}}}}     # how good they are

# env: {{NCCL_DEBUG: WARN, WANDB_API_KEY: }}   # an empty value is taken from your environment
# secrets: [hf-token]                        # by name only
"""


def write_template(name: str, *, folder: Path = Path()) -> Path:
    """Write it as `name`.yaml (a given .yaml ending is kept out of the experiment's name); refuses to overwrite."""
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    try:
        label = check_label(stem)
    except RemedyError as problem:
        raise ConfigError(str(problem), hint=problem.hint) from None
    path = folder / f"{stem}.yaml"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=label))
    except FileExistsError:
        raise RefusedError(
            f"{path} exists already and is left as it is", hint="choose another name: gkr init NAME"
        ) from None
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}", hint="go to a folder you may write to") from None
    return path
