"""The sampling service: `sample.sample`, images from a published model.

Image i of a set starts from noise keyed by (seed, i) alone and is computed in chunks of one fixed size, the last one
padded. So a picture is the same bytes whatever shares its batch: asked for alone, in a set, or beside another rank's
call.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.service import Call, Method, Reply, Service, ServiceContext
from services.weights_cache import WeightsCache
from services.wire.messages import SampleArgs, SampleReply, Weights
from spec.errors import GkrError, NotFoundError, RefusedError
from spec.train import ModelConfig
from training.models import flow
from training.models.dit import DiT
from training.models.network import initialise
from training.models.weights import load_model, save_model

CHUNK_IMAGES = 32
"""Images of one forward pass, always; changing it may change the last bit of pixels."""
KEPT_MODELS = 2
MAX_STEPS = 1000
_CANARY = ModelConfig(width=16, depth=1, heads=1, conditioning="class", num_classes=2)


def _batch_key(args: Any) -> Hashable:
    return (args.weights.sha256, args.steps, args.guidance)


def _images_of(args: Any) -> int:
    return max(1, len(args.labels))


def noise_of(seed: int, *, index: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal noise of one image: a function of (seed, index) and nothing else."""
    return np.random.Generator(np.random.Philox(key=[seed, index])).standard_normal(shape, dtype=np.float32)


def to_pixels(images: torch.Tensor) -> NDArray[np.uint8]:
    """[b, C, H, W] around [-1, 1] to uint8 [b, H, W, C]."""
    scaled = ((images.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).contiguous().cpu().numpy()


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
        if not 1 <= first.steps <= MAX_STEPS:
            raise RefusedError(f"steps is {first.steps}", hint=f"ask for 1 to {MAX_STEPS} sampling steps")
        if not (np.isfinite(first.guidance) and first.guidance >= 0):
            raise RefusedError(
                f"guidance is {first.guidance}", hint="use a finite scale of at least 0; 1 is none, 2 is usual"
            )
        model = self._model(first)
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
            steps=first.steps,
            guidance=first.guidance,
        )
        parts = iter(np.split(images, np.cumsum([len(noise) for noise in noises])[:-1]))
        body = SampleReply(weights_sha256=first.weights.sha256)
        return [
            answer if answer is not None else Reply(body=body, tensors={"images": np.ascontiguousarray(next(parts))})
            for answer in answers
        ]

    def _model(self, args: SampleArgs) -> DiT:
        sha256 = args.weights.sha256
        model = self._models.pop(sha256, None)
        if model is None:
            while len(self._models) >= KEPT_MODELS:
                self._models.popitem(last=False)
            model = self._load(args)
        self._models[sha256] = model
        return model

    def _load(self, args: SampleArgs) -> DiT:
        for last in (False, True):
            path = self._cache.get(args.weights.sha256, urls=args.weights.urls)
            try:
                model = load_model(path, device=self._device)[0]
            except NotFoundError:  # another replica of this node evicted it between the two lines
                if last:
                    raise
                continue
            if not isinstance(model, DiT):
                raise RefusedError(
                    "these weights are not an image model's: nothing could be drawn",
                    where=args.weights.sha256[:12],
                    hint="ask for the weights of a model of kind dit",
                )
            return model
        raise AssertionError

    @torch.inference_mode()
    def _draw(
        self, model: DiT, *, noise: NDArray[np.float32], condition: NDArray[Any], steps: int, guidance: float
    ) -> NDArray[np.uint8]:
        parts: list[NDArray[np.uint8]] = []
        for start in range(0, len(noise), CHUNK_IMAGES):
            count = min(CHUNK_IMAGES, len(noise) - start)
            images = flow.sample(
                model,
                noise=self._chunk(noise[start : start + count]),
                condition=self._chunk(condition[start : start + count]),
                steps=steps,
                guidance=guidance,
            )
            parts.append(to_pixels(images[:count]))
        return np.concatenate(parts)

    def _chunk(self, values: NDArray[Any]) -> torch.Tensor:
        """The values with zeros up to the fixed chunk size."""
        padded = np.zeros((CHUNK_IMAGES, *values.shape[1:]), dtype=values.dtype)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self._device)


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
