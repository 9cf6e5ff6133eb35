"""How object stores are spoken to: client settings from the environment, and their errors in this project's words.

Settings that are not in a URI come by the object stores' own names (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
GOOGLE_APPLICATION_CREDENTIALS, ...). obstore is imported on first use: most processes never need it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from spec.errors import DataError, GkrError, RefusedError, UnreachableError
from storage.errors import ExistsError, MissingError, StaleError

_SETTINGS = {
    "s3": re.compile(r"aws_(access_key_id|secret_access_key|session_token|region|endpoint_url|default_region)"),
    "gs": re.compile(r"google_(service_account|service_account_key|application_credentials|base_url)"),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a call may take."""

    connect_seconds: float = 5.0
    request_seconds: float = 60.0
    """One request, its body included: a piece of a large object, never the whole."""
    retry_seconds: float = 30.0
    """From the first try of a request to the beginning of its last."""


@dataclass(frozen=True)
class Client:
    """Two connections to one bucket."""

    repeating: Any
    """Repeats a request that failed: for reads, and for writes whose repetition changes nothing."""
    single: Any
    """Sends each request once: for conditional writes, where a repetition could meet its own first try."""
    limits: Limits


def connect(root: str, *, environment: Mapping[str, str], limits: Limits) -> Client:
    """A client of `s3://bucket` or `gs://bucket`. Makes no request."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    known = _SETTINGS[root.partition(":")[0]]
    config: Any = {
        name.lower(): value for name, value in environment.items() if known.fullmatch(name.lower()) and value
    }
    plain = config.get("aws_endpoint_url", "").startswith("http://")
    options: Any = {
        "timeout": timedelta(seconds=limits.request_seconds),
        "connect_timeout": timedelta(seconds=limits.connect_seconds),
        "allow_http": plain or environment.get("AWS_ALLOW_HTTP", "").lower() == "true",
    }

    def store(retries: int) -> Any:
        retry: Any = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=limits.retry_seconds),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
        }
        return from_url(root, config=config or None, client_options=options, retry_config=retry)

    try:
        return Client(repeating=store(20), single=store(0), limits=limits)
    except (BaseError, ValueError) as error:
        hint = "check AWS_ENDPOINT_URL and the other AWS_ and GOOGLE_ variables"
        raise RefusedError(f"the object store cannot be set up: {first_line(error)}", where=root, hint=hint) from error


@contextmanager
def store_errors(where: str, *, writes: bool = False) -> Generator[None]:
    """Turn what obstore raises into the errors of a store; one that is ours already passes."""
    from obstore import exceptions as ob

    try:
        yield
    except GkrError:
        raise
    except ob.AlreadyExistsError as error:
        raise ExistsError("the object is there already", where=where) from error
    except ob.PreconditionError as error:
        raise StaleError("the object was changed by somebody else", where=where) from error
    except (ob.BaseError, OSError) as error:  # OSError: obstore's own for an object that is not there, or a connection
        raise _translated(error, where=where, writes=writes) from error


def _translated(error: Exception, *, where: str, writes: bool) -> GkrError:
    from obstore import exceptions as ob

    said = first_line(error)
    found = _CODE.search(str(error))
    code = found[1] if found else ""
    refused = isinstance(error, (ob.PermissionDeniedError, ob.UnauthenticatedError))
    if refused or code in _REFUSED or _REFUSED_STATUS.search(said):
        hint = "check the credentials in the environment, or the rights of the pod's service account on the bucket"
        return RefusedError(f"access is refused: {code or said}", where=where, hint=hint)
    missing = isinstance(error, FileNotFoundError)
    if code == "NoSuchBucket" or (missing and writes):
        return RefusedError(
            f"there is no such bucket: {said}", where=where, hint="create the bucket, or correct its name"
        )
    if missing:
        return MissingError("there is no such object", where=where, hint="check the address")
    if _BEYOND_STATUS.search(said):
        return DataError("the object ends before the bytes that are asked for", where=where)
    hint = "check the endpoint and the network to it"
    return UnreachableError(f"the object store failed: {said}", where=where, hint=hint)


_CODE = re.compile(r"<Code>(\w+)</Code>")
_REFUSED = frozenset(
    {
        "AccessDenied",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "XAdminUserNotFound",
    }
)
_REFUSED_STATUS = re.compile(r"status code: 40[13] ")
_BEYOND_STATUS = re.compile(r"status code: 416 ")


def library() -> Any:
    """obstore, loaded on first use; only partly typed."""
    import obstore

    return obstore


def first_line(error: Exception) -> str:
    """What an error says, short."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
