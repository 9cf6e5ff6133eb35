"""Files and buckets by URI, the one way in which a run reaches what outlives its machines.

`file:///folder`, `s3://bucket/prefix` and `gs://bucket/prefix` behave alike. Nothing here knows what is stored, except
`storage.datasets`, which brings datasets to where loaders can read them.
"""

from __future__ import annotations

from storage.client import Limits
from storage.errors import ExistsError, MissingError, StaleError
from storage.protocol import Bucket, Bytes, Entry, Stored
from storage.uris import file_path, open_bucket, split_uri

__all__ = [
    "Bucket", "Bytes", "Entry", "ExistsError", "Limits", "MissingError", "StaleError", "Stored", "file_path",
    "open_bucket", "split_uri",
]  # fmt: skip
