"""Embeddings of captions from the encoding service, over its client or in this process.

Promises: all values of a dataset come from one encoder, by its fingerprint, else RefusedError. If the encoder fails on
a batch (its memory is too small, say) a smaller one is asked, and for a while only so many; a caption that fails alone
is told to the caller, who drops its sample. So a dataset never has a hole where training would look for a value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.client import Asks
from services.wire.messages import EncodeArgs, EncodeReply
from spec.errors import DataError, RefusedError

DEADLINE_SECONDS = 300.0
MAX_FAILED_IN_A_ROW = 100
_GROW_AFTER = 8
"""Batches that succeeded, before a larger one is tried again."""
_FAILURES = (RefusedError, RuntimeError, MemoryError)
"""What an encoder that is out of memory raises: over the wire, from torch in this process, from Python itself."""

Value = NDArray[np.float32]


class Embedder:
    """Asks one encoding service. `fingerprint` and `width` are its first answer's."""

    def __init__(self, client: Asks) -> None:
        self._client = client
        self._most = 0
        """Captions that are asked at once; 0: as many as there are."""
        self._good = 0
        self._failed = 0
        self.fingerprint = ""
        first = self._ask(["a picture"])
        self.width = int(first.shape[1])

    @property
    def failing(self) -> bool:
        """The last caption failed: it may be the caption, or the encoder may be broken."""
        return self._failed > 0

    def embed(self, captions: list[str]) -> list[Value | str]:
        """A float32 [width] for each caption, or why there is none. DataError if the encoder fails on everything."""
        found: list[Value | str] = []
        before = self._most
        while len(found) < len(captions):
            some = captions[len(found) : len(found) + (self._most or len(captions))]
            try:
                found += list(self._ask(some))
            except _MixedError:
                raise
            except _FAILURES as error:
                self._good = 0
                if len(some) > 1:
                    self._most = (len(some) + 1) // 2
                    continue
                found.append(self._failure(error))
                if self._failed == 1:
                    self._most = before  # it was this caption, not the size
                continue
            self._failed = 0
            self._good += 1
            if self._most and self._good >= _GROW_AFTER:
                self._most, self._good = 2 * self._most, 0
            before = self._most
        return found

    def close(self) -> None:
        """Stop asking."""
        self._client.close()

    def _failure(self, error: Exception) -> str:
        self._failed += 1
        if self._failed >= MAX_FAILED_IN_A_ROW:
            raise DataError(
                f"the encoder failed on {self._failed} captions one after the other: {error}",
                hint="mend the encoding service and start again: what was prepared is kept",
            ) from error
        return f"the encoder failed on it: {error}"

    def _ask(self, captions: list[str]) -> Value:
        reply = self._client.call(
            "encode", EncodeArgs(captions=captions), reply=EncodeReply, deadline_seconds=DEADLINE_SECONDS
        )
        encoder = str(reply.body.encoder)
        self.fingerprint = self.fingerprint or encoder
        if encoder != self.fingerprint:
            raise _MixedError(
                f"the encoding service answered with encoder {encoder[:12]}, before with {self.fingerprint[:12]}",
                hint="embeddings of two encoders are never mixed: give all replicas the same weights and start again",
            )
        values = np.asarray(reply.tensors["embeddings"], dtype=np.float32)
        if values.shape[0] != len(captions):
            raise RefusedError(f"the encoder answered {len(captions)} captions with {values.shape[0]} embeddings")
        if not np.isfinite(values).all():
            raise RefusedError("the encoder answered with a NaN or infinity")
        return values


class _MixedError(RefusedError):
    """Two fingerprints."""
