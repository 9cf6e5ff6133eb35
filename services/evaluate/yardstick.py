"""Everything that is needed to score images of one dataset: its real images, its classifier, and what real images
score themselves.

Made once per manifest, size of images and process. The classifier, and what took decoding, are kept in the cache folder
under the manifest's digest, so that replicas and runs share them; a file that does not read back is made again.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from services.evaluate import frechet
from services.evaluate.classifier import FEATURES, REVISION, Classifier, accuracy, read_out, train_classifier
from services.evaluate.neighbours import median_nearest
from services.evaluate.parts import Part
from services.evaluate.reference import MAX_IMAGES, Images, balanced_choice, coarse, halves, load_splits
from services.evaluate.sums import GRID_BITS, Sums, on_grid
from services.wire.messages import ScoreReply, TotalReply
from spec.errors import RefusedError
from spec.shards import Manifest
from storage.datasets import SPLITS, read_manifest

T = TypeVar("T")
log = logging.getLogger("evaluate")

SMALLEST_SET = 2
"""Images that a Frechet distance needs on each side."""
SIDES = range(4, 4097)
"""Pixels of an image on each side; the classifier takes no fewer, and a dataset is decoded to that size."""


@dataclass(frozen=True)
class Yardstick:
    """Scores images of one dataset; immutable once made."""

    manifest: Manifest
    shape: tuple[int, ...]
    """(height, width, channels) of the images that it scores; those it holds are coarse."""
    classifier: Classifier
    train: Images
    held_out: Images
    accuracy_real: float
    nearest_real: float
    half_a: NDArray[np.float32]
    """Features of one half of the held-out images, in an order of which any prefix has a balanced mix of labels."""
    half_b: NDArray[np.float32]

    def measures(self, shape: tuple[int, ...]) -> bool:
        """Whether images of this shape are scored by this yardstick, or refused by it."""
        return self.manifest.format == "raw" or shape == self.shape

    @cached_property
    def space(self) -> str:
        """Names the feature space: equal for two replicas only if their features are comparable bit for bit."""
        found = hashlib.sha256(f"{self.manifest.digest} {REVISION}".encode())
        for name, tensor in sorted(self.classifier.state_dict().items()):
            found.update(name.encode() + tensor.numpy().tobytes())
        return found.hexdigest()

    @cached_property
    def held_out_gaussian(self) -> frechet.Gaussian:
        """Of all held-out images."""
        return frechet.of_sums(_sums(self.classifier, self.held_out.pixels))

    @cached_property
    def whole_distance_real(self) -> float:
        """Between all training images and all held-out images."""
        return frechet.distance(frechet.of_sums(_sums(self.classifier, self.train.pixels)), self.held_out_gaussian)

    def measure(self, images: NDArray[np.uint8], *, labels: list[int], alike: NDArray[np.floating]) -> Part:
        """What is kept of some images until all are there; `alike` [images] or [0]: cosines with their captions."""
        self._check(images, labels=labels, least=1)
        features, predicted = read_out(self.classifier, coarse(images))
        right = (predicted == np.array(labels, dtype=np.int64)).astype(np.uint8)
        return Part(on_grid(features), right, on_grid(alike[:, None])[:, 0])

    def total(self, parts: Iterable[Part]) -> TotalReply:
        """Scores over parts in any order: their sums are exact."""
        sums, count, right, alike, told = Sums.none(FEATURES), 0, 0, 0, True
        for part in parts:
            sums = sums + Sums.of(part.features)
            count += 1
            right += int(part.right.sum())
            alike += int(np.maximum(part.alike, 0).sum(dtype=np.int64))
            told = told and len(part.alike) == len(part)
        if sums.count < SMALLEST_SET:
            raise RefusedError(
                f"{sums.count} images cannot be scored",
                hint=f"accumulate at least {SMALLEST_SET}; some hundred give a useful distance",
            )
        return TotalReply(
            parts=count,
            samples=sums.count,
            classifier_accuracy=right / sums.count,
            classifier_accuracy_real=self.accuracy_real,
            frechet_distance=frechet.distance(frechet.of_sums(sums), self.held_out_gaussian),
            frechet_distance_real=self.whole_distance_real,
            clip_score=100.0 * alike / (sums.count << GRID_BITS) if told else None,
        )

    def score(self, images: NDArray[np.uint8], *, labels: list[int]) -> ScoreReply:
        """Score generated images [n, height, width, channels]; the order of images does not matter beyond rounding."""
        self._check(images, labels=labels)
        images = coarse(images)
        features, predicted = read_out(self.classifier, images)
        size = min(len(images), len(self.half_a))
        chosen = balanced_choice(images, labels=labels, count=size)
        real = frechet.fit(self.half_a[:size])
        return ScoreReply(
            samples=len(images),
            classifier_accuracy=accuracy(predicted, np.array(labels, dtype=np.int64)),
            classifier_accuracy_real=self.accuracy_real,
            frechet_distance=frechet.distance(frechet.fit(features[chosen]), real),
            frechet_distance_real=frechet.distance(frechet.fit(self.half_b[:size]), real),
            frechet_samples=size,
            nearest_train_distance=median_nearest(images, references=self.train.pixels),
            nearest_train_distance_real=self.nearest_real,
        )

    def _check(self, images: NDArray[np.uint8], *, labels: list[int], least: int = SMALLEST_SET) -> None:
        manifest = self.manifest
        if images.ndim != 4 or images.shape[1:] != self.shape or images.dtype != np.uint8:
            raise RefusedError(
                f"images are {images.dtype} {list(images.shape)},"
                f" dataset {manifest.name!r} has uint8 [images, {', '.join(map(str, self.shape))}]",
                hint="score the images against the manifest that the model was trained on",
            )
        if len(labels) != len(images):
            raise RefusedError(
                f"there are {len(images)} images and {len(labels)} labels", hint="send one label per image"
            )
        if len(images) < least:
            raise RefusedError(
                f"{len(images)} images cannot be scored",
                hint=f"send at least {least}; some hundred give a useful distance",
            )
        wrong = next((label for label in labels if not 0 <= label < len(manifest.labels)), None)
        if wrong is not None:
            raise RefusedError(
                f"label {wrong} is not in dataset {manifest.name!r}",
                hint=f"labels are 0 to {len(manifest.labels) - 1}: {', '.join(manifest.labels)}",
            )


def make_yardstick(uri: str, *, cache_dir: Path, shape: tuple[int, ...] = ()) -> Yardstick:
    """Read the dataset at `uri`, then load its classifier from the cache or train it.

    `shape`: (height, width, channels) of the images to be scored; a dataset of pixels has one of its own.
    """
    manifest = read_manifest(uri)
    encoded = manifest.format == "tar"
    if encoded and not (len(shape) == 3 and shape[0] in SIDES and shape[1] in SIDES and shape[2] in (1, 3)):
        raise RefusedError(
            f"the dataset holds encoded images, and {list(shape)} is no [height, width, channels] to bring them to",
            where=uri,
            hint=f"say what size the images have (`shape`): {SIDES[0]} to {SIDES[-1]} pixels, 1 or 3 channels",
        )
    shape = shape if encoded else (manifest.image_height, manifest.image_width, manifest.image_channels)
    name = f"{manifest.digest}-{'x'.join(map(str, shape))}-{REVISION}.safetensors"
    if encoded:
        train, held_out = _decoded(uri, cache_dir=cache_dir, name=name, shape=shape)
    else:
        train, held_out = load_splits(uri, cache=cache_dir / "data")
    half_a, half_b = halves(held_out.labels)
    if len(half_a) < SMALLEST_SET:
        raise RefusedError(
            f"the held-out split has {len(held_out)} samples, too few to compare two halves of it",
            hint="prepare the dataset with at least 4 held-out samples that share labels pairwise",
            where=uri,
        )
    classifier = Classifier(channels=shape[2], labels=len(manifest.labels))

    def trained() -> dict[str, Tensor]:
        return train_classifier(train.pixels, labels=train.labels, num_labels=len(manifest.labels)).state_dict()

    _cached(cache_dir / f"classifier-{name}", use=classifier.load_state_dict, make=trained)
    classifier.eval().requires_grad_(requires_grad=False)
    features, predicted = read_out(classifier, held_out.pixels)
    return Yardstick(
        manifest=manifest,
        shape=shape,
        classifier=classifier,
        train=train,
        held_out=held_out,
        accuracy_real=accuracy(predicted, held_out.labels),
        nearest_real=median_nearest(held_out.pixels, references=train.pixels),
        half_a=features[half_a],
        half_b=features[half_b],
    )


def _sums(classifier: Classifier, pixels: NDArray[np.uint8]) -> Sums:
    return Sums.of(on_grid(read_out(classifier, pixels)[0]))


def _decoded(uri: str, *, cache_dir: Path, name: str, shape: tuple[int, ...]) -> tuple[Images, Images]:
    """The images of both splits, whose decoding takes milliseconds each: once for all replicas of this machine."""

    def use(tensors: Mapping[str, Tensor]) -> tuple[Images, Images]:
        train, held_out = (
            Images(tensors[f"{split}.pixels"].numpy(), tensors[f"{split}.labels"].numpy()) for split in SPLITS
        )
        return train, held_out

    def make() -> dict[str, Tensor]:
        log.info("decoding at most %d images of each split of %s", MAX_IMAGES, uri)
        both = zip(SPLITS, load_splits(uri, cache=cache_dir / "data", shape=shape), strict=True)
        return {
            f"{split}.{part}": torch.from_numpy(values)
            for split, images in both
            for part, values in (("pixels", images.pixels), ("labels", images.labels))
        }

    return _cached(cache_dir / f"images-{name}", use=use, make=make)


def _cached(path: Path, *, use: Callable[[dict[str, Tensor]], T], make: Callable[[], dict[str, Tensor]]) -> T:
    """What `use` makes of the tensors that lie at `path`, or else of those of `make`, which lie there from then on."""
    try:
        return use(load(path.read_bytes()))
    except FileNotFoundError:
        pass
    except (SafetensorError, RuntimeError, KeyError) as error:  # the last two: tensors of other names or shapes
        log.warning("%s does not read back (%s); making it again", path, error)
    made = make()
    _write_whole(path, data=save({name: tensor.contiguous() for name, tensor in made.items()}))
    return use(made)


def _write_whole(path: Path, *, data: bytes) -> None:
    """Under its final name the file is whole; of two replicas that trained at once the last rename wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
