"""What a cluster or the way to it answers, as one line with a remedy.

Promises: an expired login, a dead server, a name that does not resolve, a missing right and a refusal by an admission
rule each become a GkrError with the cluster's name and the exit code of the contract; what is none of these passes
unchanged, because it is a bug of ours.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from spec.errors import GkrError, NotFoundError, RefusedError, UnreachableError

_LONGEST = 400


class ConflictError(RefusedError):
    """The object exists already, or somebody else owns a field of it."""


@contextmanager
def translate(cluster: str, *, server: str = "", doing: str = "") -> Generator[None]:
    """Errors of lightkube inside the block become GkrErrors. `doing` names the act, for example `create RayJob x`."""
    from httpx2 import HTTPError
    from lightkube.core.exceptions import ConfigError as LightkubeConfigError

    try:
        yield
    except (HTTPError, LightkubeConfigError, OSError) as error:
        mended = mend(error, cluster=cluster, server=server, doing=doing)
        if mended is None:
            raise
        raise mended from error


def mend(error: BaseException, *, cluster: str, server: str = "", doing: str = "") -> GkrError | None:
    """The error for a person; none if it is not about the cluster or the way to it."""
    import httpx2
    from lightkube.core.exceptions import ApiError
    from lightkube.core.exceptions import ConfigError as LightkubeConfigError

    if isinstance(error, ApiError):
        status: Any = error.status
        return api_error(int(status.code or 0), f"{status.message or status.reason}", cluster=cluster, doing=doing)
    if isinstance(error, httpx2.HTTPStatusError):
        body = _one_line(error.response.text) if error.response.is_closed else ""
        return api_error(error.response.status_code, body, cluster=cluster, doing=doing)
    where = f"cluster {cluster}"
    at = f" at {server}" if server else ""
    if isinstance(error, httpx2.TimeoutException):
        return UnreachableError(
            f"the API server{at} does not answer", where=where, hint="check the network or VPN, then try again"
        )
    if isinstance(error, httpx2.TransportError):
        return UnreachableError(f"cannot reach the API server{at}: {_transport(error)}", where=where, hint=_way(error))
    if isinstance(error, LightkubeConfigError):
        return UnreachableError(_one_line(f"{error}"), where=where, hint="check its entry in the kubeconfig")
    return None


def api_error(code: int, text: str, *, cluster: str, doing: str = "") -> GkrError:
    """The server's own answer, with what to do about it."""
    where, act = f"cluster {cluster}", f"cannot {doing}: " if doing else ""
    text = _one_line(text) or f"HTTP {code}"
    if code == 401:
        return UnreachableError(
            f"the login was refused: {text}",
            where=where,
            hint="it may have expired: log in again",
        )
    if code == 403:
        return RefusedError(
            f"{act}{text}", where=where, hint="ask an administrator of the cluster for this right in this namespace"
        )
    if code in {404, 410}:
        return NotFoundError(f"{act}{text}", where=where, hint=_absent(text))
    if code == 409:
        return ConflictError(f"{act}{text}", where=where, hint="`gkr ps` shows what is there; cancel it, or try again")
    if code in {400, 405, 413, 415, 422}:
        return RefusedError(f"{act}{text}", where=where, hint="the server's words name the field or the rule")
    if code == 429 or code >= 500:
        return UnreachableError(f"{act}the server failed: {text}", where=where, hint="try again in a moment")
    return RefusedError(f"{act}{text} (HTTP {code})", where=where)


def _absent(text: str) -> str:
    if "could not find the requested resource" in text or "page not found" in text:
        return "the cluster has no such kind of object: KubeRay or Kueue is not installed, or is another version"
    return "`gkr ps` and `gkr clusters list` show what is there"


def _transport(error: Exception) -> str:
    text = _one_line(f"{error}") or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return "its certificate is not signed by the kubeconfig's authority"
    if "Name or service not known" in text or "nodename nor servname" in text or "Temporary failure in name" in text:
        return "its name does not resolve"
    if "Connection refused" in text:
        return "connection refused"
    return text


def _way(error: Exception) -> str:
    text = f"{error}"
    if "certificate verify failed" in text.lower():
        return "the cluster may have been made anew: fetch its credentials again, then `gkr clusters add ... --replace`"
    return "is the cluster up, and is the network or VPN to it?"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
