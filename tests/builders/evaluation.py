"""A real evaluation service on the digits: what its tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.evaluate import EvaluateService
from services.evaluate.reference import load_splits
from services.prepare.__main__ import prepare
from services.service import Call, Reply, ServiceContext
from services.wire.messages import ScoreArgs, ScoreReply
from spec.errors import GkrError
from spec.shards import open_manifest


class Bench:
    """A dataset, a cache and a warm service."""

    def __init__(self, folder: Path) -> None:
        self.uri = (folder / "digits" / "manifest.json").as_uri()
        prepare(self.uri, source="sklearn-digits", shard_samples=256, lock_timeout_seconds=30)
        self.manifest = open_manifest(self.uri)
        self.cache = folder / "cache"
        self.service = self.fresh()
        self.service.warm_up()
        self.train, self.test = load_splits(self.uri, cache=self.cache)

    def fresh(self, *, model: str = "") -> EvaluateService:
        """Another replica on the same machine."""
        return EvaluateService(
            ServiceContext(
                kind="evaluate", name="judge", cache_dir=self.cache, manifest=self.uri, max_batch=64, model=model
            )
        )

    @property
    def weights(self) -> Path:
        (path,) = self.cache.glob("classifier-*.safetensors")
        return path

    def answer(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Reply | GkrError:
        (answer,) = self.service.compute("score", [self.call(images, labels)])
        return answer

    def call(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Call:
        return Call(args=ScoreArgs(manifest=self.uri, labels=labels.tolist()), tensors={"images": images})

    def score(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> ScoreReply:
        answer = self.answer(images, labels)
        assert isinstance(answer, Reply), answer
        return answer.body
