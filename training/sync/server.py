"""The syncer process: `python -m training.sync.server`.

Survives SIGKILL at any moment: a new process on the same store and ports goes on where HEAD says. Ends cleanly on
SIGTERM, with its parent, when another syncer takes over, or (`--until-final`) when the run needs it no more. Imports no
torch.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from spec.errors import EXIT_FAILED, EXIT_OK, ConfigError, GkrError, RefusedError
from spec.plan import Plan
from spec.sync_keys import ENVIRONMENT, SyncKeys
from storage import Limits, open_bucket
from training.files import replace_text
from training.processes import die_with_parent
from training.shipping import Outbox
from training.sync.bulk import BulkHandler
from training.sync.control import ControlHandler
from training.sync.end import End
from training.sync.journal import Journal
from training.sync.refusals import RefusalLog
from training.sync.store import Store
from training.sync.syncer import Syncer
from training.sync.wire import Handler, SyncServer

_LOG = logging.getLogger("training.sync")
STORE_LIMITS = Limits(connect_seconds=3, request_seconds=30, retry_seconds=5)
"""Registrations wait for HEAD, and everybody waits for them: the syncer says soon that its store is away, and tries on.
"""
LAST_SHIP_SECONDS = 20.0
_LOOK_SECONDS = 0.2


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop; the exit code of the contract."""
    args = _parse(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _die_with_parent()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        return _serve(args, stop)
    except GkrError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.sync.server", description="Merge the learners of one run.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run")
    parser.add_argument("--endpoints", type=Path, help="file that is written when both ports answer")
    parser.add_argument("--events", type=Path, help="events.jsonl of the run; on a cluster events go to its bucket")
    parser.add_argument(
        "--work", type=Path, help="folder for what goes to a store that is no folder (default: in GKR_RUN_DIR)"
    )
    parser.add_argument("--control-port", type=int, help="default: the plan's; 0 takes a free one")
    parser.add_argument("--bulk-port", type=int, help="default: the plan's; 0 takes a free one")
    parser.add_argument("--until-final", action="store_true", help="end when the run needs no syncer any more")
    return parser.parse_args(arguments)


def _serve(args: argparse.Namespace, stop: threading.Event) -> int:
    plan = _read_plan(args.plan)
    assert plan.syncer is not None
    run_dir = Path(os.environ.get("GKR_RUN_DIR") or args.plan.parent)
    bucket = open_bucket(plan.syncer.store, limits=STORE_LIMITS)
    host = "127.0.0.1" if plan.backend == "local" else "0.0.0.0"  # noqa: S104  (in a pod the address is the pod's own)
    # Ports first: a syncer that cannot serve must not depose one that does.
    ports = {"control": args.control_port, "bulk": args.bulk_port}
    planned = {"control": plan.syncer.control_port, "bulk": plan.syncer.bulk_port}
    handlers: dict[str, type[Handler]] = {"control": ControlHandler, "bulk": BulkHandler}
    keys, refusals = _read_keys(plan), RefusalLog()
    servers = {
        name: _bind(
            name, (host, planned[name] if port is None else port), handlers[name],
            run=plan.run, keys=keys, refusals=refusals,
        )
        for name, port in ports.items()
    }  # fmt: skip
    with _events(plan, args.events, run_dir=run_dir) as (journal, outbox):
        try:
            store = Store(
                bucket,
                keep_states=plan.syncer.config.keep_states,
                work=args.work or run_dir / "state" / f"sync-{plan.run}",
            )
        except OSError as error:
            raise ConfigError(
                f"the syncer's store cannot be used: {error.strerror}",
                where=str(error.filename or bucket.uri),
                hint="check path, space and rights",
            ) from error
        syncer = Syncer(plan, store=store, journal=journal)
        for name, server in servers.items():
            server.attach(syncer.desk)
            threading.Thread(target=server.serve_forever, name=name, kwargs={"poll_interval": 0.2}, daemon=True).start()
        syncer.start()
        _say_where(args.endpoints, servers)
        _wait_for_end(syncer, stop=stop, end=End.of(plan) if args.until_final else None, outbox=outbox)
        syncer.stop()
        for server in servers.values():
            server.shutdown()
            server.server_close()
    failure = syncer.core.failure
    if isinstance(failure, GkrError):
        raise failure
    return EXIT_OK if failure is None else EXIT_FAILED


@contextmanager
def _events(plan: Plan, path: Path | None, *, run_dir: Path) -> Generator[tuple[Journal, Outbox | None]]:
    """Where events go: to the run's file on the local backend, else to a file of ours and from there to the bucket."""
    if plan.backend == "local":
        if path is None:
            raise ConfigError("--events is not given", hint="name the run's events.jsonl")
        yield Journal(path), None
        return
    outbox = Outbox.open(
        open_bucket(plan.home.run_uri, limits=STORE_LIMITS),
        source="syncer",
        folder=run_dir / "state" / "events-syncer",
        deadline_seconds=plan.timeouts.start,
    )
    try:
        yield Journal(outbox.path, history=outbox.history), outbox
    finally:
        if not outbox.close(deadline_seconds=LAST_SHIP_SECONDS):
            _LOG.warning("events are not all in the bucket after %g s", LAST_SHIP_SECONDS)


def _wait_for_end(syncer: Syncer, *, stop: threading.Event, end: End | None, outbox: Outbox | None) -> None:
    while not stop.wait(_LOOK_SECONDS) and syncer.core.failure is None:
        if outbox is not None and outbox.taken_over:
            syncer.core.fail(RefusedError("another syncer ships the events of this run", hint="this one ends"))
        reason = end.reached(syncer.desk.status(), now=time.monotonic()) if end is not None else ""
        if reason:
            syncer.core.journal.note(f"the syncer ends: {reason}")
            return


def _read_plan(path: Path) -> Plan:
    try:
        plan = Plan.read_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be read: {error.strerror}", where=str(path), hint="--plan wants the run's plan.json"
        ) from error
    except ValidationError as error:
        raise ConfigError(
            f"the plan is not valid: {error.errors()[0]['msg']}", where=str(path), hint="make it anew with `gkr plan`"
        ) from error
    if plan.syncer is None:
        raise ConfigError(
            f"run {plan.run} has no syncer", where=str(path), hint="only runs whose learners are synchronised need one"
        )
    return plan


