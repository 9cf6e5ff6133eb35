"""`gkr data`: make a dataset out of images, and look at one."""

from __future__ import annotations

from pathlib import Path

import click

from gkr.commands import data_cache
from gkr.options import output_option


@click.group(name="data")
def command() -> None:
    """Datasets: prepare and inspect, and the copies of them on this machine."""


command.add_command(data_cache.command)


@command.command(name="prepare", short_help="Make a dataset out of images.")
@click.argument("source")
@click.option("--to", metavar="URI", help="Folder or URI of the dataset. Default: data/<name of the source>.")
@click.option("--min-side", type=int, metavar="PIXELS", help="Drop images whose shorter side has fewer pixels.")
@click.option("--max-aspect", type=float, metavar="RATIO", help="Drop images whose sides differ by more. Default: 16.")
@click.option("--duplicates", type=click.Choice(["keep", "exact", "near"]), help="Which ones to drop. Default: exact.")
@click.option("--near-bits", type=int, metavar="BITS", help="With near: of 64 bits of the difference hash. Default: 3.")
@click.option("--need-caption", is_flag=True, default=None, help="Drop images without a caption.")
@click.option("--labels", type=click.Choice(["found", "folders"]), help="Field `label`, or the folder's name.")
@click.option("--held-out", type=float, metavar="SHARE", help="Share that is not trained on. Default: 0.01.")
@click.option("--shard-bytes", metavar="SIZE", help="Size of a shard. Default: 256Mi.")
@click.option("--embed", type=click.Choice(["captions"]), help="Compute embeddings of the captions.")
@click.option("--latents", metavar="WIDTHxHEIGHT", help="Compute an autoencoder's latents of images of this size.")
@click.option(
    "--services",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask the services that this directory file of a run names, with the run's keys beside it. Default: encoders "
    "in this process.",
)
@click.option("--encoder", default="", metavar="WHAT", help="A service in --services, else the folder of its weights.")
@click.option("--autoencoder", default="", metavar="WHAT", help="Likewise, for --latents.")
@click.option("--by", metavar="NAME", help="Let the preparing service of this name in --services do it.")
@click.option("--work", type=click.Path(path_type=Path), metavar="FOLDER", help="Where unfinished work is kept.")
@click.option("--dry-run", is_flag=True, help="Only say what would be kept and dropped.")
@output_option()
def prepare(
    *,
    source: str,
    to: str | None,
    services: Path | None,
    encoder: str,
    autoencoder: str,
    by: str | None,
    work: Path | None,
    dry_run: bool,
    output: str,
    **rules: object,
) -> None:
    """Make a dataset out of SOURCE: a folder of images, tar files as WebDataset reads them, or Parquet files.

    SOURCE may also be a URI of a bucket, or the name of a source that is built in. Captions are taken from .txt and
    .json files beside the images, or from columns. The same command goes on where one was interrupted; where the
    dataset is already there, nothing is done.
    """
    import sys

    from gkr.output import result, result_json, table
    from gkr.preparing import checked_rules, directory_file, keys_beside, manifest_uri, run_module, uri_of
    from spec.errors import ConfigError
    from spec.experiment import MODEL_KIND_OF_SOURCE
    from spec.preparation import PrepareReport

    name = source.rstrip("/").rpartition("/")[2].partition(".")[0] or "images"
    arguments = ["--lines", "--source", source if source in MODEL_KIND_OF_SOURCE else uri_of(source)]
    arguments += ["--manifest", manifest_uri(to or f"data/{name}")]
    arguments += ["--encoder", encoder, "--autoencoder", autoencoder]
    arguments += ["--rules", checked_rules(rules)]
    services = directory_file(services)
    if by is not None and services is None:
        raise ConfigError(f"--by {by} needs --services", hint="name the file that says where the run's services answer")
    arguments += [] if services is None else ["--directory", f"{services.absolute()}"]
    arguments += [] if by is None else ["--by", by]
    arguments += [] if work is None else ["--work", f"{work.absolute()}"]
    arguments += ["--dry-run"] * dry_run
    report = run_module("services.prepare", arguments, stream=sys.stderr, environment=keys_beside(services))
    assert isinstance(report, PrepareReport)
    if output == "json":
        result_json(report.model_dump(mode="json"))
        return
    word = "would keep" if dry_run else "was there already:" if report.reused else "kept"
    result(f"{word} {report.train} images to train on and {report.test} held out, {report.bytes / 2**20:.1f} MiB")
    result(f"  {report.captions} with captions, of {report.found} that were found")
    if report.dropped:
        rows = [[reason, f"{count}", report.examples[reason][0]] for reason, count in report.dropped.items()]
        result(table(rows, header=["dropped", "count", "for example"]))
    if not dry_run:
        result(f"dataset {report.digest[:12]} at {report.manifest}")


@command.command(name="inspect", short_help="Show what a dataset consists of.")
@click.argument("dataset")
@click.option("--to", type=click.Path(path_type=Path), metavar="FOLDER", help="Where to write the contact sheet.")
@click.option("--samples", type=int, default=2000, show_default=True, help="Images to decode, evenly spread.")
@click.option("--tiles", type=int, default=60, show_default=True, help="Images on the contact sheet.")
@output_option()
def inspect(*, dataset: str, to: Path | None, samples: int, tiles: int, output: str) -> None:
    """Show what DATASET (its folder or its manifest) consists of, and write a page with a contact sheet.

    The page is written to inspect/<name of the dataset>, unless --to says otherwise.
    """
    import sys

    from gkr.output import result, result_json, table
    from gkr.preparing import manifest_uri, run_module
    from spec.preparation import Inspection, facts_of

    uri = manifest_uri(dataset)
    folder = to or Path("inspect", uri.split("/")[-2])
    arguments = [uri, "--to", f"{folder}", "--samples", f"{samples}", "--tiles", f"{tiles}"]
    found = run_module("services.prepare.inspect", arguments, stream=sys.stderr)
    assert isinstance(found, Inspection)
    if output == "json":
        result_json(found.model_dump(mode="json"))
        return
    for name, value in facts_of(found):
        result(f"{name + ':':<19}{value}")
    rows = [[one.words, f"{one.count}"] for one in found.aspects if one.count]
    result(table(rows, header=["width over height", "images"]))
    result(f"page: {found.sheet}")
