"""The sampling service: `sample.sample`, images from a published model.

The model is pinned by its digest, or is the newest that a run's syncer has published, which is asked once per batch:
all calls of a batch are drawn from the same weights, and the reply names them. Weights that are not there yet are
answered at once with `ready: false`, so that nobody else waits; `sample` asks again until its deadline.

Image i of a set starts from noise keyed by (seed, i) alone and is computed in chunks of one fixed size, the last one
padded. So a picture is the same bytes whatever shares its batch: asked for alone, in a set, or beside another rank's
call.
"""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.client import Asks
from services.service import Call, Method, Reply, Service, ServiceContext
from services.weights_cache import WeightsCache
from services.wire.messages import SampleArgs, SampleReply, Weights
from spec.errors import GkrError, NotFoundError, RefusedError
from spec.sync_keys import SyncKeys
from spec.sync_status import SyncStatus, ask_syncer
from spec.train import ModelConfig
from training.models import flow
from training.models.dit import DiT
from training.models.network import initialise
from training.models.weights import load_model, save_model

CHUNK_IMAGES = 32
"""Images of one forward pass, always; changing it may change the last bit of pixels."""
KEPT_MODELS = 2
MAX_STEPS = 1000
STATUS_SECONDS = 5.0
"""Longest wait for the syncer's answer."""
_AGAIN_SECONDS = 1.0
_CANARY = ModelConfig(width=16, depth=1, heads=1, conditioning="class", num_classes=2)


def _batch_key(args: Any) -> Hashable:
    weights = args.weights
    which = weights.sha256, weights.syncer, weights.run, weights.version, weights.at_least
    return which, args.steps, args.guidance, args.sampler, args.guidance_from, args.guidance_to


def _images_of(args: Any) -> int:
    return max(1, len(args.labels))


def noise_of(seed: int, *, index: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal noise of one image: a function of (seed, index) and nothing else."""
    return np.random.Generator(np.random.Philox(key=[seed, index])).standard_normal(shape, dtype=np.float32)


def to_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """[b, C, H, W] around [-1, 1] to uint8 [b, H, W, C]."""
    scaled = ((images.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).contiguous().cpu().numpy()


@dataclass(frozen=True)
class _Chosen:
    """Weights that a batch is drawn from; no digest if those that were asked for are not there yet."""

    sha256: str
    urls: list[str]
    version: int = -1


class SampleService(Service):
    """Draws images from published weights."""

    methods: ClassVar[tuple[Method, ...]] = (
        Method(name="sample", args=SampleArgs, reply=SampleReply, batch_key=_batch_key, cost=_images_of),
    )

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._cache = WeightsCache(context.cache_dir / "models")
        self._models: OrderedDict[str, DiT] = OrderedDict()

    def warm_up(self) -> None:
        """Publish a tiny model to ourselves and draw from it, the way of every call."""
        with tempfile.TemporaryDirectory(prefix="gkr-canary-") as folder:
            path = save_model(Path(folder), state=initialise(DiT(_CANARY), seed=0).state_dict(), config=_CANARY)
            args = SampleArgs(weights=Weights(sha256=path.stem, urls=[path.as_uri()]), labels=[0], seed=0, steps=1)
            (answer,) = self.compute("sample", [Call(args=args)])
        if isinstance(answer, GkrError):
            raise answer
        self._models.clear()

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Draw the images of all calls together; a call that does not fit the model is refused alone."""
        assert method == "sample", method
        first: SampleArgs = calls[0].args
        _check(first)
        found = _chosen(first.weights)
        if not found.sha256:
            reply = SampleReply(weights_sha256="", version=found.version, ready=False)
            return [Reply(body=reply) for _ in calls]
        model = self._model(found)
        answers: list[Reply | GkrError | None] = []
        noises: list[NDArray[np.float32]] = []
        conditions: list[NDArray[Any]] = []
        for call in calls:
            try:
                conditions.append(_condition(call, config=model.config))
            except RefusedError as error:
                answers.append(error)
                continue
            noises.append(_noise(call.args, config=model.config))
            answers.append(None)
        if not noises:
            return [answer for answer in answers if answer is not None]
        images = self._draw(
            model,
            noise=np.concatenate(noises),
            condition=np.concatenate(conditions),
            args=first,
        )
        parts = iter(np.split(images, np.cumsum([len(noise) for noise in noises])[:-1]))
        body = SampleReply(weights_sha256=found.sha256, version=found.version)
        return [
            Reply(body, {"images": np.ascontiguousarray(next(parts))}, weights=found.sha256)
            if answer is None
            else answer
            for answer in answers
        ]

    def _model(self, found: _Chosen) -> DiT:
        sha256 = found.sha256
        model = self._models.pop(sha256, None)
        if model is None:
            while len(self._models) >= KEPT_MODELS:
                self._models.popitem(last=False)
            model = self._load(found)
        self._models[sha256] = model
        return model

    def _load(self, found: _Chosen) -> DiT:
        for last in (False, True):
            path = self._cache.get(found.sha256, urls=found.urls)
            try:
                model = load_model(path, device=self._device)[0]
            except NotFoundError:  # another replica of this node evicted it between the two lines
                if last:
                    raise
                continue
            if not isinstance(model, DiT):
                raise RefusedError(
                    "these weights are not an image model's: nothing could be drawn",
                    where=found.sha256[:12],
                    hint="ask for the weights of a model of kind dit",
                )
            return model
        raise AssertionError

    @torch.inference_mode()
    def _draw(
        self, model: DiT, *, noise: NDArray[np.float32], condition: NDArray[Any], args: SampleArgs
    ) -> NDArray[np.uint8]:
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, len(noise), CHUNK_IMAGES):
            count = min(CHUNK_IMAGES, len(noise) - start)
            images = flow.sample(
                model,
                noise=self._chunk(noise[start : start + count]),
                condition=self._chunk(condition[start : start + count]),
                steps=args.steps,
                guidance=args.guidance,
                sampler=args.sampler,
                guided_times=(args.guidance_from, args.guidance_to),
            )
            parts.append(to_pixels(images[:count]))
        return np.concatenate(parts)

    def _chunk(self, values: NDArray[Any]) -> torch.Tensor:
        """The values with zeros up to the fixed chunk size."""
        padded = np.zeros((CHUNK_IMAGES, *values.shape[1:]), dtype=values.dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self._device)


