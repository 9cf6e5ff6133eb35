"""A model's folder on this machine: weights, configuration and tokenizer, as `save_pretrained` of transformers or
diffusers wrote them.

A folder of this machine is used where it is. One in a bucket is copied to the node's cache first, under the digest of
its listing, so that replicas of a node share one copy, files appear whole, and a changed folder is another copy. Only
safetensors are brought: other formats of weights can run code when they are read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from spec.errors import ConfigError, GkrError
from storage import file_path, open_bucket

_KEPT = (".json", ".safetensors", ".txt", ".model")
_HINT = "name the folder that holds config.json and *.safetensors: a path, or a URI such as gs://bucket/models/name"


def local_model(model: str, *, cache_dir: Path) -> Path:
    """The folder of a path or URI. ConfigError if there is none, or it holds no config.json and no safetensors."""
    folder = Path(model) if "://" not in model else file_path(model)
    if folder is None:
        folder = _fetched(model, cache_dir=cache_dir)
    if not (folder / "config.json").is_file():
        raise ConfigError("the model's folder has no config.json", where=model, hint=_HINT)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            "the model's folder has no *.safetensors: weights of other formats are not read, they can run code",
            where=model,
            hint="convert it once: AutoModel.from_pretrained(folder).save_pretrained(folder)",
        )
    return folder


def folder_digest(folder: Path) -> str:
    """Of the names and bytes of all its files that decide a result."""
    found = hashlib.sha256()
    for path in sorted(one for one in folder.iterdir() if one.suffix in _KEPT):
        with path.open("rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


def _fetched(uri: str, *, cache_dir: Path) -> Path:
    try:
        bucket = open_bucket(uri)
        entries = [one for one in bucket.list() if one.key.endswith(_KEPT) and "/" not in one.key]
        listing = "".join(f"{one.key} {one.size} {one.modified}\n" for one in entries)
        folder = cache_dir / "folders" / hashlib.sha256(f"{uri}\n{listing}".encode()).hexdigest()[:32]
        for entry in entries:
            path = folder / entry.key
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                bucket.fetch(entry.key, path)
    except GkrError as error:
        raise ConfigError(f"the model's folder cannot be read: {error.message}", where=uri, hint=_HINT) from error
    return folder
