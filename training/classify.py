"""Why an attempt ended: one cause out of everything that its ranks left behind. Pure.

A failing rank takes its peers with it: their collectives break and they raise errors of their own. Those are victims
and never the cause. So the order is: a rank killed by a signal, then a person's error, then numbers that are not
finite, then any other first error, and the errors of broken collectives only if there is nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from training.processes import describe_exit

Kind = Literal["finished", "killed", "user", "numeric", "node_lost", "hang", "cascade", "syncer", "unknown"]

_USER_TYPES = {
    "ImportError",
    "ModuleNotFoundError",
    "SyntaxError",
    "NameError",
    "AttributeError",
    "TypeError",
    "ValueError",
    "KeyError",
    "IndexError",
    "NotImplementedError",
    "ConfigError",
    "DataError",
    "FileNotFoundError",
    "PermissionError",
    "NotADirectoryError",
    "IsADirectoryError",
    "AssertionError",
    "MemoryError",
    "OutOfMemoryError",
}
_SHAPE = re.compile(
    r"shapes? .*cannot be|size mismatch|must match the size|sizes of tensors|invalid for input of size"
    r"|mat1 and mat2|out of memory",
    re.I,
)
_CASCADE = re.compile(
    r"connection (closed|reset|refused|was reset)|broken pipe|peer|gloo|nccl|process group|socket|timed out"
    r"|store->get|remote error|recvValue|watchdog",
    re.I,
)
_LAST_SIGNAL = 64
_CASCADE_TYPES = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionResetError",
    "BrokenPipeError",
    "ConnectionError",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What ended an attempt."""

    kind: Kind
    text: str
    """One line for people, with the traceback's place for an error in code."""
    ranks: tuple[int, ...] = ()
    signature: str = ""
    """The same failure again has the same signature."""
    exit_code: int | None = None
    """The exit code the error asks for, if it stops the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """One ended rank."""

    rank: int
    code: int
    monotonic: float
    reason: Mapping[str, Any] | None


def classify(ends: Sequence[RankEnd]) -> Cause:
    """The cause of an attempt in which these ranks ended, not all with 0."""
    failed = sorted((end for end in ends if end.code != 0), key=lambda end: end.monotonic)
    if not failed:
        return Cause(kind="finished", text="finished", ranks=tuple(end.rank for end in ends))
    for picker in (_killed, _user, _numeric, _syncer, _other):
        cause = picker(failed)
        if cause is not None:
            return cause
    first = failed[0]
    return Cause(kind="cascade", text=f"rank {first.rank}: {_line(first)}", ranks=(first.rank,), signature="cascade")


def classify_commands(ends: Sequence[RankEnd]) -> Cause:
    """The cause when a person's commands ended, one per node. Only a signal, also one that a shell reports as 128 + n,
    is somebody else's doing: any other exit code is the command's own verdict."""
    failed = sorted((end for end in ends if end.code != 0), key=lambda end: end.monotonic)
    for end in failed:
        number = -end.code if end.code < 0 else end.code - 128
        if 0 < number <= _LAST_SIGNAL:
            name = describe_exit(-number)
            return Cause(kind="killed", text=name, ranks=(end.rank,), signature=f"killed {name}")
    if not failed:
        return Cause(kind="finished", text="finished", ranks=tuple(end.rank for end in ends))
    first = failed[0]
    text = f"the command of node {first.rank} ended with {describe_exit(first.code)}"
    return Cause(kind="user", text=text, ranks=(first.rank,), signature=f"user {first.code}")


def _killed(failed: Sequence[RankEnd]) -> Cause | None:
    killed = [end for end in failed if end.code < 0]
    if not killed:
        return None
    name = describe_exit(killed[0].code)
    return Cause(kind="killed", text=name, ranks=tuple(end.rank for end in killed), signature=f"killed {name}")


def _user(failed: Sequence[RankEnd]) -> Cause | None:
    for end in failed:
        kind = str((end.reason or {}).get("type", ""))
        message = str((end.reason or {}).get("message", ""))
        if kind in _USER_TYPES or (kind == "RuntimeError" and _SHAPE.search(message) and not _is_cascade(end)):
            code = (end.reason or {}).get("exit_code")
            return Cause(
                kind="user",
                text=f"rank {end.rank}: {_line(end)}",
                ranks=(end.rank,),
                signature=f"user {kind} {(end.reason or {}).get('where', '')}",
                exit_code=int(code) if code is not None else None,
            )
    return None


def _numeric(failed: Sequence[RankEnd]) -> Cause | None:
    for end in failed:
        if (end.reason or {}).get("type") in {"FloatingPointError", "NumericError"}:
            return Cause(kind="numeric", text=f"rank {end.rank}: {_line(end)}", ranks=(end.rank,), signature="numeric")
    return None


def _syncer(failed: Sequence[RankEnd]) -> Cause | None:
    for end in failed:
        family = (end.reason or {}).get("family")
        if family in {"UnreachableError", "RefusedError"}:
            code = (end.reason or {}).get("exit_code")
            return Cause(
                kind="syncer",
                text=f"rank {end.rank}: {_line(end)}",
                ranks=(end.rank,),
                signature=f"syncer {family}",
                exit_code=int(code) if code is not None else None,
            )
    return None


def _other(failed: Sequence[RankEnd]) -> Cause | None:
    for end in failed:
        if not _is_cascade(end):
            kind = str((end.reason or {}).get("type", describe_exit(end.code)))
            return Cause(
                kind="unknown",
                text=f"rank {end.rank}: {_line(end)}",
                ranks=(end.rank,),
                signature=f"unknown {kind} {(end.reason or {}).get('where', '')}",
            )
    return None


def _is_cascade(end: RankEnd) -> bool:
    reason = end.reason or {}
    if reason.get("type") in _CASCADE_TYPES:
        return True
    return reason.get("type") == "RuntimeError" and bool(_CASCADE.search(str(reason.get("message", ""))))


def _line(end: RankEnd) -> str:
    reason = end.reason
    if not reason:
        return describe_exit(end.code)
    message = str(reason.get("message", "")).strip().splitlines()
    where = f" ({reason['where']})" if reason.get("where") else ""
    return f"{reason.get('type', 'error')}: {message[0] if message else ''}{where}"
