"""The control port: registrations, heartbeats, verdicts, status. Small JSON only, so that no transfer can starve a
heartbeat.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from training.sync.messages import CommitArgs, DrainedArgs, HeartbeatArgs, LeaveArgs, PartState, RegisterArgs, Status
from training.sync.metrics import CONTENT_TYPE
from training.sync.refusals import Refusal
from training.sync.wire import Handler, read_counts


class ControlHandler(Handler):
    """Routes of the control port."""

    def handle_path(self, path: list[str], query: dict[str, str]) -> None:
        match (self.command, path):
            case ("POST", ["register"]):
                self.reply(self.desk.register(self.read_json(RegisterArgs)))
            case ("POST", ["heartbeat"]):
                self.reply(self.desk.heartbeat(self.read_json(HeartbeatArgs)))
            case ("POST", ["leave"]):
                self.reply(self.desk.leave(self.read_json(LeaveArgs)))
            case ("POST", ["drained"]):
                self.reply(self.desk.drained(self.read_json(DrainedArgs)))
            case ("POST", ["commit"]):
                args = self.read_json(CommitArgs)
                verdict = self.desk.commit(args.contribution, wait_seconds=args.wait_seconds)
                self.reply(verdict or self.desk.status(), status=200 if verdict else 202)
            case ("GET", ["status"]):
                self.reply(self._status())
            case ("GET", ["metrics"]):
                self.send(self.desk.metrics(self._status()), kind=CONTENT_TYPE)
            case ("GET", ["version"]):
                at_least, wait = _number(query, "at_least"), _number(query, "wait")
                self.reply(self.desk.wait_version(int(at_least), wait_seconds=wait))
            case ("GET", ["parts", learner, *numbers]) if len(found := read_counts(numbers)) == 4:
                self.check_sender(learner)
                generation, fragment, seq, rank = found
                state = self.desk.part_state(
                    learner=learner, generation=generation, fragment=fragment, seq=seq, rank=rank
                )
                self.reply(PartState(state=state))
            case _:
                raise Refusal("unknown_path", f"{self.command} {self.path} is not served on the control port")

    def _status(self) -> Status:
        """With what the ports themselves refused."""
        status = self.desk.status()
        found = Counter(status.refusals) + Counter(self.server.refusals.counts())
        return msgspec.structs.replace(status, refusals=dict(found))


def _number(query: dict[str, str], name: str) -> float:
    try:
        number = float(query.get(name, "0"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refusal("bad_request", f"{name}={query[name][:40]!r} is not a number")
    return number
