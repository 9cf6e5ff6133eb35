"""Evaluates the merged model while learners train: a thread of the home learner's driver.

It watches the syncer's status for newly published models, asks the encoding service for embeddings of held-out
captions, the sampling service for images and the evaluation service for scores, and writes `samples` and `score`
events. Training never waits for it; rounds that are merged while it works are skipped, the final model never is.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import numpy as np

from services.client import ServiceClient
from services.wire.frames import Priority
from services.wire.messages import EncodeArgs, EncodeReply, SampleArgs, SampleReply, ScoreArgs, ScoreReply, Weights
from spec import events as ev
from spec.errors import GkrError
from spec.plan import LearnerPlan, Plan, ServicePlan
from spec.services import ServiceKind
from spec.sync_keys import SyncKeys
from storage import open_bucket
from training.data.held_out import HeldOut, held_out
from training.event_log import EventLog
from training.options import Options
from training.sync.client import SyncClient
from training.sync.layout import Layout

log = logging.getLogger("evaluation")

STATUS_SECONDS = 0.5
CALL_DEADLINE_SECONDS = 180.0
FINAL_DEADLINE_SECONDS = 300.0
"""From the last merged round to the final score."""
GRID_IMAGES = 40
"""Images kept with each evaluation for the report."""
IMAGES_PER_CALL = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A merged model as the syncer announces it."""

    version: int
    sha256: str
    final: bool


