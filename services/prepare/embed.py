"""Embeddings of captions and latents of images from the encoding service, over its client or in this process.

Promises: all values of a dataset come from one encoder, by its fingerprint, else RefusedError. If the encoder fails on
a batch (its memory is too small, say) a smaller one is asked, and for a while only so many; a sample that fails alone
is told to the caller, who drops it. So a dataset never has a hole where training would look for a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.client import Asks
from services.prepare.examine import Kept
from services.wire.messages import EncodeArgs, EncodeReply, LatentsArgs, LatentsReply
from spec.errors import DataError, RefusedError
from storage.images import decode_into

DEADLINE_SECONDS = 300.0
MAX_FAILED_IN_A_ROW = 100
_IMAGES = 8
_GROW_AFTER = 8
"""Batches that succeeded, before a larger one is tried again."""
_FAILURES = (RefusedError, RuntimeError, MemoryError)
"""What an encoder that is out of memory raises: over the wire, from torch in this process, from Python itself."""

Value = NDArray[np.float32]


class Embedder(ABC):
    """Asks one encoding service for one feature. `fingerprint` is its first answer's."""

    name: str
    of: Literal["caption", "image"]

    def __init__(self, client: Asks, *, most: int = 0) -> None:
        """`most`: samples that are asked at once at first; 0: as many as there are."""
        self._client = client
        self._most = most
        self._good = 0
        self._failed = 0
        self.fingerprint = ""

    @property
    def failing(self) -> bool:
        """The last sample failed: it may be the sample, or the encoder may be broken."""
        return self._failed > 0

    @abstractmethod
    def _call(self, samples: Sequence[Kept]) -> tuple[str, Value]:
        """The encoder's fingerprint and a value for each."""

    def embed(self, samples: Sequence[Kept]) -> list[Value | str]:
        """A value for each sample, or why there is none. DataError if the encoder fails on everything."""
        found: list[Value | str] = []
        before = self._most
        while len(found) < len(samples):
            some = samples[len(found) : len(found) + (self._most or len(samples))]
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
                    self._most = before  # it was this sample, not the size
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
                f"the encoder failed on {self._failed} samples one after the other: {error}",
                hint="mend the encoding service and start again: what was prepared is kept",
            ) from error
        return f"the encoder failed on it: {error}"

    def _ask(self, samples: Sequence[Kept]) -> Value:
        encoder, values = self._call(samples)
        self.accept(encoder)
        if values.shape[0] != len(samples):
            raise RefusedError(f"the encoder answered {len(samples)} samples with {values.shape[0]} values")
        if not np.isfinite(values).all():
            raise RefusedError("the encoder answered with a NaN or infinity")
        return values.astype(np.float32, copy=False)

    def accept(self, encoder: str) -> None:
        """Note the fingerprint of an answer; RefusedError if it is another one than before."""
        self.fingerprint = self.fingerprint or encoder
        if encoder != self.fingerprint:
            raise _MixedError(
                f"the encoding service answered with encoder {encoder[:12]}, before with {self.fingerprint[:12]}",
                hint="values of two encoders are never mixed: give all replicas the same weights and start again",
            )


class CaptionEmbedder(Embedder):
    """Embeddings of captions, [width]."""

    name = "caption_embedding"
    of = "caption"

    def __init__(self, client: Asks) -> None:
        super().__init__(client)
        self.accept(self._encode(["a picture"])[0])

    def _call(self, samples: Sequence[Kept]) -> tuple[str, Value]:
        return self._encode([one.caption for one in samples])

    def _encode(self, captions: list[str]) -> tuple[str, Value]:
        args = EncodeArgs(captions=captions)
        reply = self._client.call("encode", args, reply=EncodeReply, deadline_seconds=DEADLINE_SECONDS)
        return str(reply.body.encoder), np.asarray(reply.tensors["embeddings"])


class LatentEmbedder(Embedder):
    """Latents of images that are brought to one size, [channels, height / reduction, width / reduction]."""

    name = "latents"
    of = "image"

    def __init__(self, client: Asks, *, width: int, height: int) -> None:
        super().__init__(client, most=_IMAGES)
        self._shape = (height, width, 3)
        self.accept(self._encode(np.zeros((1, *self._shape), np.uint8))[0])

    def _call(self, samples: Sequence[Kept]) -> tuple[str, Value]:
        images = np.empty((len(samples), *self._shape), np.uint8)
        for image, one in zip(images, samples, strict=True):
            decode_into(image, one.image)
        return self._encode(images)

    def _encode(self, images: NDArray[np.uint8]) -> tuple[str, Value]:
        reply = self._client.call(
            "latents", LatentsArgs(), reply=LatentsReply, tensors={"images": images}, deadline_seconds=DEADLINE_SECONDS
        )
        return str(reply.body.encoder), np.asarray(reply.tensors["latents"])


class _MixedError(RefusedError):
    """Two fingerprints."""
