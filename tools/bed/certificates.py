"""Keys, certificates and kubeconfigs of a bed; made once by `openssl` and kept, so that a kubeconfig stays valid.

One authority per region signs all: it lives and ends with a cluster that nothing outside this machine can reach. Who a
component is to the API server stands in its certificate (common name: user, organisation: group).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from tools.bed.layout import Bed
from tools.bed.run import execute

DAYS = 3650
DEADLINE_SECONDS = 30.0
STAMP = "made-from"


@dataclass(frozen=True)
class Certificate:
    """What one says. Clients may use all, servers those with `names` (host names and addresses)."""

    name: str
    user: str
    group: str = ""
    names: tuple[str, ...] = ()
    kubeconfig: bool = False


def certificates(bed: Bed) -> list[Certificate]:
    """Every certificate of a bed."""
    service = [f"kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
    addresses = ["127.0.0.1", bed.address, bed.pod_gateway, bed.link_address, bed.api_service]
    masters, node = "system:masters", f"system:node:{bed.node}"
    local = ("localhost", "127.0.0.1")
    return [
        Certificate("apiserver", "kube-apiserver", names=("localhost", *service, *addresses)),
        Certificate("apiserver-kubelet", "kube-apiserver-kubelet-client", masters),
        Certificate("front-proxy", "front-proxy"),
        Certificate("admin", "gkr-bed-admin", masters, kubeconfig=True),
        Certificate("controller-manager", "system:kube-controller-manager", names=local, kubeconfig=True),
        Certificate("scheduler", "system:kube-scheduler", names=local, kubeconfig=True),
        Certificate("kubelet", node, "system:nodes", names=(bed.node, "127.0.0.1", bed.address), kubeconfig=True),
        Certificate("kube-proxy", "system:kube-proxy", kubeconfig=True),
        Certificate("kwok", "gkr-bed-kwok", masters, names=(*local, bed.address), kubeconfig=True),
    ]  # fmt: skip


def provide(bed: Bed) -> None:
    """Make all of them, unless those that are there were made from the same description."""
    if current(bed):
        return
    wanted = certificates(bed)
    scratch = bed.pki.with_name("pki.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True, mode=0o700)
    _authority(scratch)
    with ThreadPoolExecutor(max_workers=4) as pool:
        for task in [pool.submit(_make, scratch, one) for one in wanted]:
            task.result()
    key = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
    private, public = f"{scratch / 'service-accounts.key'}", f"{scratch / 'service-accounts.pub'}"
    execute([*key, "-out", private], deadline_seconds=DEADLINE_SECONDS)
    execute(["openssl", "pkey", "-in", private, "-pubout", "-out", public], deadline_seconds=DEADLINE_SECONDS)
    for one in wanted:
        if one.kubeconfig:
            _write(scratch / f"{one.name}.kubeconfig", kubeconfig(bed, one, folder=scratch))
    (scratch / STAMP).write_text(_digest(bed))
    bed.kubeconfig.unlink(missing_ok=True)
    shutil.rmtree(bed.pki, ignore_errors=True)
    scratch.rename(bed.pki)
    _write(bed.kubeconfig, (bed.pki / "admin.kubeconfig").read_text())


def current(bed: Bed) -> bool:
    """Whether those that are there were made from the same description."""
    stamp = bed.pki / STAMP
    return stamp.is_file() and bed.kubeconfig.is_file() and stamp.read_text() == _digest(bed)


def _digest(bed: Bed) -> str:
    return hashlib.sha256(json.dumps([bed.server, *map(astuple, certificates(bed))]).encode()).hexdigest()


def kubeconfig(bed: Bed, certificate: Certificate, *, folder: Path) -> str:
    """With the certificates inside, so that the file may be copied anywhere on this machine. JSON is YAML."""

    def inlined(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    cluster = {"server": bed.server, "certificate-authority-data": inlined(folder / "ca.crt")}
    user = {
        "client-certificate-data": inlined(folder / f"{certificate.name}.crt"),
        "client-key-data": inlined(folder / f"{certificate.name}.key"),
    }
    who = f"{bed.name}-{certificate.name}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": bed.name, "cluster": cluster}],
        "users": [{"name": who, "user": user}],
        "contexts": [{"name": bed.name, "context": {"cluster": bed.name, "user": who}}],
        "current-context": bed.name,
    }
    return json.dumps(document, indent=2) + "\n"


def _authority(folder: Path) -> None:
    (folder / "ca.cnf").write_text(_CA)
    command = [*_request(folder, "ca", subject="/CN=gkr-bed"), "-config", f"{folder / 'ca.cnf'}"]
    execute(command, deadline_seconds=DEADLINE_SECONDS)
    (folder / "ca.key").chmod(0o600)


def _make(folder: Path, certificate: Certificate) -> None:
    settings = folder / f"{certificate.name}.cnf"
    settings.write_text(extensions(certificate.names))
    group = f"/O={certificate.group}" if certificate.group else ""
    command = _request(folder, certificate.name, subject=f"{group}/CN={certificate.user}")
    signer = ["-CA", f"{folder / 'ca.crt'}", "-CAkey", f"{folder / 'ca.key'}", "-config", f"{settings}"]
    execute([*command, *signer], deadline_seconds=DEADLINE_SECONDS)
    (folder / f"{certificate.name}.key").chmod(0o600)


def _request(folder: Path, name: str, *, subject: str) -> list[str]:
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256"]
    files = ["-keyout", f"{folder / name}.key", "-out", f"{folder / name}.crt"]
    return [*new, *files, "-days", f"{DAYS}", "-subj", subject]


_CA = """\
[req]
distinguished_name = name
x509_extensions = v3
prompt = no
[name]
[v3]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""


def extensions(names: Sequence[str]) -> str:
    """OpenSSL's settings for a certificate of clients, and of a server if it has names."""
    usage = ["clientAuth", "serverAuth"] if names else ["clientAuth"]
    kinds = [f"{'IP' if name[0].isdecimal() else 'DNS'}:{name}" for name in names]
    alternatives = [f"subjectAltName = {', '.join(kinds)}"] if kinds else []
    return "\n".join([
        "[req]", "distinguished_name = name", "x509_extensions = v3", "prompt = no", "[name]", "[v3]",
        "basicConstraints = critical, CA:FALSE",
        "keyUsage = critical, digitalSignature",
        f"extendedKeyUsage = {', '.join(usage)}",
        *alternatives,
        "",
    ])  # fmt: skip


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
