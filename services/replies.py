"""Answers kept for a while, so that a request that arrives twice is not computed twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from services.wire.frames import Buffer

ClientT = TypeVar("ClientT", bound=Hashable)


class ReplyCache(Generic[ClientT]):
    """The newest replies of each client, bounded by number per client and by bytes over all.

    As many replies as the grant are enough per client: connections keep order, so what a client can have missed are its
    newest replies, and it cannot have more than its grant of them. Beyond the byte limit the oldest replies go first;
    a duplicate of one of those is computed again, which is allowed (delivery is at least once).
    """

    def __init__(self, *, per_client: int, max_bytes: int) -> None:
        self._per_client = per_client
        self._max_bytes = max_bytes
        self._replies: OrderedDict[tuple[ClientT, int], Sequence[Buffer]] = OrderedDict()
        self._order: dict[ClientT, dict[int, None]] = {}
        self.bytes = 0

    def put(self, client: ClientT, request: int, frames: Sequence[Buffer]) -> None:
        """Keep one reply."""
        self._remove(client, request)
        self._replies[client, request] = frames
        order = self._order.get(client)
        if order is None:
            order = self._order[client] = {}
        order[request] = None
        self.bytes += sum(map(len, frames))
        while len(order) > self._per_client:
            self._remove(client, next(iter(order)))
        while self.bytes > self._max_bytes and self._replies:
            self._remove(*next(iter(self._replies)))

    def get(self, client: ClientT, request: int) -> Sequence[Buffer] | None:
        """The reply to that request, if it is still here."""
        return self._replies.get((client, request))

    def forget(self, client: ClientT) -> None:
        """Drop all replies of a client that is gone."""
        for request in list(self._order.get(client, ())):
            self._remove(client, request)

    def _remove(self, client: ClientT, request: int) -> None:
        frames = self._replies.pop((client, request), None)
        if frames is None:
            return
        self.bytes -= sum(map(len, frames))
        order = self._order[client]
        del order[request]
        if not order:
            del self._order[client]
