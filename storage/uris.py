"""Stores by URI: `file:///folder`, `s3://bucket/prefix`, `gs://bucket/prefix`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from spec.errors import ConfigError
from storage.client import Limits
from storage.folder import Folder
from storage.objects import ObjectStore
from storage.protocol import Bucket

_SCHEMES = ("file", "s3", "gs")


def open_bucket(uri: str, *, environment: Mapping[str, str] = os.environ, limits: Limits | None = None) -> Bucket:
    """The store that a URI names; ConfigError if it is none. Makes no request."""
    parts = urlsplit(uri)
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"{uri!r} names no store", hint="write file:///folder, s3://bucket/prefix or gs://bucket/prefix"
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"{uri!r} has a ? or #, behind which nothing is read", hint="write %3F for ? and %23 for #")
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute():
            raise ConfigError(f"{uri!r} is not absolute", hint="write file:///absolute/path")
        return Folder(path)
    if not parts.netloc:
        raise ConfigError(f"{uri!r} names no bucket", hint=f"write {parts.scheme}://bucket/prefix")
    prefix = unquote(parts.path).strip("/")
    root = f"{parts.scheme}://{parts.netloc}"
    return ObjectStore.open(root, prefix=prefix, environment=environment, limits=limits or Limits())


def split_uri(uri: str) -> tuple[str, str]:
    """Folder and name of an object's URI, such as that of a manifest."""
    folder, _, name = uri.rpartition("/")
    return folder, unquote(name)


def file_path(uri: str) -> Path | None:
    """The path of a `file:` URI; none for any other store."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
