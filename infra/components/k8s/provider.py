"""The one way to a cluster: every Kubernetes resource of a platform stack goes through this provider."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_kubernetes as kubernetes


@dataclass(frozen=True, kw_only=True)
class ClusterProviderArgs:
    """How a cluster is reached."""

    cluster: str
    """Its name. It stands for the cluster: without a fixed identity, a kubeconfig that changed in form only would
    replace the provider, and everything in the cluster with it."""
    kubeconfig: pulumi.Input[str]
    """Secret."""


class ClusterProvider(pulumi.ComponentResource):
    """The provider, with server-side apply: KubeRay's resource types are too large for anything else."""

    def __init__(self, name: str, args: ClusterProviderArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:k8s:ClusterProvider", name, None, opts)
        self.provider = kubernetes.Provider(
            name,
            kubeconfig=args.kubeconfig,
            cluster_identifier=args.cluster,
            enable_server_side_apply=True,
            # A cluster that is gone took its objects along: destroying this stack must not hang on it.
            delete_unreachable=True,
            opts=pulumi.ResourceOptions(parent=self, additional_secret_outputs=["kubeconfig"]),
        )
        self.register_outputs({"cluster": args.cluster})
