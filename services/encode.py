"""The encoding service: captions to embeddings, images to latents.

Without a `model` it is the sentence encoder whose weights ship inside a package; with one, what lies in that folder: a
text encoder of transformers, or an autoencoder of diffusers. Nothing is downloaded. Torch is imported when a replica is
made, not when this module is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from services.autoencoder import Autoencoder
from services.model_folder import local_model
from services.sentences import SentenceEncoder, weights_folder
from services.service import Call, Method, Reply, Service, ServiceContext
from services.text_encoder import TextEncoder
from services.wire.messages import EncodeArgs, EncodeReply, LatentsArgs, LatentsReply
from spec.errors import GkrError, RefusedError


def _captions(args: EncodeArgs) -> int:
    return len(args.captions)


class EncodeService(Service):
    """`encode`: see `EncodeArgs`; `latents`: see `LatentsArgs`. Batch mates change nothing beyond 1e-5 (float32)."""

    methods: ClassVar[tuple[Method, ...]] = (
        Method("encode", EncodeArgs, EncodeReply, cost=_captions),
        Method("latents", LatentsArgs, LatentsReply),
    )

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._encoder = _made(context)

    def warm_up(self) -> None:
        """Encode something the way of every call; a wrong build of a library shows here."""
        if isinstance(self._encoder, Autoencoder):
            side = self._encoder.reduction * 2
            found = self._encoder.latents(np.zeros((1, side, side, 3), dtype=np.uint8))
        else:
            found = self._encoder.embed(["one", "a handwritten seven, thin and slanted"])
        lengths = np.linalg.norm(found, axis=1)
        unit = not isinstance(self._encoder, SentenceEncoder) or np.allclose(lengths, 1, atol=1e-4)
        if not np.isfinite(found).all() or not unit:
            raise RuntimeError("the encoder's canary is not what an encoder gives")

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """One embedding per caption, or one latent per image."""
        if (method == "latents") != isinstance(self._encoder, Autoencoder):
            what, other = ("an autoencoder", "`latents`") if method == "encode" else ("a text encoder", "`encode`")
            raise RefusedError(
                f"{self.context.name} holds {what}: it answers {other}",
                hint="ask a service whose `model` fits; an experiment may have several of kind encode",
            )
        if isinstance(self._encoder, Autoencoder):
            return [_latents(self._encoder, call) for call in calls]
        return self._encode(self._encoder, calls)

    def _encode(self, encoder: SentenceEncoder | TextEncoder, calls: Sequence[Call]) -> list[Reply | GkrError]:
        """Distinct captions of the batch are computed once, `max_batch` at a time."""
        wanted: dict[str, int] = {}
        for call in calls:
            for caption in call.args.captions:
                wanted.setdefault(caption, len(wanted))
        # Captions of similar length together: less padding, where the encoder pads to the longest.
        order = sorted(wanted, key=len)
        tokens = isinstance(encoder, TextEncoder) and any(call.args.tokens for call in calls)
        tables: dict[str, NDArray[Any]] = {}
        for start in range(0, len(order), self.context.max_batch):
            some = order[start : start + self.context.max_batch]
            places = [wanted[caption] for caption in some]
            for name, values in _encoded(encoder, some, tokens=tokens).items():
                table = tables.setdefault(name, np.zeros((len(wanted), *values.shape[1:]), values.dtype))
                table[places] = values
        return [_reply(encoder, call.args, wanted=wanted, tables=tables) for call in calls]


def _encoded(
    encoder: SentenceEncoder | TextEncoder, captions: Sequence[str], *, tokens: bool
) -> dict[str, NDArray[Any]]:
    if isinstance(encoder, SentenceEncoder) or not tokens:
        return {"embeddings": encoder.embed(captions)}
    embeddings, states, mask = encoder.encode(captions)
    return {"embeddings": embeddings, "tokens": states, "mask": mask}


def _reply(
    encoder: SentenceEncoder | TextEncoder, args: EncodeArgs, *, wanted: dict[str, int], tables: dict[str, NDArray[Any]]
) -> Reply | GkrError:
    if not args.captions:
        return RefusedError("no captions", hint="ask for at least one")
    if args.tokens and isinstance(encoder, SentenceEncoder):
        return RefusedError(
            "the sentence encoder gives no states of tokens",
            hint="give the service a `model`: the folder of a text encoder such as T5 or CLIP",
        )
    rows = [wanted[caption] for caption in args.captions]
    names = tables if args.tokens else ("embeddings",)
    found = {name: tables[name][rows] for name in names}
    return Reply(EncodeReply(encoder=encoder.fingerprint), found, weights=encoder.fingerprint)


def _latents(encoder: Autoencoder, call: Call) -> Reply | GkrError:
    try:
        latents = encoder.latents(call.tensors.get("images"))
    except RefusedError as error:
        return error
    return Reply(LatentsReply(encoder=encoder.fingerprint), {"latents": latents}, weights=encoder.fingerprint)


def _made(context: ServiceContext) -> SentenceEncoder | TextEncoder | Autoencoder:
    folder = local_model(context.model, cache_dir=context.cache_dir) if context.model else weights_folder()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not context.model:
        return SentenceEncoder(folder, device=device)
    config = json.loads((folder / "config.json").read_text())
    # diffusers names its class this way, transformers its family `model_type`.
    made_by_diffusers = "_class_name" in config
    return Autoencoder(folder, device=device) if made_by_diffusers else TextEncoder(folder, device=device)
