"""The scripts that pods run. Static text: what differs between runs comes from the environment, never by pasting."""

from __future__ import annotations

_PREPARE = r"""#!/usr/bin/env bash
# Main process of every pod of a Ray cluster. KubeRay leaves the `ray start` it would have run in an environment
# variable; the raylet, and with it every process that Ray starts here, inherits what is set up before it.
set -euo pipefail

# The fabric's NCCL settings must be those of the plugin that is installed on this machine. A missing file means that
# the node pool's installer has not run: NCCL would fall back to plain TCP without a word, so stop instead.
if [ -n "${GKR_NCCL_PROFILE:-}" ]; then
  if [ ! -r "$GKR_NCCL_PROFILE" ]; then
    echo "$GKR_NCCL_PROFILE is not on node ${GKR_POD_NODE:-}: has the NCCL installer of its node pool run?" >&2
    exit 1
  fi
  set +eu # not our text
  # shellcheck disable=SC1090
  . "$GKR_NCCL_PROFILE"
  set -eu
fi

# A person's code goes before the image's, whose own PYTHONPATH is kept.
if [ -n "${GKR_CODE_DIR:-}" ]; then
  export PYTHONPATH="$GKR_CODE_DIR${PYTHONPATH:+:$PYTHONPATH}"
fi

# Ray opens many files; take what the container runtime allows.
ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$(ulimit -H -n)"

"""

_START_RAY = r"""exec python -m training.pod --role "$GKR_ROLE" -- bash -c "$KUBERAY_GEN_RAY_START_CMD"
"""

START = _PREPARE + _START_RAY

SHARED_START = (
    _PREPARE
    + r"""# The head of the shared services also starts them.
if [ "$GKR_ROLE" = head ]; then
  exec python -m training.pod --role head -- bash /gkr/plan/head.sh
fi
"""
    + _START_RAY
)

SHARED_HEAD = r"""#!/usr/bin/env bash
# Ray's head, and beside it the host that starts the replicas of the shared services and starts them again. They end
# together: a head without a host serves nobody, a host without a head has nothing to start with. kubelet then starts
# the container again.
set -uo pipefail
bash -c "$KUBERAY_GEN_RAY_START_CMD" &
ray=$!
python -m services.standing --plan "$GKR_PLAN" --first-port "$GKR_FIRST_PORT" &
host=$!
trap 'kill "$ray" "$host" 2>/dev/null' TERM INT
wait -n "$ray" "$host"
code=$?
kill "$ray" "$host" 2>/dev/null
wait
exit "$code"
"""

DRIVER = r"""#!/usr/bin/env bash
# Entrypoint of the Ray job: the driver of this pod's learner. Ray runs it on the head, in start.sh's environment, which
# tells it everything.
set -euo pipefail
exec python -m training.driver
"""

SYNCER = r"""#!/usr/bin/env bash
# Main process of the syncer's pod.
set -euo pipefail
exec python -m training.pod --role "$GKR_ROLE" -- python -m training.sync.server --plan "$GKR_PLAN" \
  --endpoints "$GKR_RUN_DIR/syncer.json" --events "$GKR_RUN_DIR/events.jsonl" --until-final
"""
