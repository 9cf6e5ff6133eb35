"""The client for programs on an asyncio loop: the same calls, awaited.

A thin door to a `ServiceClient`, whose own thread does the I/O: one client serves any number of tasks. Cancelling a
task cancels its request, so a slot at the replica is free again as soon as possible. A `LocalClient` may stand in for
it, and computes in the loop's own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

import numpy as np
from msgspec import Struct

from services.client import GRACE_SECONDS, Asks, does_not_react
from services.service import Reply


class AsyncServiceClient:
    """Asks through `client`, which it closes at the end. Used on one loop."""

    def __init__(self, client: Asks) -> None:
        self._client = client

    async def call(
        self,
        method: str,
        args: Struct,
        *,
        reply: type[Struct],
        tensors: Mapping[str, np.ndarray] | None = None,
        deadline_seconds: float,
    ) -> Reply:
        """Ask, and await the reply. Raises what `ServiceClient.call` would."""
        future = self._client.submit(method, args, reply=reply, tensors=tensors, deadline_seconds=deadline_seconds)
        try:
            async with asyncio.timeout(deadline_seconds + GRACE_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise does_not_react() from error

    async def close(self) -> None:
        """Stop asking; what is unanswered fails."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
