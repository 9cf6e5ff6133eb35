"""The evaluation service: `evaluate.score`.

A replica reads the dataset and trains (or loads) the classifier before it is published. Scores of two manifests never
mix: each has its own yardstick, and only the newest few are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from services.evaluate.yardstick import Yardstick, make_yardstick
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import ScoreArgs, ScoreReply
from spec.errors import GkrError, RefusedError

KEPT_YARDSTICKS = 2
_CANARY_IMAGES = 16


def _manifest_of(args: Any) -> str:
    return args.manifest


def _images_of(args: Any) -> int:
    return max(1, len(args.labels))


class EvaluateService(Service):
    """Scores generated images against the real ones of a manifest."""

    methods: ClassVar[tuple[Method, ...]] = (
        Method(name="score", args=ScoreArgs, reply=ScoreReply, batch_key=_manifest_of, cost=_images_of),
    )

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._yardsticks: OrderedDict[str, Yardstick] = OrderedDict()

    def warm_up(self) -> None:
        """Train or load the classifier of the context's manifest and score some of its real images."""
        if not self.context.manifest:
            return
        held_out = self._yardstick(self.context.manifest).held_out
        real = held_out.take(np.arange(min(_CANARY_IMAGES, len(held_out))))
        args = ScoreArgs(manifest=self.context.manifest, labels=real.labels.tolist())
        (answer,) = self.compute("score", [Call(args=args, tensors={"images": real.pixels})])
        if isinstance(answer, GkrError):
            raise answer

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Score each call by itself; one bad call does not touch its neighbours."""
        assert method == "score", method
        answers: list[Reply | GkrError] = []
        for call in calls:
            try:
                answers.append(Reply(body=self._score(call)))
            except GkrError as error:
                answers.append(error)
        return answers

    def _score(self, call: Call) -> ScoreReply:
        args: ScoreArgs = call.args
        images = call.tensors.get("images")
        if images is None:
            raise RefusedError(
                "the call carries no tensor `images`", hint="send uint8 [images, height, width, channels]"
            )
        return self._yardstick(args.manifest).score(images, labels=args.labels)

    def _yardstick(self, uri: str) -> Yardstick:
        found = self._yardsticks.pop(uri, None) or make_yardstick(uri, cache_dir=self.context.cache_dir)
        self._yardsticks[uri] = found
        while len(self._yardsticks) > KEPT_YARDSTICKS:
            self._yardsticks.popitem(last=False)
        return found
