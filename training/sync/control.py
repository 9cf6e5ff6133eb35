"""The control port: registrations, heartbeats, verdicts, status. Small JSON only, so that no transfer can starve a
heartbeat.
"""

from __future__ import annotations

from training.sync.messages import CommitArgs, HeartbeatArgs, LeaveArgs, PartState, RegisterArgs
from training.sync.refusals import Refusal
from training.sync.wire import Handler


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
            case ("POST", ["commit"]):
                args = self.read_json(CommitArgs)
                verdict = self.desk.commit(args.contribution, wait_seconds=args.wait_seconds)
                self.reply(verdict or self.desk.status(), status=200 if verdict else 202)
            case ("GET", ["status"]):
                self.reply(self.desk.status())
            case ("GET", ["version"]):
                at_least, wait = _number(query, "at_least"), _number(query, "wait")
                self.reply(self.desk.wait_version(int(at_least), wait_seconds=wait))
            case ("GET", ["parts", learner, generation, seq, rank]) if all(
                one.isdigit() for one in (generation, seq, rank)
            ):
                state = self.desk.part_state(learner=learner, generation=int(generation), seq=int(seq), rank=int(rank))
                self.reply(PartState(state=state))
            case _:
                raise Refusal("unknown_path", f"{self.command} {self.path} is not served on the control port")


def _number(query: dict[str, str], name: str) -> float:
    try:
        return float(query.get(name, "0"))
    except ValueError as error:
        raise Refusal("bad_request", f"{name}={query[name]!r} is not a number") from error
