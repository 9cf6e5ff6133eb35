"""`gkr data cache`: what copies of datasets there are on this machine, and how much room they may take."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.options import output_option


@click.command(name="cache", short_help="Show the copies of datasets on this machine, and prune them.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="The cache. Default: GKR_DATA_CACHE, else ~/.cache/gkr/data.",
)
@click.option("--limit", metavar="SIZE", help="From now on copies may take so much. Default: half of the free disk.")
@click.option(
    "--prune",
    metavar="SIZE",
    help="Remove the least recently used copies until the rest takes SIZE; 0Gi: all. Those that are open stay.",
)
@output_option()
def command(*, folder: Path | None, limit: str | None, prune: str | None, output: str) -> None:
    """Show the copies that training made of datasets in buckets, and what they saved.

    All processes of a machine share them. An experiment sets the limit of its nodes with data.cache_limit; what does
    not fit is read where it is.
    """
    import time
    from dataclasses import asdict

    from gkr.output import result, result_json, say, table
    from gkr.watch.text import short_duration
    from spec.errors import ConfigError, NotFoundError
    from spec.units import parse_bytes
    from storage.cache import Cache
    from storage.datasets import cached_datasets, default_cache

    try:
        limit_bytes = None if limit is None else parse_bytes(limit)
        prune_bytes = None if prune is None else parse_bytes(prune)
    except ValueError as error:
        raise ConfigError(str(error), where="--limit, --prune", hint="write a size such as 200Gi") from error
    root = (folder or default_cache()).absolute()
    if folder is not None and limit is None and not (root / "objects").is_dir():
        # To look must not make a cache of any folder; to set a limit may.
        raise NotFoundError(f"there is no cache in {root}", hint="`gkr data cache` alone shows the one that runs use")
    cache = Cache(root, limit_bytes=limit_bytes)
    if prune_bytes is not None:
        say(f"removed {cache.prune(prune_bytes) / 2**20:.1f} MiB")
    copies, datasets, counts = cache.copies(), cached_datasets(cache), cache.counts
    size = sum(one.bytes for one in copies)
    if output == "json":
        result_json(
            {
                "folder": str(cache.root),
                "bytes": size,
                "limit_bytes": cache.limit_bytes,
                "copies": len(copies),
                "datasets": [asdict(one) for one in datasets],
                "counts": asdict(counts),
            }
        )
        return
    result(f"{size / 2**20:.1f} MiB in {len(copies)} copies, of {cache.limit_bytes / 2**30:.1f} GiB, in {cache.root}")
    rows = [
        [
            one.name,
            one.digest[:12],
            f"{one.copies} of {one.objects}",
            f"{one.bytes / 2**20:.1f} MiB",
            "now" if one.in_use else f"{short_duration(time.time() - one.used)} ago",
        ]
        for one in datasets
    ]
    if rows:
        result(table(rows, header=["dataset", "digest", "files", "size", "used"]))
    result(
        f"so far {counts.hits} hits, {counts.misses} misses; {counts.fetched_bytes / 2**20:.1f} MiB fetched,"
        f" {counts.evicted_bytes / 2**20:.1f} MiB removed for others, {counts.range_reads} samples read by range,"
        f" {counts.damaged} copies found damaged, {counts.taken_over} fetches taken over"
    )
