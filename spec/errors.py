"""The errors a person sees.

Every failure that a user can cause or mend is one of these classes: one sentence with the value and the place, one hint
with the remedy, and the exit code of the contract (design section 6). Anything else that escapes is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_CONFIG = 3
EXIT_UNREACHABLE = 4
EXIT_PREFLIGHT = 5
EXIT_REFUSED = 6
EXIT_FAILED = 100
EXIT_UNFINISHED = 101
EXIT_NOT_FOUND = 102
EXIT_CANCELLED = 103
EXIT_INTERRUPTED = 130


class GkrError(Exception):
    """Base of all errors with a place and a remedy."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{remedy}"


class ConfigError(GkrError):
    """What a person wrote cannot be accepted."""

    exit_code = EXIT_CONFIG


class UnreachableError(GkrError):
    """A cluster or an endpoint did not answer, or refused the login."""

    exit_code = EXIT_UNREACHABLE


class PreflightError(GkrError):
    """A preflight check failed; nothing was started."""

    exit_code = EXIT_PREFLIGHT


class RefusedError(GkrError):
    """The cluster, the syncer or a service understood the request and refused it."""

    exit_code = EXIT_REFUSED


class NotFoundError(GkrError):
    """A run, a file or a field of that name does not exist."""

    exit_code = EXIT_NOT_FOUND


class DataError(GkrError):
    """Bytes on disk are missing, damaged or of another layout than their manifest says."""

    exit_code = EXIT_FAILED