def _read_keys(plan: Plan) -> SyncKeys | None:
    """None only where nobody else can come: on loopback."""
    keys = SyncKeys.read()
    if keys is None and plan.backend != "local":
        raise ConfigError(
            f"the syncer of run {plan.run} has no keys, and would serve whoever finds its ports",
            hint=f"`gkr launch` mounts them; {ENVIRONMENT} names their folder",
        )
    return keys


def _bind(
    name: str,
    address: tuple[str, int],
    handler: type[Handler],
    *,
    run: str,
    keys: SyncKeys | None,
    refusals: RefusalLog,
) -> SyncServer:
    try:
        return SyncServer(address, handler, run=run, keys=keys, refusals=refusals)
    except OSError as error:
        if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
            raise
        why = "is taken by another process" if error.errno == errno.EADDRINUSE else "needs more rights"
        raise ConfigError(
            f"the syncer's {name} port {address[1]} on {address[0]} {why}",
            hint=f"end what listens there (`ss -ltnp` shows it), or choose another with --{name}-port (0: a free one)",
        ) from error


def _say_where(path: Path | None, servers: dict[str, SyncServer]) -> None:
    content = {name: f"{server.server_address[0]}:{server.server_address[1]}" for name, server in servers.items()}
    if path is not None:
        replace_text(path, json.dumps({**content, "pid": os.getpid()}))
    _LOG.info("serving %s", content)


def _die_with_parent() -> None:
    """End at once when the parent process ends, so that nothing outlives a supervisor that was killed.

    The kernel's death signal already comes when only the *thread* that started this process ends. So the signal just
    makes us look whether the parent is still the same.
    """
    parent = os.getppid()

    def look(_number: int, _frame: object) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    signal.signal(signal.SIGUSR2, look)
    die_with_parent(signal.SIGUSR2)
    look(0, None)


if __name__ == "__main__":
    sys.exit(main())
