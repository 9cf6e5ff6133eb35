"""The evaluation service: `score` at once, or `accumulate` over many calls and then `total`.

A replica reads the dataset and trains (or loads) the classifier before it is published. Scores of two manifests never
mix: each has its own yardstick, and only the newest few are kept. What is accumulated lies in a folder or bucket, not
in the replica: any replica takes the next call, and one that dies takes nothing with it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from services.evaluate.clip import ClipScorer
from services.evaluate.parts import Parts
from services.evaluate.yardstick import Yardstick, make_yardstick
from services.model_folder import local_model
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import AccumulateArgs, AccumulateReply, ScoreArgs, ScoreReply, TotalArgs, TotalReply
from spec.errors import GkrError, RefusedError
from storage import open_bucket

KEPT_YARDSTICKS = 2
_CANARY_IMAGES = 16
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _manifest_of(args: Any) -> str:
    return args.manifest


def _images_of(args: Any) -> int:
    return max(1, len(args.labels))


def _images(call: Call) -> NDArray[np.uint8]:
    images = call.tensors.get("images")
    if images is None:
        raise RefusedError("the call carries no tensor `images`", hint="send uint8 [images, height, width, channels]")
    return images


class EvaluateService(Service):
    """Scores generated images against the real ones of a manifest."""

    methods: ClassVar[tuple[Method, ...]] = (
        Method(name="score", args=ScoreArgs, reply=ScoreReply, batch_key=_manifest_of, cost=_images_of),
        Method(name="accumulate", args=AccumulateArgs, reply=AccumulateReply, batch_key=_manifest_of, cost=_images_of),
        Method(name="total", args=TotalArgs, reply=TotalReply, batch_key=_manifest_of),
    )

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._yardsticks: OrderedDict[tuple[str, tuple[int, ...]], Yardstick] = OrderedDict()

    def warm_up(self) -> None:
        """Train or load the classifier of the context's manifest and score as many images as a canary has."""
        if not self.context.manifest:
            return
        yardstick = self._yardstick(self.context.manifest, shape=self.context.shape)
        labels = yardstick.held_out.labels[:_CANARY_IMAGES].tolist()
        args = ScoreArgs(manifest=self.context.manifest, labels=labels)
        images = np.zeros((len(labels), *yardstick.shape), dtype=np.uint8)
        (answer,) = self.compute("score", [Call(args=args, tensors={"images": images})])
        if isinstance(answer, GkrError):
            raise answer

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Answer each call by itself; one bad call does not touch its neighbours."""
        answer = {"score": self._score, "accumulate": self._accumulate, "total": self._total}[method]
        answers: list[Reply | GkrError] = []
        for call in calls:
            try:
                answers.append(Reply(body=answer(call)))
            except GkrError as error:
                answers.append(error)
        return answers

    @cached_property
    def _clip(self) -> ClipScorer:
        folder = local_model(self.context.model, cache_dir=self.context.cache_dir)
        return ClipScorer(folder)

    def _score(self, call: Call) -> ScoreReply:
        args: ScoreArgs = call.args
        images = _images(call)
        return self._yardstick(args.manifest, shape=images.shape[1:]).score(images, labels=args.labels)

    def _accumulate(self, call: Call) -> AccumulateReply:
        args: AccumulateArgs = call.args
        if args.shard < 0 or args.sequence < 0:
            raise RefusedError(
                f"shard {args.shard} and sequence {args.sequence} must not be negative", hint="number both from 0"
            )
        images = _images(call)
        yardstick = self._yardstick(args.manifest, shape=images.shape[1:])
        part = yardstick.measure(images, labels=args.labels, alike=self._alike(images, captions=args.captions))
        parts = self._parts(args.folder, run=args.run, yardstick=yardstick)
        return AccumulateReply(applied=parts.add(part, shard=args.shard, sequence=args.sequence))

    def _total(self, call: Call) -> TotalReply:
        args: TotalArgs = call.args
        yardstick = self._yardstick(args.manifest, shape=tuple(args.shape))
        found = yardstick.total(self._parts(args.folder, run=args.run, yardstick=yardstick).read())
        if found.parts < args.parts:
            raise RefusedError(
                f"{found.parts} of {args.parts} parts of {args.run} are here: the total would miss images",
                hint="wait for all calls of `accumulate`; give all replicas the same `folder`, which all of them reach",
            )
        return found

    def _parts(self, folder: str, *, run: str, yardstick: Yardstick) -> Parts:
        if not _RUN.fullmatch(run):
            raise RefusedError(f"{run!r} is no name of a run", hint="use letters, digits, `.`, `_` and `-`")
        uri = folder or (self.context.cache_dir.resolve() / "evaluations").as_uri()
        return Parts(open_bucket(uri).below(run), space=yardstick.space)

    def _alike(self, images: NDArray[np.uint8], *, captions: list[str]) -> NDArray[np.float32]:
        """Cosine of each image and its caption; none without captions."""
        if not captions:
            return np.zeros(0, dtype=np.float32)
        if not self.context.model:
            raise RefusedError(
                "the call carries captions, but this service has no CLIP model to compare them with",
                hint="give the service a `model`: the folder of a CLIP model; or send no captions",
            )
        if len(captions) != len(images):
            raise RefusedError(
                f"there are {len(images)} images and {len(captions)} captions", hint="send one caption per image"
            )
        return self._clip.cosines(images, captions=captions)

    def _yardstick(self, uri: str, *, shape: tuple[int, ...]) -> Yardstick:
        """For images of a shape; a dataset of pixels has one shape, and refuses others itself."""
        kept = self._yardsticks
        key = next((key for key, one in kept.items() if key[0] == uri and one.measures(shape)), (uri, shape))
        kept[key] = kept.pop(key, None) or make_yardstick(uri, cache_dir=self.context.cache_dir, shape=shape)
        while len(kept) > KEPT_YARDSTICKS:
            kept.popitem(last=False)
        return kept[key]
