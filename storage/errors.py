"""The answers of a store that callers decide on.

Everything else is RefusedError (rights, credentials, a path that cannot be) or UnreachableError (no answer in time, no
space): the same call may succeed later.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

from spec.errors import DataError, GkrError, UnreachableError
from spec.shard_bytes import REMEDY

T = TypeVar("T")


class MissingError(DataError):
    """There is no such object."""


class ExistsError(GkrError):
    """An object that was to be created is there already."""


class NoRoomError(UnreachableError):
    """There is no room on this machine for a copy."""


class StaleError(GkrError):
    """An object that was to be replaced is not the one that was read."""


def answer_of(future: Future[T], *, seconds: float, where: str) -> T:
    """What a request in a thread of its own brings; UnreachableError if its own deadlines did not end it in time."""
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # its own error
            raise
        raise UnreachableError(
            f"the store has not answered for {seconds:g} s",
            where=where,
            hint="check the endpoint and the network to it",
        ) from error


def missing_shard(where: str) -> DataError:
    """What a missing object is to those who read a dataset."""
    return DataError("a shard of the dataset does not exist", where=where, hint=REMEDY)


def damaged_shard(error: DataError) -> DataError:
    """What an object of other bytes is to those who read a dataset."""
    return DataError(f"a shard of the dataset is damaged: {error.message}", where=error.where, hint=REMEDY)
