"""The methods of the services, as typed messages.

Tensors are not in these structs: a call and a reply carry them beside the body, by name, as contiguous numpy arrays
(see `services.wire.frames`). Each method's docstring names them with dtype and shape. Fields are only ever appended,
with defaults.
"""

from __future__ import annotations

from msgspec import Struct


class EncodeArgs(Struct, frozen=True, kw_only=True):
    """`encode.encode`: captions to embeddings."""

    captions: list[str]


class EncodeReply(Struct, frozen=True, kw_only=True):
    """Tensors: `embeddings` float32 [captions, width]."""

    encoder: str
    """Fingerprint of the encoder's weights and settings; embeddings of two fingerprints are never mixed."""


class Weights(Struct, frozen=True, kw_only=True):
    """A published model: safetensors named by digest, with the model's configuration in its metadata."""

    sha256: str
    urls: list[str]
    """Where to fetch it: http://host:port/path or file:///path; tried in order, verified by digest."""


class SampleArgs(Struct, frozen=True, kw_only=True):
    """`sample.sample`: images from a published model. Tensors: `embeddings` float32 [images, width] (text
    conditioning)."""

    weights: Weights
    labels: list[int]
    """For class conditioning; same length as the images asked for."""
    seed: int
    first: int = 0
    """Index of the first image in the whole set: image i starts from noise keyed by (seed, first + i), whatever its
    batch."""
    steps: int = 25
    guidance: float = 2.0


class SampleReply(Struct, frozen=True, kw_only=True):
    """Tensors: `images` uint8 [images, height, width, channels]."""

    weights_sha256: str


class ScoreArgs(Struct, frozen=True, kw_only=True):
    """`evaluate.score`: generated images against held-out real ones. Tensors: `images` uint8 [images, height, width,
    channels]."""

    manifest: str
    """URI of the dataset's manifest: its training split trains the classifier, its held-out split is the reference."""
    labels: list[int]
    """What each image should show."""


class ScoreReply(Struct, frozen=True, kw_only=True):
    """No tensors."""

    samples: int
    classifier_accuracy: float
    classifier_accuracy_real: float
    frechet_distance: float
    frechet_distance_real: float
    nearest_train_distance: float
    nearest_train_distance_real: float
    frechet_samples: int = 0
    """Images on each side of both Frechet distances: at most half of the held-out split."""
