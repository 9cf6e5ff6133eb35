"""Asks the syncer of a run on this machine, at the address that it published."""

from __future__ import annotations

import json

from gkr.local.states import SYNCER
from gkr.local.supervisor import KEYS
from gkr.runs import Run
from spec.errors import UnreachableError
from spec.sync_keys import SyncKeys
from spec.sync_status import ask_syncer

_SECONDS = 5.0


def ask_local_syncer(run: Run, *, path: str) -> bytes:
    """The answer of its control port; UnreachableError if there is none."""
    endpoints = run.path / "state" / "syncer.json"
    try:
        address = str(json.loads(endpoints.read_text())["control"])
    except (OSError, ValueError, KeyError) as error:
        raise UnreachableError(f"the syncer of run {run.name} does not serve yet", where=f"{endpoints}") from error
    folder = run.path / KEYS / SYNCER
    keys = SyncKeys.read_folder(folder) if folder.exists() else None
    return ask_syncer(address, run=run.name, path=path, keys=keys, timeout_seconds=_SECONDS)
