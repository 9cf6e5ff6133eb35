"""What our trainer is told: model, data order, optimizer, checkpoints, evaluation.

No torch types here: dtypes are literals, sizes are integers. One file per concern is not worth it at this size; every
class is one table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from spec.base import Document


class ModelConfig(Document):
    """A flow-matching diffusion transformer over square images."""

    kind: Literal["dit"] = "dit"
    """What the network is: `dit` draws images, `lm` continues text."""
    image_size: int = Field(default=8, ge=4)
    """Height and width in pixels."""
    channels: int = Field(default=1, ge=1)
    """Channels of the image."""
    patch_size: int = Field(default=2, ge=1)
    """Side of one patch; must divide image_size."""
    width: int = Field(default=64, ge=16)
    """Features of one token."""
    depth: int = Field(default=4, ge=1)
    """Transformer blocks."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide width."""
    mlp_ratio: float = Field(default=4.0, gt=0)
    """Hidden features of the feed-forward part, as a multiple of width."""
    conditioning: Literal["text", "class"] = "text"
    """`text`: an embedding per caption from the encoding service; `class`: a learned vector per label."""
    text_width: int = Field(default=384, ge=1)
    """Features of a caption's embedding (384 for the sentence encoder of the digits recipe)."""
    num_classes: int = Field(default=10, ge=1)
    """Labels, when conditioning is `class`."""
    condition_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of training samples whose condition is replaced by the null condition (classifier-free guidance)."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that a dataset's samples must have."""
        return self.image_size, self.image_size, self.channels

    @property
    def embedding_width(self) -> int | None:
        """Features of the embedding that the encoding service makes of a caption; none if none is needed."""
        return self.text_width if self.conditioning == "text" else None

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size {self.patch_size} does not divide image_size {self.image_size}; choose a divisor"
            )
        _check_heads(self.width, heads=self.heads)
        return self


class LanguageModelConfig(Document):
    """A decoder-only transformer over the bytes of a text: it predicts each byte from those before it."""

    kind: Literal["lm"]
    """What the network is: `dit` draws images, `lm` continues text."""
    context: int = Field(default=64, ge=2)
    """Bytes that the model sees at once. A sample is one byte longer: the last one is only predicted."""
    width: int = Field(default=64, ge=16)
    """Features of one byte."""
    depth: int = Field(default=4, ge=1)
    """Transformer blocks."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; must divide width."""
    mlp_ratio: float = Field(default=4.0, gt=0)
    """Hidden features of the feed-forward part, as a multiple of width."""

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Height, width and channels that a dataset's samples must have: one row of bytes."""
        return 1, self.context + 1, 1

    @property
    def embedding_width(self) -> None:
        """Nothing is asked of the encoding service."""
        return

    @model_validator(mode="after")
    def _divides(self) -> Self:
        _check_heads(self.width, heads=self.heads)
        return self


def _check_heads(width: int, *, heads: int) -> None:
    if width % heads:
        raise ValueError(f"heads {heads} does not divide width {width}; choose a divisor")
    if (width // heads) % 2:
        raise ValueError(
            f"width / heads = {width // heads} is odd; rotary-free attention still needs an even head size"
        )


def _kind_of(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("kind", "dit")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return getattr(value, "kind", "dit")


AnyModelConfig = Annotated[
    Annotated[ModelConfig, Tag("dit")] | Annotated[LanguageModelConfig, Tag("lm")], Discriminator(_kind_of)
]
"""The configuration of one of the families; without `kind` it is an image model's."""


class CheckpointConfig(Document):
    """When the learner's state is made durable."""

    every_steps: int = Field(default=20, ge=1)
    """Inner steps between two checkpoints of a learner."""
    keep: int = Field(default=2, ge=2)
    """Newest verified checkpoints that are kept; never fewer than two."""


class EvaluationConfig(Document):
    """What is measured while training and at the end."""

    every_rounds: int = Field(default=2, ge=1)
    """Outer rounds between two evaluations of the merged model."""
    samples: int = Field(default=64, ge=1)
    """Images per evaluation during training; never more than the dataset holds out."""
    final_samples: int = Field(default=360, ge=1)
    """Images of the final evaluation; never more than the dataset holds out."""
    sampling_steps: int = Field(default=25, ge=1)
    """Euler steps of the sampler."""
    guidance: float = Field(default=2.0, ge=0)
    """Classifier-free guidance scale; 1 is none."""
    seed: int = Field(default=1234, ge=0)
    """Seed of the noise that samples start from, so that pictures over time are comparable."""


class TrainConfig(Document):
    """Everything the trainer of one learner needs besides its place in the plan."""

    recipe: str | None = None
    """Name of the preset in recipes/train/ that these values start from."""
    model: AnyModelConfig = ModelConfig()
    """The network."""
    samples: int = Field(default=51_200, ge=1)
    """Samples that all learners together contribute to the merged model before the run ends."""
    batch: int = Field(default=64, ge=1)
    """Samples of one inner step of one learner, over all its ranks."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate of the inner optimizer (AdamW)."""
    final_learning_rate_share: float = Field(default=0.05, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    warmup_samples: int = Field(default=2_560, ge=0)
    """Samples over all learners during which the learning rate rises from zero."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's moment decays."""
    gradient_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    ema_decay: float = Field(default=0.99, ge=0, lt=1)
    """Decay per inner step of the averaged weights that are evaluated and published."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; master weights, reductions and optimizer state are always float32."""
    shard_size: int | None = Field(default=None, ge=1)
    """Ranks that share one copy of the weights (the mesh is replicate x shard); default: all ranks of the learner."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    compile: bool = False
    """Compile each block with torch.compile."""
    loader_workers: int = Field(default=1, ge=0)
    """Loader worker processes per rank; 0 prepares samples in the rank itself."""
    prefetch_batches: int = Field(default=4, ge=1)
    """Batches that loader workers prepare ahead."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, data order and noise."""
    log_every: int = Field(default=5, ge=1)
    """Inner steps between two metric events."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durable state."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Samples and scores."""
