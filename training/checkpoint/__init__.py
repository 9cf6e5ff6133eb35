"""A learner's durable state: written beside training, committed at once or not at all, verified before it is believed.

A checkpoint is a folder of a bucket, `step-<n>/e<epoch>-a<attempt>/` that no other attempt ever writes to:

    rank-<r>.safetensors   what rank r holds of every vector, flat (see `parts`)
    rank-<r>.json          rank r's receipt: ranges, size and digest of its part, or why it failed
    MANIFEST.json          all receipts together, the shapes, and the small state
    COMMIT                 written last and never twice: epoch and digest of the manifest

A reader trusts COMMIT -> MANIFEST.json -> parts and nothing else. Parts are keyed by (tensor, offset, length), so any
number of ranks can read what any other number wrote. Ranks agree through these files, never by collectives of their
own: those would race with training's.
"""

from __future__ import annotations

from training.checkpoint.reader import Loaded, load_latest
from training.checkpoint.writer import CheckpointFailure, CheckpointWriter, SavedCheckpoint

__all__ = ["CheckpointFailure", "CheckpointWriter", "Loaded", "SavedCheckpoint", "load_latest"]
