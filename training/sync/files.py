"""The syncer's large files: states and published models.

They are written and read as files of the syncer's own folder. Where that folder does not outlive the syncer, a bucket
holds copies: `keep` returns when the copy is whole and verified, so that HEAD never names a file that could be lost,
and what is not here (any more) is fetched from there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from spec.errors import RefusedError, UnreachableError
from storage import Bucket, MissingError
from training.sync.layout import Floats
from training.sync.state import map_weights, state_prefix
from training.sync.tensors import Point, Written, hash_file, no_point

MODELS_KEPT = 8
"""Published models that stay: evaluation may lag some rounds behind."""
_STATE = re.compile(r"state-(\d{2})-\d{8}-\d{6}\.safetensors")
"""Fragment, its version, epoch of the writer; see `training.sync.state`."""
_SUFFIX = ".safetensors"


class StoreError(OSError):
    """The store does not take or give something now; the same call may succeed later."""


@contextmanager
def later() -> Generator[None]:
    """Turn a store's refusals into `StoreError`: the syncer treats a bucket that is away like a disk that is full."""
    try:
        yield
    except (UnreachableError, RefusedError) as error:
        raise StoreError(f"{error.where}: {error.message}") from error


class Files:
    """One run's states and models."""

    def __init__(self, folder: Path, *, copies: Bucket | None, keep_states: int, point: Point = no_point) -> None:
        """`copies`: a bucket, if the folder is not the store itself."""
        self.folder, self.states, self.models = folder, folder / "states", folder / "models"
        self._copies, self._keep_states, self._point = copies, keep_states, point
        for one in (self.states, self.models):
            one.mkdir(parents=True, exist_ok=True)

    def keep(self, written: Written) -> None:
        """Make a file that was written here outlive the syncer."""
        if self._copies is None:
            return
        key = _key(written.path)
        with later():
            self._copies.send(key, written.path)
            found = self._copies.digest(key)
        if found != (written.size, written.sha256):
            raise StoreError(f"{self._copies.uri}/{key} reads back other bytes than were written")
        self._point(f"{written.path.parent.name.rstrip('s')}-kept")

    def state(self, name: str, *, sha256: str) -> Path:
        """Where a state is; nothing is there if it is lost. Raises what the bucket raises."""
        path = self.states / name
        if self._copies is not None and not (path.exists() and hash_file(path) == sha256):
            path.unlink(missing_ok=True)
            with suppress(MissingError):
                self._copies.fetch(_key(path), path)
        return path

    def model(self, digest: str) -> Path:
        """Where a published model is; nothing is there if it is not kept any more."""
        path = self.models / f"{digest}{_SUFFIX}"
        if self._copies is not None and not path.exists():
            with later(), suppress(MissingError):
                self._copies.fetch(_key(path), path, sha256=digest)
        return path

    def read_version(self, version: int, *, fragment: int) -> Floats | None:
        """Weights of an earlier version of a fragment, while its state is kept."""
        prefix = state_prefix(fragment, version)
        names = [path.name for path in self.states.glob(f"{prefix}*{_SUFFIX}")]
        if not names and self._copies is not None:
            with later():
                names = [name for name in _names(self._copies, self.states) if name.startswith(prefix)]
        if not names:
            return None
        path = self.states / max(names)
        if self._copies is not None and not path.exists():
            with later(), suppress(MissingError):
                self._copies.fetch(_key(path), path)
        with suppress(FileNotFoundError):
            return map_weights(path)
        return None

    def prune(self, *, states: Sequence[str], model: str, wanted: tuple[str, ...] = ()) -> None:
        """Remove each fragment's states older than the newest few, and all but the newest models. `states`, one of each
        fragment, and `model` count now; states whose names begin with one of `wanted` stay.

        A state that is newer is never touched: a syncer that has been replaced without knowing it yet may be here.
        """
        here = [path.name for path in self.states.iterdir()]
        for name in self._old_states(here, states=states, wanted=wanted):
            (self.states / name).unlink(missing_ok=True)
        models = [(path.stat().st_mtime_ns, path.name) for path in self.models.glob(f"*{_SUFFIX}")]
        for name in _old_models(models, model=model):
            (self.models / name).unlink(missing_ok=True)
        if self._copies is None:
            return
        with later():
            here = _names(self._copies, self.states)
            old = self._old_states(here, states=states, wanted=wanted)
            self._copies.delete(_key(self.states / name) for name in old)
            kept = [(entry.modified, entry.key.rpartition("/")[2]) for entry in self._copies.list(self.models.name)]
            self._copies.delete(_key(self.models / name) for name in _old_models(kept, model=model))

    def sweep(self) -> None:
        """Remove what crashed writers left unfinished."""
        for folder in (self.folder, self.states, self.models):
            for path in (*folder.glob("*.tmp"), *folder.glob(".partial-*")):
                if not path.name.startswith(".partial-lock-"):  # which others may be holding
                    path.unlink(missing_ok=True)

    def _old_states(self, names: Collection[str], *, states: Sequence[str], wanted: tuple[str, ...]) -> list[str]:
        old: list[str] = []
        for state in states:
            mine = _fragment(state)
            ours = sorted((name for name in names if _fragment(name) == mine and name <= state), reverse=True)
            old += [name for name in ours[self._keep_states :] if not name.startswith(wanted)]
        return old


def _old_models(models: Iterable[tuple[float, str]], *, model: str) -> list[str]:
    newest = sorted(models, reverse=True)
    return [name for _, name in newest[MODELS_KEPT:] if name != f"{model}{_SUFFIX}"]


def _fragment(name: str) -> str:
    """Which fragment a state is of; empty if it is something else."""
    found = _STATE.fullmatch(name)
    return found[1] if found else ""


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _names(bucket: Bucket, folder: Path) -> list[str]:
    return [entry.key.rpartition("/")[2] for entry in bucket.list(folder.name)]
