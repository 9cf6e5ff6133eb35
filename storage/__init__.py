"""Files and buckets by URI, the one way in which a run reaches what outlives its machines.

`file:///folder`, `s3://bucket/prefix` and `gs://bucket/prefix` behave alike. Nothing here knows what is stored.
"""

from __future__ import annotations

from storage.bucket import Bucket, Entry, Stored, file_path, open_bucket, split_uri
from storage.errors import ExistsError, MissingError, StaleError

__all__ = [
    "Bucket", "Entry", "ExistsError", "MissingError", "StaleError", "Stored", "file_path", "open_bucket", "split_uri",
]  # fmt: skip
