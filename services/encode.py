"""The encoding service: captions to embeddings, with the sentence encoder whose weights ship inside a package.

Nothing is downloaded. Torch is imported when a replica is made, not when this module is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from services.sentences import SentenceEncoder, weights_folder
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import EncodeArgs, EncodeReply
from spec.errors import GkrError, RefusedError


def _captions(args: EncodeArgs) -> int:
    return len(args.captions)


class EncodeService(Service):
    """`encode`: see `EncodeArgs`. Equal captions get equal embeddings within 1e-5, whatever their batch."""

    methods: ClassVar[tuple[Method, ...]] = (Method("encode", EncodeArgs, EncodeReply, cost=_captions),)

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        folder = weights_folder()
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._encoder = SentenceEncoder(folder, device=device)

    def warm_up(self) -> None:
        """Embed two captions of different length; a wrong build of a library shows here."""
        embeddings = self._encoder.embed(["one", "a handwritten seven, thin and slanted"])
        if not np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-4):
            raise RuntimeError("the encoder's canary is not a unit vector")

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """One embedding per caption; distinct captions of the batch are computed once, `max_batch` at a time."""
        wanted: dict[str, int] = {}
        for call in calls:
            for caption in call.args.captions:
                wanted.setdefault(caption, len(wanted))
        # Captions of similar length together: less padding.
        order = sorted(wanted, key=len)
        table = np.zeros((len(wanted), self._encoder.width), np.float32)
        for start in range(0, len(order), self.context.max_batch):
            some = order[start : start + self.context.max_batch]
            table[[wanted[caption] for caption in some]] = self._encoder.embed(some)
        return [self._reply(call.args, wanted, table) for call in calls]

    def _reply(self, args: EncodeArgs, wanted: dict[str, int], table: np.ndarray) -> Reply | GkrError:
        if not args.captions:
            return RefusedError("no captions", hint="ask for at least one")
        rows = [wanted[caption] for caption in args.captions]
        return Reply(EncodeReply(encoder=self._encoder.fingerprint), {"embeddings": table[rows]})
