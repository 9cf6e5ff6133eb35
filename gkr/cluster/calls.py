"""Several requests at once: a command's time is then that of the slowest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST = 8


def each(over: Iterable[T], call: Callable[[T], R], *, most: int = _MOST) -> list[R]:
    """The answers in order; the first error is raised once all have answered."""
    items = list(over)
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(most, len(items))) as pool:
        return list(pool.map(call, items))
