"""Login helpers of a kubeconfig (`exec`): run when a token is needed, again when the server refuses the one we have.

lightkube runs helpers too, but only of the two older versions of the protocol, without client certificates, and reports
a missing helper as a traceback.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from lightkube.config.models import User

from gkr.cluster.kubeconfig import Context
from spec.errors import UnreachableError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

_HELPER_SECONDS = 60.0
_VERSIONS = tuple(f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1"))


def require_helper(user: dict[str, Any], *, folder: Path, cluster: str) -> None:
    """Refuse at once, before any request, if the helper that the kubeconfig names is not installed."""
    fields = user.get("exec")
    if not fields:
        return
    if fields.get("apiVersion") not in _VERSIONS:
        raise UnreachableError(
            f"its login helper speaks {fields.get('apiVersion')}, which is not known",
            where=f"cluster {cluster}",
            hint=f"known: {', '.join(_VERSIONS)}",
        )
    if shutil.which(_command(fields, folder)) is None:
        hint = " ".join(str(fields.get("installHint") or "").split()) or "install it, or put it on PATH"
        raise UnreachableError(
            f"its login helper {fields.get('command')} is not installed", where=f"cluster {cluster}", hint=hint
        )


def helper_transport(context: Context, *, config: SingleConfig, name: str) -> HelperTransport | None:
    """A transport that logs in with the context's helper; none if it has none."""
    from lightkube.config.client_adapter import verify_cluster

    if not context.user.get("exec"):
        return None
    verify = verify_cluster(config.cluster, config.user or User(), config.abs_file)
    return HelperTransport(context, name=name, verify=verify)


class HelperTransport(httpx2.BaseTransport):
    """Requests with the credentials of a login helper. `name` is the cluster's."""

    def __init__(self, context: Context, *, name: str, verify: ssl.SSLContext) -> None:
        self._context, self._name, self._verify = context, name, verify
        self._proxy = _proxy(context)
        self._token = ""
        self._inner: httpx2.HTTPTransport | None = None

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Log in if we have not, or if the server says that the login is over."""
        fresh = self._inner is None
        if fresh:
            self._log_in()
        answer = self._send(request)
        if answer.status_code != 401 or fresh:
            return answer
        answer.close()
        self._log_in()
        return self._send(request)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _send(self, request: httpx2.Request) -> httpx2.Response:
        assert self._inner is not None, "logged in before"
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return self._inner.handle_request(request)

    def _log_in(self) -> None:
        status = _run(self._context, name=self._name)
        self.close()
        self._token = str(status.get("token") or "")
        certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
        if certificate and key:
            _load_pair(self._verify, f"{certificate}", f"{key}")
        self._inner = httpx2.HTTPTransport(verify=self._verify, proxy=self._proxy)


def _proxy(context: Context) -> str | None:
    """A client with a transport of its own does not ask the environment for a proxy."""
    own = context.cluster.get("proxy-url")
    parts = urlsplit(context.server)
    if own or not parts.hostname or proxy_bypass(parts.hostname):
        return own
    return getproxies().get(parts.scheme)


def _run(context: Context, *, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = context.user["exec"]
    folder, cluster = context.folder, context.cluster
    arguments: list[Any] = fields.get("args") or []
    variables: list[dict[str, Any]] = fields.get("env") or []
    where, helper = f"cluster {name}", fields.get("command")
    info: dict[str, Any] = {"apiVersion": fields.get("apiVersion"), "kind": "ExecCredential"}
    info["spec"] = {"interactive": False, **({"cluster": cluster} if fields.get("provideClusterInfo") else {})}
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    environment |= {str(one["name"]): str(one["value"]) for one in variables}
    try:
        done = subprocess.run(
            [_command(fields, folder), *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELPER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"its login helper {helper} did not answer within {_HELPER_SECONDS:g} s", where=where, hint="log in again"
        ) from None
    except OSError as error:
        raise UnreachableError(
            f"its login helper {helper} cannot be started: {error.strerror}", where=where, hint="install it again"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.decode(errors="replace").split())[-300:] or "it said nothing"
        raise UnreachableError(
            f"its login helper {helper} ended with {done.returncode}: {said}", where=where, hint="log in again"
        )
    try:
        status = json.loads(done.stdout)["status"]
        found: dict[str, Any] = dict(status)
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(
            f"its login helper {helper} printed no credential", where=where, hint="run it by hand to see why"
        ) from None
    return found


def _command(fields: dict[str, Any], folder: Path) -> str:
    """A command with a slash that is not absolute lies beside the kubeconfig."""
    command = str(fields.get("command") or "")
    return str(folder / command) if os.sep in command and not command.startswith(os.sep) else command


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """ssl takes files only; they are gone when it has read them."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{certificate}\n{key}\n")
        file.flush()
        context.load_cert_chain(file.name)
