"""An audit reads everything it counts, and finds what is wrong anywhere."""

from __future__ import annotations

import pytest

from spec.errors import DataError
from spec.shards import Splits, open_manifest, path_of, seal
from training.data.audit import audit


def test_a_whole_dataset_is_counted(dataset: str) -> None:
    found = audit(dataset)
    assert (found.shards, found.samples, found.digest) == (4, 190, open_manifest(dataset).digest)
    assert audit(dataset, shards=1).samples == 64 + 40


def test_damage_in_the_last_shard_is_found(dataset: str) -> None:
    path = path_of(dataset).parent / open_manifest(dataset).splits.train[2].path
    data = bytearray(path.read_bytes())
    data[100] ^= 128
    path.write_bytes(data)
    assert audit(dataset, shards=1).shards == 2
    with pytest.raises(DataError, match="corrupt"):
        audit(dataset)


def test_a_sample_in_both_splits_is_found(dataset: str) -> None:
    manifest = open_manifest(dataset)
    splits = Splits(train=manifest.splits.train, test=manifest.splits.train[:1])
    path_of(dataset).write_text(seal(manifest.model_copy(update={"splits": splits})).write_json())
    with pytest.raises(DataError, match="again in"):
        audit(dataset)