class Evaluation:
    """One thread; `finished` once the final model is scored, failed, or overdue."""

    @classmethod
    def for_home(cls, plan: Plan, *, options: Options, out: EventLog) -> Evaluation | None:
        """The evaluation of this run, if this driver is the home learner's and the plan has the services for it."""
        home = plan.home
        kinds = {service.kind for service in home.services}
        if options.learner != home.name or plan.train is None or "sample" not in kinds:
            return None
        return cls(plan, options=options, out=out)

    def __init__(self, plan: Plan, *, options: Options, out: EventLog) -> None:
        self._plan, self._options, self._out = plan, options, out
        self._stop = threading.Event()
        self._done = threading.Event()
        self._problem: str | None = None
        self._final_seen: float | None = None
        self._asked = time.monotonic()
        self._embeddings: dict[str, np.ndarray] = {}
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def finished(self) -> bool:
        """True when nothing more will come; asked once all ranks have finished."""
        if self._final_seen is None:
            self._final_seen = time.monotonic()
        if time.monotonic() - self._final_seen > FINAL_DEADLINE_SECONDS and not self._done.is_set():
            self._problem = f"no final score {FINAL_DEADLINE_SECONDS:.0f} s after the end of training"
            self._done.set()
        return self._done.is_set()

    def problem(self) -> str | None:
        """Why the final model could not be scored; none if it was."""
        return self._problem

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        home = self._plan.home
        clients: dict[ServiceKind, ServiceClient] = {}
        nothing = Layout(())  # only asks for the status
        sync = SyncClient(
            self._options.syncer_control,
            bulk=self._options.syncer_bulk,
            run=self._plan.run,
            learner=home.name,
            layout=nothing,
        )
        try:
            clients = {
                kind: self._client(home, kind=kind)
                for kind in ("encode", "sample", "evaluate")
                if _service(home, kind=kind)
            }
            self._watch(sync, clients=clients)
        except Exception as error:
            log.exception("evaluation ended")
            self._problem = f"{type(error).__name__}: {error}"
        finally:
            for client in clients.values():
                client.close()
            sync.close()
            self._done.set()

    def _client(self, home: LearnerPlan, *, kind: ServiceKind) -> ServiceClient:
        path = self._options.run_dir / "state" / f"services-{home.name}.json"
        service = _service(home, kind=kind)
        assert service is not None
        who = service.client(f"{home.name}/evaluation", run=self._plan.run)
        return ServiceClient(
            path, service=service.name, identity=who, priority=Priority.EVALUATION, counted=service.is_shared
        )

    def _tell_asked(self, clients: dict[ServiceKind, ServiceClient]) -> None:
        """A platform's replicas tell nothing of single runs."""
        home = self._plan.home
        for kind, client in clients.items():
            service = _service(home, kind=kind)
            if service is not None and service.is_shared:
                self._out.emit(
                    ev.ServiceAsked,
                    learner=home.name,
                    service=service.name,
                    client="evaluation",
                    attempt=self._options.attempt,
                    **client.asked.counts(),
                )

    def _watch(self, sync: SyncClient, *, clients: dict[ServiceKind, ServiceClient]) -> None:
        assert self._plan.train is not None
        every, last = self._plan.train.evaluation.every_rounds, 0
        while not self._stop.wait(STATUS_SECONDS):
            published = _published(sync)
            # In decoupled mode a version becomes the final one some time after it was merged.
            if published is None or (not published.final and (published.version % every or published.version <= last)):
                continue
            last = published.version
            try:
                self._evaluate(published, clients=clients)
            except GkrError as error:
                if published.final:
                    raise
                self._out.emit(
                    ev.Note, level="warning", text=f"evaluation of round {published.version} skipped: {error}"
                )
            self._tell_asked(clients)
            if published.final:
                return

    def _evaluate(self, published: Published, *, clients: dict[ServiceKind, ServiceClient]) -> None:
        config = self._plan.train.evaluation if self._plan.train else None
        assert config is not None
        manifest = self._plan.home.data_manifest
        count = config.final_samples if published.final else config.samples
        assert self._plan.train is not None
        real = held_out(manifest, count=count, shape=self._plan.train.model.sample_shape)
        images = self._sample(published, real=real, clients=clients)
        self._save(published, images=images, real=real)
        if "evaluate" not in clients:
            return
        args = ScoreArgs(manifest=manifest, labels=[int(label) for label in real.labels])
        reply = clients["evaluate"].call(
            "score", args, reply=ScoreReply, tensors={"images": images}, deadline_seconds=CALL_DEADLINE_SECONDS
        )
        body: ScoreReply = reply.body
        fields = {name: getattr(body, name) for name in body.__struct_fields__}
        self._out.emit(
            ev.Score, round=published.version, final=published.final, model_sha256=published.sha256, **fields
        )

    def _sample(self, published: Published, *, real: HeldOut, clients: dict[ServiceKind, ServiceClient]) -> np.ndarray:
        train, syncer = self._plan.train, self._plan.syncer
        assert train is not None
        assert syncer is not None
        scheme = "http" if SyncKeys.read() is None else "https"
        url = f"{scheme}://{self._options.syncer_bulk}/v1/{self._plan.run}/models/{published.sha256}"
        # A platform's sampler has no keys of this run, but it reads the run's bucket.
        stored = f"{syncer.store}/models/{published.sha256}.safetensors"
        weights = Weights(sha256=published.sha256, urls=[url, stored])
        parts: list[np.ndarray] = []
        for first in range(0, len(real.labels), IMAGES_PER_CALL):
            chosen = slice(first, first + IMAGES_PER_CALL)
            args = SampleArgs(
                weights=weights,
                labels=[int(label) for label in real.labels[chosen]],
                seed=train.evaluation.seed,
                first=first,
                steps=train.evaluation.sampling_steps,
                guidance=train.evaluation.guidance,
            )
            tensors = (
                {"embeddings": self._embed(real.captions[chosen], client=clients["encode"])}
                if train.model.embedding_width is not None
                else {}
            )
            reply = clients["sample"].call(
                "sample", args, reply=SampleReply, tensors=tensors, deadline_seconds=CALL_DEADLINE_SECONDS
            )
            parts.append(np.array(reply.tensors["images"]))
        return np.concatenate(parts)

    def _embed(self, captions: list[str], *, client: ServiceClient) -> np.ndarray:
        new = [text for text in dict.fromkeys(captions) if text not in self._embeddings]
        if new:
            reply = client.call(
                "encode",
                EncodeArgs(captions=new),
                reply=EncodeReply,
                tensors={},
                deadline_seconds=CALL_DEADLINE_SECONDS,
            )
            self._embeddings |= {
                text: np.array(row) for text, row in zip(new, reply.tensors["embeddings"], strict=True)
            }
        return np.stack([self._embeddings[text] for text in captions])

    def _save(self, published: Published, *, images: np.ndarray, real: HeldOut) -> None:
        folder = self._options.run_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        count = min(GRID_IMAGES, len(images))
        name = "final" if published.final else f"round-{published.version:05d}"
        np.save(folder / f"{name}.npy", images[:count])
        np.save(folder / "real.npy", _to_pixels(real.images[:count]))
        if self._options.events is None:  # the run's folder is this pod's: the pictures go where the events go
            bucket = open_bucket(self._plan.home.run_uri)
            for file in (f"samples/{name}.npy", "samples/real.npy"):
                bucket.send(file, self._options.run_dir / file)
        self._out.emit(
            ev.Samples,
            round=published.version,
            model_sha256=published.sha256,
            path=f"samples/{name}.npy",
            captions=real.captions[:count],
            real_path="samples/real.npy",
        )


def _to_pixels(images: np.ndarray) -> np.ndarray:
    """uint8 [n, H, W, C] of float32 [n, C, H, W] in [-1, 1]."""
    return np.rint((images.transpose(0, 2, 3, 1) + 1.0) * 127.5).astype(np.uint8)


def _service(learner: LearnerPlan, *, kind: ServiceKind) -> ServicePlan | None:
    return next((service for service in learner.services if service.kind == kind), None)


def _published(sync: SyncClient) -> Published | None:
    status = sync.status()
    if not status.model_sha256:
        return None
    return Published(version=status.version, sha256=status.model_sha256, final=status.final)
