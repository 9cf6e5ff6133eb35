"""`python -m tools.bed up | down | status | kubeconfig | link | logs`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from spec.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNREACHABLE, ConfigError, GkrError, NotFoundError
from tools.bed import fake_nodes, lifecycle, network
from tools.bed.layout import MOST_REGIONS, Bed, Wanted, bed, beds

USES = ("experiments", "stacks")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m tools.bed", description="A one-node Kubernetes on this machine.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring it up, or mend it; what is not given stays as it is")
    up.add_argument("--fake", metavar="MACHINE=NODES,...", help='fake nodes of catalogue machines; "" removes all')
    up.add_argument("--gpus", type=int, metavar="N", help="GPUs that the real node pretends to have")
    up.add_argument("--regions", type=int, choices=range(1, MOST_REGIONS + 1), help="clusters")
    up.add_argument("--for", dest="use", choices=USES, help="whether it is complete, or the local stacks complete it")
    up.add_argument("--link-rate", default=network.LINK_RATE, metavar="RATE", help="between two regions: 100mbit")
    up.add_argument("--bare", action="store_true", help="only control plane and node")
    down = commands.add_parser("down", help="end it; images and certificates stay")
    down.add_argument("--purge", action="store_true", help="remove images and certificates too")
    status = commands.add_parser("status", help="what runs")
    status.add_argument("-o", "--output", choices=["text", "json"], default="text")
    where = commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    link = commands.add_parser("link", help="the link between two regions")
    link.add_argument("action", choices=["cut", "mend"])
    logs = commands.add_parser("logs", help="print what a component said")
    logs.add_argument("component", nargs="?", help="without one: list them")
    for one in (where, logs):
        one.add_argument("--region", type=int, default=0, choices=range(MOST_REGIONS))
    return top


def wanted(options: argparse.Namespace, *, before: Wanted) -> Wanted:
    """What is asked for now, with what stays from before; nothing stays of another use."""
    for_stacks = before.for_stacks if options.use is None else options.use == "stacks"
    if for_stacks != before.for_stacks:
        before = Wanted(regions=before.regions)
    fake = before.fake if options.fake is None else fake_nodes.parse(options.fake)
    gpus = before.gpus if options.gpus is None else int(options.gpus)
    if gpus < 0:
        raise ConfigError(f"{gpus} GPUs are less than none", where="--gpus")
    if for_stacks and (fake or gpus):
        hint = "leave them out, or bring the cluster up for experiments"
        raise ConfigError("GPU nodes of a cluster for stacks come from the stacks' pools", where="--for", hint=hint)
    regions = before.regions if options.regions is None else int(options.regions)
    return Wanted(fake=fake, gpus=gpus, regions=regions, for_stacks=for_stacks)


def _up(options: argparse.Namespace) -> int:
    target = wanted(options, before=lifecycle.remembered())
    lifecycle.up(target, say=lifecycle.to_stderr, rate=options.link_rate, bare=options.bare)
    for one in beds(target.regions):
        sys.stdout.write(f"{one.kubeconfig}\n")
    return EXIT_OK


def _down(options: argparse.Namespace) -> int:
    lifecycle.down(say=lifecycle.to_stderr, purge=options.purge)
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    found = lifecycle.status()
    if options.output == "json":
        sys.stdout.write(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    for one in found if options.output == "text" else []:
        counts = f"{one.nodes.get('ready', 0)} nodes Ready, {one.nodes.get('other', 0)} other"
        sys.stdout.write(f"{one.name}: {'up' if one.up else 'not up'}, {counts}, {one.server}, {one.kubeconfig}\n")
        sys.stdout.writelines(f"  {name:26} pid {pid}\n" for name, pid in one.pids.items())
        sys.stdout.writelines(f"  missing: {name}\n" for name in one.missing)
    if not found:
        lifecycle.to_stderr("no cluster is up; `make cluster` brings one up")
    return EXIT_OK if found and all(one.up for one in found) else EXIT_UNREACHABLE


def _kubeconfig(options: argparse.Namespace) -> int:
    one = _existing(options.region)
    sys.stdout.write(f"{one.kubeconfig}\n")
    return EXIT_OK


def _existing(region: int) -> Bed:
    one = bed(region)
    if not one.kubeconfig.is_file() or not network.exists(one):
        raise NotFoundError(f"there is no cluster for region {region}", hint="`make cluster` brings one up")
    return one


def _link(options: argparse.Namespace) -> int:
    every = [_existing(index) for index in range(MOST_REGIONS)]
    (network.cut if options.action == "cut" else network.mend)(every)
    return EXIT_OK


def _logs(options: argparse.Namespace) -> int:
    one = bed(options.region)
    logs = sorted(path.stem for path in one.log("any").parent.glob("*.log"))
    if options.component is None:
        sys.stdout.writelines(f"{name}\n" for name in logs)
        return EXIT_OK
    if options.component not in logs:
        raise NotFoundError(
            f'no component "{options.component}" has a log', hint=f"there are {', '.join(logs) or 'none'}"
        )
    sys.stdout.write(one.log(options.component).read_text(errors="replace"))
    return EXIT_OK


def _interrupted(*_: object) -> None:
    """At once, without waiting for what threads wait for: the next call goes on from wherever this one stopped."""
    lifecycle.to_stderr("interrupted; the next `up` or `down` goes on from here")
    os._exit(EXIT_INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors that a person can mend end with their own code."""
    options = parser().parse_args(arguments)
    actions = {
        "up": _up, "down": _down, "status": _status, "kubeconfig": _kubeconfig, "link": _link, "logs": _logs,
    }  # fmt: skip
    if arguments is None:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        return actions[options.command](options)
    except GkrError as error:
        lifecycle.to_stderr(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
