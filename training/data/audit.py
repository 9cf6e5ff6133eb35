"""Proof that a dataset is whole, and that a run trained on exactly what its plan says.

    python -m training.data.audit runs/digits/digits-1 [-o json]     a run, by its events
    python -m training.data.audit file:///data/digits/manifest.json  a dataset, every byte

A dataset is whole if every byte of every shard is the manifest's and every sample is in one place only. Preflight reads
one shard of each split (`shards=1`); the full audit reads all. Nothing is repaired here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spec.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError, GkrError, NotFoundError
from spec.events import read_events
from spec.plan import Plan
from spec.shards import Split, open_manifest, read_shard
from storage.datasets import held_shards, local_manifest, verify_file
from training.data.proof import Proof, prove
from training.data.work import Delivery, Order, mixture_of, plan_work


@dataclass(frozen=True)
class Audit:
    """What was read and found good."""

    digest: str
    shards: int
    samples: int
    bytes: int


def audit(manifest_uri: str, *, shards: int | None = None, cache: Path | None = None) -> Audit:
    """Read at most `shards` shards of each split (default: all); a DataError names the first that is wrong.

    `cache`: where the shards of a dataset that is not on this machine are copied to.
    """
    local = local_manifest(manifest_uri, cache=cache, splits=())
    manifest = open_manifest(local)
    seen: dict[int, str] = {}
    read, size, samples = 0, 0, 0
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        for shard in manifest.shards(split)[:shards]:
            read, size = read + 1, size + shard.bytes
            if manifest.format == "tar":  # an id is a row of the index, so none can be there twice
                with held_shards(manifest_uri, shards=[shard], local=local):
                    verify_file(shard, local=local)
                samples += shard.samples
                continue
            with held_shards(manifest_uri, shards=[shard], local=local):
                view = read_shard(shard, uri=local, manifest=manifest)
            for sample in view:
                if sample.id in seen:
                    raise DataError(
                        f"sample {sample.id} is in {seen[sample.id]} and again in {shard.path}",
                        where=manifest_uri,
                        hint="a sample in both splits would be trained on and judged by; prepare the dataset again",
                    )
                seen[sample.id] = shard.path
    return Audit(manifest.digest, read, samples + len(seen), size)


def audit_run(folder: Path, *, cache: Path | None = None) -> list[Proof]:
    """What every learner of a run trained on, against its plan. Needs the run's folder and its datasets."""
    try:
        plan = Plan.read_json((folder / "plan.json").read_bytes())
        lines = (folder / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise NotFoundError(
            f"this is no run: {error.strerror}", where=str(error.filename), hint="`gkr ps` lists runs; name the folder"
        ) from None
    if plan.train is None:
        raise ConfigError("the run has no `train` section", where=str(folder), hint="only our trainer keeps accounts")
    events = list(read_events(lines))
    proofs: list[Proof] = []
    for learner in plan.learners:
        manifests = [learner.data_manifest, *learner.data_more]
        order = Order(
            manifests,
            plan.train.seed,
            learner.name,
            plan.train.batch,
            mixture=mixture_of(learner),
            buckets=plan.buckets,
        )
        planned = plan_work(order, delivery=Delivery(plan.train.model), world_size=learner.world_size, cache=cache)
        proofs.append(prove(events, learner=learner.name, plan=planned.plan, batch=plan.train.batch))
    return proofs


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a run or a dataset; exit code 100 if something does not add up."""
    parser = argparse.ArgumentParser(prog="python -m training.data.audit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", help="folder of a run, or URI of a dataset's manifest")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    try:
        if ":" in options.what:
            found = audit(options.what)
            text = f"{found.samples} samples in {found.shards} shards, {found.bytes} bytes: whole ({found.digest[:12]})"
            sys.stdout.write(json.dumps(asdict(found)) + "\n" if options.output == "json" else text + "\n")
            return EXIT_OK
        proofs = audit_run(Path(options.what))
    except GkrError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    if options.output == "json":
        sys.stdout.write(json.dumps([asdict(one) for one in proofs], indent=2) + "\n")
    else:
        sys.stdout.writelines(_lines(proofs))
    return EXIT_FAILED if any(one.problems for one in proofs) else EXIT_OK


def _lines(proofs: Sequence[Proof]) -> list[str]:
    found: list[str] = []
    for one in proofs:
        verdict = "as planned" if not one.problems else f"{len(one.problems)} problems"
        more = f", {one.again} drawn again in {one.attempts} attempts" if one.again else ""
        more += f", {one.quarantined} replaced" if one.quarantined else ""
        found.append(f"{one.learner}: {one.position} positions, {one.samples} samples trained{more}: {verdict}\n")
        found += [f"  {problem}\n" for problem in one.problems]
    return found


if __name__ == "__main__":
    sys.exit(main())
