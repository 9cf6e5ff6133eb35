"""Ask the syncer of this pod: `python -m training.sync.ask status`.

`gkr sync` starts this in the syncer's pod, where the run's keys are; from outside nothing but learners gets in. Imports
neither torch nor numpy, so that it answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from spec.errors import EXIT_OK, ConfigError, GkrError
from spec.plan import Plan
from spec.sync_keys import SyncKeys
from spec.sync_status import ask_syncer

_SECONDS = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Print the answer to one question of the control port."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    try:
        address = _address(Path(os.environ.get("GKR_RUN_DIR", "")) / "syncer.json")
        run = Plan.read_json(Path(os.environ.get("GKR_PLAN", "")).read_bytes()).run
        answer = ask_syncer(address, run=run, path=path, keys=SyncKeys.read(), timeout_seconds=_SECONDS)
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.buffer.write(answer)
    return EXIT_OK


def _address(endpoints: Path) -> str:
    try:
        return str(json.loads(endpoints.read_text())["control"])
    except (OSError, ValueError, KeyError) as error:
        hint = "it writes this file when it serves; `gkr logs --role syncer` shows what it does"
        raise ConfigError("the syncer does not serve yet", where=f"{endpoints}", hint=hint) from error


if __name__ == "__main__":
    sys.exit(main())
