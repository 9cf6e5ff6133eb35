"""The training loop of one rank.

Promises: a step is committed (position moves, progress page) only after the optimizer step; a checkpoint holds
everything a restart needs; the order of samples and their noise depend on the position alone; all ranks take every
decision together, rank 0 deciding. Must not: talk to Ray, wait without a deadline, or know which backend it is on.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from services.client import ServiceClient
from spec import events as ev
from spec.errors import ConfigError
from spec.plan import LearnerPlan, Plan, ServicePlan
from spec.train import TrainConfig
from storage import open_bucket
from storage.cache import Cache
from storage.datasets import default_cache
from training import parallel
from training.checkpoint import CheckpointFailure, CheckpointWriter, Loaded, SavedCheckpoint, load_latest
from training.collectives import all_gather_json
from training.conditions import Conditions
from training.context import RuntimeContext
from training.data.account import Sum, account
from training.data.features import check_encoder
from training.data.loader import Loader, LocalBatch
from training.data.plan import Start
from training.data.work import mixture_of
from training.ema import Ema
from training.event_log import EventLog
from training.flops import mfu, peak_flops, training_flops
from training.meter import WAITS, Meter, resident_bytes
from training.optimizer import ShardedAdamW, learning_rate
from training.progress import ProgressWriter
from training.rounds import Beginning, Rounds
from training.step import train_step
from training.step_batch import StepBatch, to_device
from training.validation import Validation

log = logging.getLogger("trainer")

DATA_DEADLINE_SECONDS = 60.0
COLLECTIVE_DEADLINE_SECONDS = 900.0
"""Longest wait of one rank for another, at least; see `collective_seconds`."""
_PATIENCE = 1.5
"""Of the other ranks, as a share of rank 0's: it must be the one that says what is missing."""


def train(plan: Plan, *, context: RuntimeContext) -> None:
    """Train one rank of one learner until the shared model is final."""
    if plan.train is None or plan.syncer is None:
        raise ConfigError(
            "this plan has no `train` section", hint="a plan with `run` starts the person's own command instead"
        )
    # One thread per rank on CPU: several ranks share the cores, and the loader workers have theirs.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with ProgressWriter(context.folder / f"progress-{context.rank}.page", epoch=context.epoch) as page:
        page.phase("join")
        device = _join(context, timeout_seconds=collective_seconds(plan))
        try:
            _Trainer(plan, context=context, page=page, device=device).run()
        finally:
            parallel.close_process_group()


def collective_seconds(plan: Plan) -> float:
    """Longest wait of one rank for another. Above that for the syncer, which is rank 0's alone and the plan's to say; a
    dead peer is noticed at once all the same.
    """
    assert plan.syncer is not None
    return max(COLLECTIVE_DEADLINE_SECONDS, _PATIENCE * plan.syncer.config.barrier_timeout)


