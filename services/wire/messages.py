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
    tokens: bool = False
    """Also the states of all tokens, for models that attend to them."""


class EncodeReply(Struct, frozen=True, kw_only=True):
    """Tensors: `embeddings` float32 [captions, width]; if asked for, `tokens` float32 [captions, length, width], 0
    behind a caption's end, and `mask` uint8 [captions, length], 1 where there is a token. The length is always the
    encoder's limit."""

    encoder: str
    """Fingerprint of the encoder's weights and settings; embeddings of two fingerprints are never mixed."""


class LatentsArgs(Struct, frozen=True, kw_only=True):
    """`encode.latents`: images to latents of an autoencoder. Tensors: `images` uint8 [images, height, width, 3], both
    sides multiples of the autoencoder's reduction."""


class LatentsReply(Struct, frozen=True, kw_only=True):
    """Tensors: `latents` float32 [images, channels, height / reduction, width / reduction], the mean of the posterior,
    shifted and scaled as the autoencoder's configuration says."""

    encoder: str


class Weights(Struct, frozen=True, kw_only=True):
    """A published model: safetensors named by digest, with the model's configuration in its metadata.

    Pinned by its digest; or, with `syncer`, the newest that a run's syncer has published, if that is new enough.
    """

    sha256: str = ""
    urls: list[str]
    """Where to fetch it: http://host:port/path, file:///path, gs://bucket/key or s3://bucket/key; tried in order,
    verified by digest. `{sha256}` stands for the digest."""
    syncer: str = ""
    """host:port of the control port that is asked which model is the newest; `sha256` is empty then."""
    run: str = ""
    """The run whose syncer it is."""
    version: int | None = None
    """Exactly this version. An older one than the newest must be pinned by its digest."""
    at_least: int = 0
    """This version or a newer one."""


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
    sampler: str = "euler"
    """One of `training.models.flow.SAMPLERS`."""
    guidance_from: float = 0.0
    guidance_to: float = 1.0
    """Guidance acts from the one to the other time of the flow, 0 being noise and 1 the image; outside it the
    condition alone decides (arXiv 2404.07724)."""


class SampleReply(Struct, frozen=True, kw_only=True):
    """Tensors: `images` uint8 [images, height, width, channels]; none if the weights are not there yet."""

    weights_sha256: str
    version: int = -1
    """Of the weights, if the syncer named them."""
    ready: bool = True
    """False: the syncer has published only `version` so far; ask again."""


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


class AccumulateArgs(Struct, frozen=True, kw_only=True):
    """`evaluate.accumulate`: some of a run's images, counted once however often they are sent. Tensors: `images` uint8
    [images, height, width, channels]."""

    manifest: str
    labels: list[int]
    run: str
    """Whose images these are: letters, digits, `.`, `_` and `-`. The total is over all of them."""
    shard: int = 0
    """Who sends: a rank, or a part of the set."""
    sequence: int = 0
    """Number of this call in its shard."""
    folder: str = ""
    """URI of a folder where parts are kept until the total is asked for. All replicas must reach it; empty: a folder of
    the replica's machine, enough for replicas that share it."""
    captions: list[str] = []
    """One per image, for the CLIP score; needs a service whose `model` is a CLIP model."""


class AccumulateReply(Struct, frozen=True, kw_only=True):
    """No tensors."""

    applied: bool
    """False: this part was counted before."""


class TotalArgs(Struct, frozen=True, kw_only=True):
    """`evaluate.total`: scores over all images of a run that were accumulated. No tensors."""

    manifest: str
    run: str
    folder: str = ""
    parts: int = 0
    """How many calls there must be; fewer are refused. 0: those that are there."""
    shape: list[int] = []
    """[height, width, channels] of the images; needed only if the dataset holds encoded images."""


class TotalReply(Struct, frozen=True, kw_only=True):
    """No tensors. The same images give the same bits, whatever their batches, shards and order."""

    parts: int
    samples: int
    classifier_accuracy: float
    classifier_accuracy_real: float
    frechet_distance: float
    """Between the images and the whole held-out split."""
    frechet_distance_real: float
    """Between the training split and the held-out split."""
    clip_score: float | None = None
    """Mean of 100 max(0, cosine of image and caption); none unless all calls brought captions."""


class PrepareArgs(Struct, frozen=True, kw_only=True):
    """`prepare.advance`: make a dataset of images, or go on making it for a while. No tensors."""

    source: str
    """URI of a folder of images, tar files or Parquet files."""
    manifest: str
    """URI of the dataset's manifest."""
    rules: str = "{}"
    """JSON of `spec.preparation.PrepareRules`."""
    seconds: float = 10.0
    """About how long to work; the next call goes on where this one ended."""


class PrepareReply(Struct, frozen=True, kw_only=True):
    """No tensors."""

    report: str
    """JSON of `spec.preparation.PrepareReport`; its `done` says whether to ask again."""
