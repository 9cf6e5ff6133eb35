"""This machine as a backend: a supervisor process owns each run, so that looking at one needs only its folder."""

from __future__ import annotations

from pathlib import Path

from gkr.backend import Attachment, Say
from gkr.runs import Run, supervisor_pid
from spec.plan import Plan


class LocalBackend:
    """Runs as processes of this machine."""

    name = "local"

    def check(self, plan: Plan, *, say: Say) -> None:
        """What the plan asks for that is not carried out here, and whether its roles are installed."""
        from gkr.local.capabilities import refuse_what_is_not_carried_out
        from gkr.local.environment import require_roles

        del say
        refuse_what_is_not_carried_out(plan)
        require_roles()

    def launch(self, plan: Plan, *, root: Path, say: Say) -> Run:
        """A folder and a supervisor that lives on its own."""
        from gkr.local.launcher import create_run, start_supervisor, withdraw_run

        self.check(plan, say=say)
        run = create_run(plan, root=root)
        try:
            start_supervisor(run)
        except KeyboardInterrupt:
            withdraw_run(run)
            raise
        return run

    def attach(self, run: Run) -> Attachment:
        return _Supervised(run)

    def cancel(self, run: Run, *, now: bool, timeout_seconds: float) -> str:
        from gkr.local.launcher import cancel_run

        return cancel_run(run, now=now, timeout_seconds=timeout_seconds)

    def resume(self, run: Run) -> None:
        from gkr.local.environment import require_roles
        from gkr.local.launcher import resume_run

        require_roles()
        resume_run(run)

    def ask_syncer(self, run: Run, *, path: str) -> bytes:
        from gkr.local.asking import ask_local_syncer

        return ask_local_syncer(run, path=path)


class _Supervised:
    """The supervisor writes everything into the folder itself."""

    poll_seconds = 0.2

    def __init__(self, run: Run) -> None:
        self._run = run

    def refresh(self) -> bool:
        """Whether the supervisor lives. Asked before reading, so that what it wrote before it went is still read."""
        return supervisor_pid(self._run.path) is not None

    def fetch(self) -> None:
        """It is all here already."""

    def logs(self) -> None:
        """They are here already."""

    def finish(self) -> None:
        """The supervisor does it before it goes."""

    def close(self) -> None:
        """Nothing is open."""