def sample(
    client: Asks, args: SampleArgs, *, tensors: Mapping[str, NDArray[Any]] | None = None, deadline_seconds: float
) -> Reply:
    """Ask until the weights that `args` wants are published. RefusedError if they are not at the deadline."""
    until = time.monotonic() + deadline_seconds
    while True:
        left = max(0.001, until - time.monotonic())
        reply = client.call("sample", args, reply=SampleReply, tensors=tensors, deadline_seconds=left)
        body: SampleReply = reply.body
        if body.ready:
            return reply
        if time.monotonic() + _AGAIN_SECONDS > until:
            raise RefusedError(
                f"version {_wanted(args.weights)} of run {args.weights.run} is not published after"
                f" {deadline_seconds:g} s; the newest is {body.version}",
                hint="a longer deadline, or a lower version; `gkr sync` says what the open round waits for",
            )
        time.sleep(_AGAIN_SECONDS)


def _chosen(weights: Weights) -> _Chosen:
    """The weights that a selector means now."""
    if weights.sha256:
        return _Chosen(weights.sha256, _urls(weights, sha256=weights.sha256))
    if not weights.syncer:
        raise RefusedError(
            "the call names no weights", hint="give `sha256` and `urls`, or `syncer`, `run` and `urls` for the newest"
        )
    keys = SyncKeys.read()
    answer = ask_syncer(weights.syncer, run=weights.run, path="status", keys=keys, timeout_seconds=STATUS_SECONDS)
    status = SyncStatus.read_json(answer)
    if weights.version is not None and status.version > weights.version:
        raise RefusedError(
            f"version {weights.version} of run {weights.run} was superseded by {status.version}",
            hint="pin an older version by its `sha256`; the run's events name it",
        )
    if not status.model_sha256 or status.version < _wanted(weights):
        return _Chosen("", [], version=status.version)
    return _Chosen(status.model_sha256, _urls(weights, sha256=status.model_sha256), version=status.version)


def _wanted(weights: Weights) -> int:
    return weights.at_least if weights.version is None else weights.version


def _urls(weights: Weights, *, sha256: str) -> list[str]:
    return [url.replace("{sha256}", sha256) for url in weights.urls]


def _check(args: SampleArgs) -> None:
    if not 1 <= args.steps <= MAX_STEPS:
        raise RefusedError(f"steps is {args.steps}", hint=f"ask for 1 to {MAX_STEPS} sampling steps")
    if not (np.isfinite(args.guidance) and args.guidance >= 0):
        raise RefusedError(
            f"guidance is {args.guidance}", hint="use a finite scale of at least 0; 1 is none, 2 is usual"
        )
    if args.sampler not in flow.SAMPLERS:
        raise RefusedError(f"there is no sampler {args.sampler!r}", hint=f"use one of {', '.join(flow.SAMPLERS)}")
    if not 0.0 <= args.guidance_from <= args.guidance_to <= 1.0:
        raise RefusedError(
            f"guidance acts from {args.guidance_from} to {args.guidance_to}",
            hint="two times of the flow, the lower one first: 0 is noise, 1 is the image",
        )


def _image_shape(config: ModelConfig) -> tuple[int, int, int]:
    return (config.channels, config.image_size, config.image_size)


def _noise(args: SampleArgs, *, config: ModelConfig) -> NDArray[np.float32]:
    shape = _image_shape(config)
    return np.stack([noise_of(args.seed, index=args.first + number, shape=shape) for number in range(len(args.labels))])


def _condition(call: Call, *, config: ModelConfig) -> NDArray[Any]:
    """What the model is conditioned on: embeddings [images, text_width] float32, or labels [images] int64."""
    args: SampleArgs = call.args
    count = len(args.labels)
    if count == 0:
        raise RefusedError("the call asks for no image", hint="send one label per image")
    if args.seed < 0 or args.first < 0:
        raise RefusedError(f"seed {args.seed} and first {args.first} must not be negative", hint="use numbers from 0")
    if config.conditioning == "class":
        wrong = next((label for label in args.labels if not 0 <= label < config.num_classes), None)
        if wrong is not None:
            raise RefusedError(
                f"label {wrong} is unknown to the model", hint=f"its labels are 0 to {config.num_classes - 1}"
            )
        return np.array(args.labels, dtype=np.int64)
    embeddings = call.tensors.get("embeddings")
    wanted = (count, config.text_width)
    if embeddings is None or embeddings.shape != wanted or embeddings.dtype != np.float32:
        got = "none" if embeddings is None else f"{embeddings.dtype} {list(embeddings.shape)}"
        raise RefusedError(
            f"the model needs embeddings float32 {list(wanted)}, the call carries {got}",
            hint="encode one caption per image with the encoder the model was trained with",
        )
    return embeddings