def _join(context: RuntimeContext, *, timeout_seconds: float) -> torch.device:
    """This rank's device, once all ranks of the learner are there."""
    device = torch.device("cuda", context.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if context.master_addr == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    parallel.init_process_group(
        context.rank,
        world_size=context.world_size,
        init_method=f"tcp://{context.master_addr}:{context.master_port}",
        device=device,
        timeout_seconds=timeout_seconds,
    )
    return device


class _Trainer:
    def __init__(self, plan: Plan, *, context: RuntimeContext, page: ProgressWriter, device: torch.device) -> None:
        assert plan.train is not None
        assert plan.syncer is not None
        self.plan, self.context, self.page, self.device = plan, context, page, device
        self.config: TrainConfig = plan.train
        self.learner: LearnerPlan = plan.learner(context.learner)
        self.events = EventLog(context.folder / f"events-{context.epoch}-{context.rank}.jsonl", source=context.source)
        self.meter = Meter()
        mesh = parallel.make_mesh(context.world_size, shard_size=self.config.shard_size, device_type=device.type)
        self.model = parallel.build_model(self.config, mesh=mesh, device=device)
        self.optimizer = ShardedAdamW(self.model, config=self.config)
        self.ema = Ema(self.model, decay=self.config.ema_decay)
        self.rounds = Rounds(
            plan, context=context, model=self.model, ema=self.ema, page=page, meter=self.meter, events=self.events
        )
        self.checkpoints = open_bucket(self.learner.checkpoints)
        self.writer = CheckpointWriter(
            self.checkpoints,
            keep=self.config.checkpoint.keep,
            rank=context.rank,
            world_size=context.world_size,
            epoch=context.epoch,
            attempt=context.attempt,
        )
        self.queue: deque[LocalBatch] = deque()
        self.trained = Sum()
        """Samples of this rank since `told_until`."""
        self.told_until = 0

    def run(self) -> None:
        self.page.phase("restore")
        loaded = load_latest(
            self.checkpoints, model=self.model, optimizer=self.optimizer, ema=self.ema, vectors=("anchor",)
        )
        state = self.rounds.restore(loaded)
        loader = self._loader(state.position, starts=loaded.state.get("starts", []) if loaded else [])
        client: ServiceClient | None = None
        try:
            self._restored(state, step=loader.step, loaded=loaded)
            client = self._encoder()
            conditions = None
            if client is not None and (width := self.config.model.embedding_width):
                conditions = Conditions(client, folder=self.context.folder / "embeddings", width=width)
                conditions.connect()
                if loader.encoder:
                    check_encoder(loader.encoder, asked=conditions.encoder, where=self.learner.data_manifest)
            self.validation = Validation(
                self.plan, context=self.context, joined=loader.joined, conditions=conditions, device=self.device
            )
            self._loop(loader, conditions=conditions)
            self.rounds.leave()
        finally:
            loader.close()
            if client is not None:
                self._tell_asked(client)
                client.close()
            self.rounds.close()
        self._finish()

    def _loader(self, position: int, *, starts: list[Any]) -> Loader:
        if self.learner.data_cache_limit is not None:
            Cache(default_cache(), limit_bytes=self.learner.data_cache_limit)
        return Loader(
            [self.learner.data_manifest, *self.learner.data_more],
            mixture=mixture_of(self.learner),
            seed=self.config.seed,
            learner=self.learner.name,
            start_position=position,
            batch=self.config.batch,
            buckets=self.plan.buckets,
            starts=[Start.from_json(one) for one in starts],
            rank=self.context.rank,
            world_size=self.context.world_size,
            workers=self.config.loader_workers,
            prefetch=self.config.prefetch_batches,
            model=self.config.model,
            node_ranks=sum(one.ranks for one in self.learner.nodes if one.name == self.context.node) or 1,
        )

    def _restored(self, state: Beginning, *, step: int, loaded: Loaded | None) -> None:
        self.page.restored(step=step, position=state.position)
        self.told_until = state.position
        if self.context.rank == 0:
            self.events.emit(
                ev.Restored,
                learner=self.learner.name,
                attempt=self.context.attempt,
                mode=state.mode,
                step=step,
                position=state.position,
                samples_lost=max(0, self.context.last_position - state.position),
                merged=state.merged,
                merged_until=state.merged_until,
                checkpoint=loaded.path if loaded else "",
                skipped=list(loaded.skipped) if loaded else [],
            )

    def _encoder(self) -> ServiceClient | None:
        if self.config.model.embedding_width is None:
            return None
        encoder = self._encoding
        return ServiceClient(
            self.context.folder / "services.json",
            service=encoder.name,
            identity=encoder.client(f"{self.learner.name}/rank-{self.context.rank}", run=self.plan.run),
            counted=encoder.is_shared,
        )

    @property
    def _encoding(self) -> ServicePlan:
        return next(service for service in self.learner.services if service.kind == "encode")

    def _tell_asked(self, client: ServiceClient) -> None:
        """At the end: a platform's replicas tell nothing of single runs."""
        if self._encoding.is_shared:
            self.events.emit(
                ev.ServiceAsked,
                learner=self.learner.name,
                service=self._encoding.name,
                client=f"rank-{self.context.rank}",
                attempt=self.context.attempt,
                **client.asked.counts(),
            )

    def _loop(self, loader: Loader, *, conditions: Conditions | None) -> None:
        if self.page.step == 0:
            self._validate()
        self.rounds.begin()
        while not self.rounds.final:
            local, batch = self._next(loader, conditions=conditions)
            self.page.phase("step")
            rate = learning_rate(self.config, samples=self.rounds.samples_of_all())
            result = train_step(
                self.model,
                optimizer=self.optimizer,
                ema=self.ema,
                batch=batch,
                config=self.config,
                learning_rate=rate,
                samples=local.whole,
                mark=local.mark,
                signals=[*self.meter.waits(), *self.rounds.signals()],
            )
            waits, signals = result.signals[: len(WAITS)], result.signals[len(WAITS) :]
            if not result.applied:
                numbers = f"loss {result.loss}, gradient norm {result.gradient_norm}"
                raise FloatingPointError(f"{numbers} at step {self.page.step + 1}, position {self.page.position}")
            self.page.committed(samples=local.whole)
            self.trained += account(local.refs)
            self.rounds.committed(local.whole)
            flops = local.whole * training_flops(self.config.model, size=batch.size)
            self.meter.step(loss=result.loss, gradient_norm=result.gradient_norm, samples=local.whole, flops=flops)
            self.meter.all_waited(waits, ranks=self.context.world_size)
            due = self.rounds.due(signals)
            if due:
                self._tell_trained()
            if due or self.page.step % self.config.log_every == 0:
                self._flush(rate, loader=loader)
            if self.rounds.settle(signals, loss=result.loss):
                self._validate()
            if self.page.step % self.config.checkpoint.every_steps == 0 and not self.rounds.final:
                self._save(loader)
            self._report(loader)

    def _next(self, loader: Loader, *, conditions: Conditions | None) -> tuple[LocalBatch, StepBatch]:
        """The next batch, and it on the device; keeps the conditions of the batches behind it under way."""
        self.page.phase("data")
        with self.meter.standing("data"):
            while not self.queue or (len(self.queue) < self.config.prefetch_batches and loader.ready):
                local = loader.next(timeout_seconds=DATA_DEADLINE_SECONDS)
                if conditions is not None and not loader.encoder:
                    conditions.prefetch(local.captions)
                self.queue.append(local)
        head = self.queue.popleft()
        embeddings = head.embeddings if loader.encoder else None
        if conditions is not None and not loader.encoder:
            with self.meter.standing("encode"):
                embeddings = conditions.get(head.captions)
        return head, to_device(head, embeddings=embeddings, device=self.device)

    def _tell_trained(self) -> None:
        """Say which samples the steps since the last time were made of. All ranks call it at the same step, and before
        anything from which the learner could be restarted.
        """
        if self.page.position == self.told_until:
            return
        own = [self.trained.samples, self.trained.text]
        whole = sum((Sum.parse(*one) for one in all_gather_json(own)), Sum())
        if self.context.rank == 0:
            self.events.emit(
                ev.Trained,
                learner=self.learner.name,
                attempt=self.context.attempt,
                first=self.told_until,
                last=self.page.position,
                samples=whole.samples,
                sums=whole.text,
            )
        self.trained, self.told_until = Sum(), self.page.position

    def _validate(self) -> None:
        self.page.phase("validate")
        with self.rounds.shared_weights():
            loss = self.validation.loss(cast("FSDPModule", self.model))
        if self.context.rank == 0:
            self.events.emit(ev.Validation, learner=self.learner.name, round=self.rounds.version, loss=loss)

    def _flush(self, rate: float, *, loader: Loader) -> None:
        values = self.meter.flush()
        flops = values.pop("flops_per_second")
        if self.context.rank != 0:
            return
        self.events.emit(
            ev.StepMetrics,
            learner=self.learner.name,
            attempt=self.context.attempt,
            step=self.page.step,
            position=self.page.position,
            round=self.rounds.version,
            learning_rate=rate,
            mfu=mfu(flops, devices=self.context.world_size, peak=_peak(self.device)),
            loader_queue=loader.ready,
            cache=loader.cache_counts(),
            blocked_seconds=self.meter.rounded(),
            waited_seconds={name: round(seconds, 4) for name, seconds in self.meter.waited.items()},
            memory_bytes=resident_bytes(),
            **values,
        )

    def _save(self, loader: Loader) -> None:
        self._tell_trained()
        self.page.phase("checkpoint")
        with self.meter.standing("snapshot"):
            self.writer.save(
                step=self.page.step,
                model=self.model,
                optimizer=self.optimizer,
                ema=self.ema,
                vectors={"anchor": self.rounds.anchor},
                state={
                    "step": self.page.step,
                    "position": self.page.position,
                    "starts": [one.to_json() for one in loader.starts(self.page.position)],
                    "rounds": self.rounds.to_state(),
                },
            )

    def _report(self, loader: Loader) -> None:
        """Say what happened beside the steps: saved checkpoints, samples and loader workers that were replaced."""
        self._report_saved(self.writer.poll())
        for bad in loader.quarantined():
            self.events.emit(
                ev.Quarantined,
                learner=self.learner.name,
                position=bad.position,
                dataset=bad.source,
                sample=bad.sample,
                reason=bad.reason,
                replacement=bad.replacement,
            )
        for death in loader.worker_events():
            self.events.emit(
                ev.Recovery,
                learner=self.learner.name,
                what=f"loader worker {death.index} of rank {self.context.rank}",
                cause=death.cause,
                action="its batches were made again by a new worker",
                detected_seconds=death.detected_seconds,
            )

    def _report_saved(self, ended: Sequence[SavedCheckpoint | CheckpointFailure]) -> None:
        for saved in ended:
            if self.context.rank != 0:
                continue
            if isinstance(saved, CheckpointFailure):
                self.events.emit(
                    ev.Note,
                    level="warning",
                    text=f"{self.learner.name}: checkpoint of step {saved.step} failed: {saved.reason}",
                )
                continue
            self.events.emit(
                ev.CheckpointSaved,
                learner=self.learner.name,
                attempt=self.context.attempt,
                step=saved.step,
                path=saved.path,
                bytes=saved.bytes,
                blocked_seconds=saved.blocked_seconds,
                seconds=saved.seconds,
            )

    def _finish(self) -> None:
        self.page.phase("finish")
        self._tell_trained()
        self._report_saved(self.writer.close(timeout_seconds=60))
        if self.context.rank == 0:
            self.rounds.report_end(attempt=self.context.attempt)
        dist.barrier()


def _peak(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
