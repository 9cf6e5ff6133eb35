"""Conditions for training: embeddings of captions, asked of the encoding service while training runs and cached by
content.

The cache is keyed by (encoder fingerprint, caption), so embeddings of two encoders never mix. It is for datasets that
repeat their captions, and bounded for those that do not: a rank keeps what it used last, its node's folder what came
first. Requests are sent ahead, when a batch leaves the loader, and waited for only when the step needs them.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.wire.messages import EncodeArgs, EncodeReply
from spec.errors import ConfigError

DEADLINE_SECONDS = 300.0
"""Longest wait for one answer: covers the restart of a replica, which imports its model again."""
REQUEST_CAPTIONS = 16
"""Captions of one request: small, so that a rank's queue is shared fairly."""
KEPT_BYTES = 64 * 2**20
"""Embeddings that a rank holds between two batches, and about what its node keeps in files."""


class EncodeClient(Protocol):
    """What is needed of `services.client`."""

    def submit(self, method: str, args: Any, *, reply: Any, deadline_seconds: float) -> Future[Any]: ...


class Conditions:
    """Embeddings by caption for one rank. Used by one thread."""

    def __init__(self, client: EncodeClient, *, folder: Path, width: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._client, self._width = client, width
        self._most = max(1, kept_bytes // (4 * width))
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._asked: dict[str, tuple[Future[Any], list[str]]] = {}
        self._folder = folder
        self._encoder = ""

    @property
    def encoder(self) -> str:
        """Fingerprint of the encoder; empty before `connect`."""
        return self._encoder

    def connect(self) -> None:
        """Learn the encoder's fingerprint by one real request, then take up what this node cached before."""
        reply = self._client.submit(
            "encode", EncodeArgs(captions=["a"]), reply=EncodeReply, deadline_seconds=DEADLINE_SECONDS
        )
        body = self._check(reply.result(timeout=DEADLINE_SECONDS + 5), captions=["a"])
        self._encoder = body.encoder
        self._cache = self._folder / self._encoder[:16]
        self._cache.mkdir(parents=True, exist_ok=True)
        self._files = sum(1 for _ in self._cache.iterdir())

    def prefetch(self, captions: list[str]) -> None:
        """Ask for what is not known yet; returns at once."""
        new = [
            text
            for text in dict.fromkeys(captions)
            if text not in self._known and text not in self._asked and not self._load(text)
        ]
        for first in range(0, len(new), REQUEST_CAPTIONS):
            part = new[first : first + REQUEST_CAPTIONS]
            future = self._client.submit(
                "encode", EncodeArgs(captions=part), reply=EncodeReply, deadline_seconds=DEADLINE_SECONDS
            )
            self._asked |= dict.fromkeys(part, (future, part))

    def get(self, captions: list[str]) -> np.ndarray:
        """Embeddings float32 [captions, width]; waits for what is under way."""
        self.prefetch(captions)
        for text in captions:
            if text not in self._known:
                future, part = self._asked[text]
                self._take(future.result(timeout=DEADLINE_SECONDS + 5), part=part)
            self._known.move_to_end(text)
        found = np.stack([self._known[text] for text in captions])
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return found

    def _take(self, reply: Any, *, part: list[str]) -> None:
        body = self._check(reply, captions=part)
        if body.encoder != self._encoder:
            raise ConfigError(
                f"the encoder changed from {self._encoder[:12]} to {body.encoder[:12]} during training",
                hint="all replicas of an encoding service must hold the same weights; start a new run",
            )
        for text, row in zip(part, reply.tensors["embeddings"], strict=True):
            self._known[text] = np.array(row, dtype=np.float32)
            self._asked.pop(text, None)
            self._store(text)

    def _check(self, reply: Any, *, captions: list[str]) -> EncodeReply:
        shape = reply.tensors["embeddings"].shape
        if shape != (len(captions), self._width):
            raise ConfigError(
                f"the encoder gives embeddings {list(shape)}, the model needs [{len(captions)}, {self._width}]",
                hint=f"set train.model.text_width to {shape[-1]}",
            )
        return reply.body

    def _path(self, text: str) -> Path:
        return self._cache / f"{hashlib.sha256(text.encode()).hexdigest()}.f32"

    def _load(self, text: str) -> bool:
        try:
            row = np.fromfile(self._path(text), dtype=np.float32)
        except FileNotFoundError:
            return False
        if row.size != self._width:
            return False
        self._known[text] = row
        return True

    def _store(self, text: str) -> None:
        if self._files >= self._most:
            return
        self._files += 1
        path = self._path(text)
        temporary = path.with_suffix(f".{os.getpid()}")
        self._known[text].tofile(temporary)
        temporary.replace(path)
