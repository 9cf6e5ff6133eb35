"""The answers of a store that callers decide on.

Everything else is RefusedError (rights, credentials, a path that cannot be) or UnreachableError (no answer in time, no
space): the same call may succeed later.
"""

from __future__ import annotations

from spec.errors import DataError, GkrError, UnreachableError
from spec.shard_bytes import REMEDY


class MissingError(DataError):
    """There is no such object."""


class ExistsError(GkrError):
    """An object that was to be created is there already."""


class NoRoomError(UnreachableError):
    """There is no room on this machine for a copy."""


class StaleError(GkrError):
    """An object that was to be replaced is not the one that was read."""


def missing_shard(where: str) -> DataError:
    """What a missing object is to those who read a dataset."""
    return DataError("a shard of the dataset does not exist", where=where, hint=REMEDY)
