"""Masking: what looks like a secret is never printed, also if nobody told the engine that it is one."""

from __future__ import annotations

import re
from typing import Any, cast

from infra.policy.resource import SECRET, UNKNOWN
from infra.review.fields import plain_path

SIGNATURE = "4dabf18193072939515e22adb298388d"
"""Key of the envelope in which the engine writes secrets, assets and archives."""
_NAMES = re.compile(
    r"password|passwd|secret|token|credential|private_?key|access_?key|api_?key|client_?key|kubeconfig|certificate"
    r"|ciphertext|stringdata|binarydata",
    re.IGNORECASE,
)
_NOT_SECRETS = re.compile(
    r"secretkeyref|secretref|imagepullsecrets|secretname|password_?secret|kmskeyname", re.IGNORECASE
)
_VALUES = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\bya29\.[\w.-]+|\bgh[pousr]_\w{20,}|\bhf_\w{20,}|\bAIza[\w-]{30,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)",
    re.DOTALL,
)
_ASSIGNED = re.compile(
    r"(?P<name>[\w-]*(?:password|passwd|secret|token|api[_-]?key|private[_-]?key)[\w-]*\"?\s*[=:]\s*\"?)(?P<value>[^\s\",}]+)",
    re.IGNORECASE,
)  # fmt: skip
LONGEST = 60


def shown(value: Any, *, path: str) -> str:
    """A value in a few characters, masked if its place or its form is that of a secret."""
    if value is None:
        return "(none)"
    if value == UNKNOWN:
        return "(known after the update)"
    if value == SECRET or _hides(value, path=path):
        return SECRET
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return _short(masked(str(value)))
    if isinstance(value, list):
        return f"{len(cast('list[Any]', value))} items"
    return f"{len(cast('dict[str, Any]', value))} fields"


def masked(text: str) -> str:
    """Free text, such as an error, without what looks like a secret in it."""
    return _ASSIGNED.sub(lambda match: f"{match['name']}{SECRET}", _VALUES.sub(SECRET, text))


def _hides(value: Any, *, path: str) -> bool:
    if isinstance(value, dict) and SIGNATURE in value:
        return True
    names = plain_path(path)
    if names == "data" or names.startswith("data.") or re.search(r"\benv\.value$", names):
        return True  # of a ConfigMap or Secret, and of a container: nobody can tell what is in there
    return bool(_NAMES.search(_NOT_SECRETS.sub("", names)))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:16]}...{line[19 - LONGEST :]}"
