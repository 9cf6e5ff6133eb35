"""Plan or stack configuration -> Kubernetes objects as plain dicts. Pure: no file, no clock, no network.

    from manifests.render import render      # cluster name -> its objects
    for manifest in render(plan)["us-east5"]: ...

Objects come in the order in which they are applied. One learner is a RayJob (HTTPMode, so no submitter pod) with its
ConfigMap, service account, network policy and disruption budget; the syncer is a Job with a Service, in the first
learner's cluster. The same plan gives the same objects, byte for byte. Values of secrets never come here: pods refer to
Secrets by name, and those with the variables of the caller (`names.env_secret`) and with the keys of the sync
(`names.keys_secret`) are made by `gkr`.

What a pod finds (the contract with `training`):

| where | what |
| --- | --- |
| /gkr/plan | plan.json, start.sh, driver.sh, run.sh (a person's `run:`) or syncer.sh; read-only |
| /gkr/run | scratch of the run: logs, state; gone with the pod |
| /gkr/code | the person's folder, if `code:` is given; also the working folder and first on PYTHONPATH |
| /gkr/keys | what proves to syncer, learners and replicas that they are of one run; GKR_SYNC_KEYS |
| /gkr/shared-keys | the token of the platform's services, for replicas and those who ask them; GKR_SHARED_KEYS |
| GKR_LEARNER, GKR_ROLE, GKR_GROUP | who the pod is; roles: head, trainer, service, syncer |
| GKR_PLAN, GKR_RUN_DIR, GKR_CODE_DIR | the paths above |
| GKR_METRICS_PORT | in pods of replicas: where their metrics are served |
| GKR_POD, GKR_POD_NODE, GKR_POD_IP | its name, machine and address |
| Ray resources | `gkr_group_<group>` and `gkr_service_<service>`, one per pod |

What rules it keeps and why is written where each rule is kept: `checks` (what cannot be rendered), `values` (kubelet's
expansion), `rayjob` (KubeRay and Kueue), `pods`, `placing` and `fabric` (what a pod asks for), `support` (who may reach
it).
"""
