"""etcd, API server, controller manager and scheduler. Flags that are not obvious were measured (see the comments)."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request

from tools.bed.layout import Bed
from tools.bed.processes import Component, probe
from tools.binaries import binary

ETCD = "http://127.0.0.1:2379"
PEERS = "http://127.0.0.1:2380"


def etcd(bed: Bed) -> Component:
    """Without fsync: what a machine that lost power would lose is a bed that `up` makes again."""
    command = (
        f"{binary('etcd')}", f"--data-dir={bed.data / 'etcd'}", "--unsafe-no-fsync", "--logger=zap", "--log-level=warn",
        f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}",
        f"--listen-peer-urls={PEERS}", f"--initial-advertise-peer-urls={PEERS}", f"--initial-cluster=default={PEERS}",
        "--auto-compaction-mode=periodic", "--auto-compaction-retention=5m", "--quota-backend-bytes=4294967296",
    )  # fmt: skip
    return Component("etcd", command, ready=lambda: probe(bed, f"{ETCD}/health"))


def apiserver(bed: Bed) -> Component:
    """Advertises the node's address, so that the Service `kubernetes` works from pods."""
    pki = bed.pki
    command = (
        f"{binary('kube-apiserver')}", f"--etcd-servers={ETCD}",
        "--bind-address=0.0.0.0", "--secure-port=6443", f"--advertise-address={bed.address}",
        f"--service-cluster-ip-range={bed.service_range}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        "--authorization-mode=Node,RBAC", "--allow-privileged=true", "--profiling=false",
        # Aggregated APIs (Kueue's visibility) check these; kube-proxy runs on the node, so the Service's address works.
        f"--requestheader-client-ca-file={pki / 'ca.crt'}", "--requestheader-allowed-names=front-proxy",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki / 'front-proxy.crt'}", f"--proxy-client-key-file={pki / 'front-proxy.key'}",
    )  # fmt: skip
    return Component("kube-apiserver", command, ready=lambda: answers(bed, "/readyz"))


def controller_manager(bed: Bed) -> Component:
    """No node gets a pod range: the one real node has the bridge, the fake ones have KWOK's addresses."""
    pki = bed.pki
    config = f"{pki / 'controller-manager.kubeconfig'}"
    command = (
        f"{binary('kube-controller-manager')}", f"--kubeconfig={config}", f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}", "--bind-address=127.0.0.1", "--leader-elect=false",
        f"--tls-cert-file={pki / 'controller-manager.crt'}",
        f"--tls-private-key-file={pki / 'controller-manager.key'}",
        f"--root-ca-file={pki / 'ca.crt'}", f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}", f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--use-service-account-credentials=true", "--controllers=*,-nodeipam", "--profiling=false",
        # The defaults (20 and 30) make hundreds of fake nodes and pods wait for the client, not for the cluster.
        "--kube-api-qps=200", "--kube-api-burst=400",
    )  # fmt: skip
    return Component(
        "kube-controller-manager", command, ready=lambda: probe(bed, "https://127.0.0.1:10257/healthz")
    )  # fmt: skip


def scheduler(bed: Bed) -> Component:
    """100 fake pods took 32 s with the default client limits and 2.4 s with these."""
    pki = bed.pki
    config = f"{pki / 'scheduler.kubeconfig'}"
    command = (
        f"{binary('kube-scheduler')}", f"--kubeconfig={config}", f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}", "--bind-address=127.0.0.1", "--leader-elect=false",
        f"--tls-cert-file={pki / 'scheduler.crt'}", f"--tls-private-key-file={pki / 'scheduler.key'}",
        "--profiling=false", "--kube-api-qps=500", "--kube-api-burst=1000",
    )  # fmt: skip
    return Component("kube-scheduler", command, ready=lambda: probe(bed, "https://127.0.0.1:10259/healthz"))


def answers(bed: Bed, path: str) -> str:
    """Ask the API server from the host, as everybody will; what it says if it is not ready."""
    context = ssl.create_default_context(cafile=f"{bed.pki / 'ca.crt'}")
    context.load_cert_chain(bed.pki / "admin.crt", bed.pki / "admin.key")
    try:
        with urllib.request.urlopen(f"{bed.server}{path}", context=context, timeout=5) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        failed = [line for line in error.read().decode(errors="replace").splitlines() if line.startswith("[-]")]
        return "; ".join(failed) or f"HTTP {error.code}"
    except OSError as error:
        return str(error)
    return ""
