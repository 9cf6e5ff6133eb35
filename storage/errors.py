"""The three answers of a store that callers decide on.

Everything else is RefusedError (rights, credentials, a path that cannot be) or UnreachableError (no answer in time, no
space): the same call may succeed later.
"""

from __future__ import annotations

from spec.errors import DataError, GkrError


class MissingError(DataError):
    """There is no such object."""


class ExistsError(GkrError):
    """An object that was to be created is there already."""


class StaleError(GkrError):
    """An object that was to be replaced is not the one that was read."""
