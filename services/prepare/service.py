"""Preparation as a service: datasets are made by replicas, a while at a time.

A call works for some seconds and says how far it is; asking again goes on. So no call is long, a replica that dies
loses little more than what its successor reads from its journal, and asking twice does no harm: the result is the same,
whoever made which part of it. Replicas that share a folder for their caches share the journals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from services.client import Asks, LocalClient
from services.prepare.embed import CaptionEmbedder
from services.prepare.encoded import GROUP, Job, advance
from services.prepare.rules import read_rules
from services.registry import CLASSES, load_class
from services.service import Call, Method, Reply, Service, ServiceContext
from services.wire.messages import PrepareArgs, PrepareReply
from spec.errors import GkrError, RefusedError
from spec.preparation import PrepareReport, PrepareRules

MOST_SECONDS = 30.0
DEADLINE_SECONDS = 600.0
"""Of a call: its own time, a group of samples, the end of a shard and the end of the dataset."""


class PrepareService(Service):
    """`advance`: see `PrepareArgs`."""

    methods: ClassVar[tuple[Method, ...]] = (Method("advance", PrepareArgs, PrepareReply),)

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._embedder: CaptionEmbedder | None = None

    def compute(self, method: str, calls: Sequence[Call]) -> Sequence[Reply | GkrError]:
        """Each call for its time, one after the other."""
        return [self._advance(call.args) for call in calls]

    def _advance(self, args: PrepareArgs) -> Reply | GkrError:
        seconds = min(args.seconds, MOST_SECONDS)
        try:
            rules = read_rules(args.rules)
            job = Job(
                args.source, args.manifest, rules, work=self.context.cache_dir / "prepare", lock_timeout_seconds=seconds
            )
            report = advance(job, embedders=self._embedders(rules), seconds=seconds)
        except GkrError as error:
            return error
        return Reply(PrepareReply(report=report.write_json()))

    def _embedders(self, rules: PrepareRules) -> list[CaptionEmbedder]:
        if rules.latents is not None:
            raise RefusedError(
                f"{self.context.name} has no autoencoder for latents",
                hint="let gkr data prepare itself ask the services of the run: --services without --by",
            )
        if rules.embed == "none":
            return []
        if self._embedder is None:
            context = ServiceContext("encode", "encoder", self.context.cache_dir, manifest="", max_batch=GROUP)
            self._embedder = CaptionEmbedder(LocalClient(load_class(CLASSES["encode"])(context)))
        return [self._embedder]


def prepare_by(
    client: Asks, args: PrepareArgs, *, told: Callable[[PrepareReport], None] = lambda report: None
) -> PrepareReport:
    """Ask until the dataset is there."""
    while True:
        reply = client.call("advance", args, reply=PrepareReply, deadline_seconds=DEADLINE_SECONDS)
        report = PrepareReport.read_json(reply.body.report)
        if report.done:
            return report
        told(report)
