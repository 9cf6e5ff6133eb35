"""A double of the encoding service: embeddings by hash of the caption, latents that are means, too little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from services.client import LocalClient
from services.prepare.embed import CaptionEmbedder, Embedder
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import EncodeArgs, EncodeReply, LatentsArgs, LatentsReply
from spec.errors import GkrError

WIDTH = 6


def embedding_of(caption: str) -> np.ndarray:
    """float32 [WIDTH]"""
    digest = hashlib.sha256(caption.encode()).digest()[:WIDTH]
    return np.frombuffer(digest, np.uint8).astype(np.float32) / 255


def latents_of(images: np.ndarray) -> np.ndarray:
    """float32 [images, 3, height / 8, width / 8]: means of 8 x 8 pixels."""
    count, height, width, channels = images.shape
    cells = images.reshape(count, height // 8, 8, width // 8, 8, channels).astype(np.float32)
    return cells.mean(axis=(2, 4)).transpose(0, 3, 1, 2)


class EncoderDouble(Service):
    """Runs out of memory on more than `most` captions at once, and on any caption with the word `huge`."""

    methods: ClassVar[tuple[Method, ...]] = (
        Method("encode", EncodeArgs, EncodeReply),
        Method("latents", LatentsArgs, LatentsReply),
    )

    def __init__(self, *, most: int = 1000) -> None:
        super().__init__(ServiceContext("encode", "encoder", Path(), manifest="", max_batch=64))
        self.most = most
        self.fingerprints = ["encoder-1"]
        """Taken in turn; the last one stays."""
        self.asked: list[int] = []
        self.captions: set[str] = set()
        self.failed = 0

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        if method == "latents":
            return [self._latents(call.tensors["images"]) for call in calls]
        return [self._encode(call.args.captions) for call in calls]

    def _latents(self, images: np.ndarray) -> Reply:
        self.asked.append(len(images))
        if len(images) > self.most:
            self.failed += 1
            raise MemoryError(f"out of memory on {len(images)} images")
        return Reply(LatentsReply(encoder="autoencoder-1"), {"latents": latents_of(images)})

    def _encode(self, captions: list[str]) -> Reply:
        self.asked.append(len(captions))
        self.captions.update(captions)
        if len(captions) > self.most or any("huge" in caption for caption in captions):
            self.failed += 1
            raise MemoryError(f"out of memory on {len(captions)} captions")
        encoder = self.fingerprints.pop(0) if len(self.fingerprints) > 1 else self.fingerprints[0]
        values = np.stack([embedding_of(caption) for caption in captions])
        return Reply(EncodeReply(encoder=encoder), {"embeddings": values})

    def embedders(self) -> list[Embedder]:
        """What asks it in this process."""
        return [CaptionEmbedder(LocalClient(self))]
