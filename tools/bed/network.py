"""The bed's network: one namespace per region, a bridge for pods, a veth pair to the host, a link between two regions.

Promises: there is no default route and no forwarding beyond the pair, and what starts a connection from inside to the
host's end is refused. So nothing leaves the machine, also not a packet to a cluster IP that has no rule yet: the range
has a route to the bridge before anything else starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from spec.errors import ConfigError
from tools.bed.layout import Bed
from tools.bed.run import CommandError, execute

DEADLINE_SECONDS = 20.0
NODE_DEVICE = "node0"
"""Inside end of the pair to the host; its address is the node's."""
BRIDGE = "bed0"
LINK_DEVICE = "link0"
LINK_RATE = "100mbit"


def create(bed: Bed) -> None:
    """Make the namespace and everything in it that is missing."""
    if not exists(bed):
        execute(["ip", "netns", "add", bed.netns], deadline_seconds=DEADLINE_SECONDS)
    if not Path(f"/sys/class/net/{bed.host_device}").exists():
        pair = ["ip", "link", "add", bed.host_device, "type", "veth", "peer", "name", NODE_DEVICE, "netns", bed.netns]
        execute(pair, deadline_seconds=DEADLINE_SECONDS)
    _sysctl(f"net/ipv6/conf/{bed.host_device}/disable_ipv6", "1")
    _batch(None, [
        f"address replace {bed.host_address}/30 dev {bed.host_device}",
        f"link set {bed.host_device} up",
    ])  # fmt: skip
    settings = "; ".join(f"echo {value} > /proc/sys/{name}" for name, value in SETTINGS.items())
    _within(bed, ["sh", "-ec", settings])
    if BRIDGE not in devices(bed):
        _batch(bed, [f"link add {BRIDGE} type bridge"])
    _batch(bed, inner_lines(bed))
    for rule in REFUSALS:
        _ensure_rule(bed, rule)


SETTINGS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
    "net/ipv4/ip_forward": "1",
    "net/ipv4/icmp_ratelimit": "0",
    "net/bridge/bridge-nf-call-iptables": "1",
}
"""Of the namespace. Without IPv6 there is no link-local address through which the host's end could be reached; without
the limit every attempt to leave is refused at once, also the second one within a second."""


def inner_lines(bed: Bed) -> list[str]:
    """What `ip -batch` sets inside; all of it may be set again."""
    return [
        "link set lo up",
        f"address replace {bed.address}/30 dev {NODE_DEVICE}",
        f"link set {NODE_DEVICE} up",
        f"address replace {bed.pod_gateway}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"route replace {bed.service_range} dev {BRIDGE} src {bed.pod_gateway}",
        f"route replace unreachable {bed.fake_range}",
    ]


NEW_OUTWARDS = ("-o", NODE_DEVICE, "-m", "conntrack", "--ctstate", "NEW,INVALID")
REFUSALS: tuple[tuple[str, ...], ...] = (
    ("filter", "OUTPUT", *NEW_OUTWARDS, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"),
    ("filter", "FORWARD", *NEW_OUTWARDS, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"),
    ("mangle", "POSTROUTING", *NEW_OUTWARDS, "-j", "DROP"),
)
"""Table, chain, rule: nobody inside starts a connection to the host's end of the pair; replies go out. The first two
answer at once; the last one holds also where kube-proxy's rules, which come before, accept a packet."""
CUT: tuple[str, ...] = ("raw", "PREROUTING", "-i", LINK_DEVICE, "-j", "DROP")
"""Before any connection is known, so that open connections stall as well."""


def remove(bed: Bed) -> None:
    """Delete namespace and pair, whatever of them is there. Processes inside must be gone."""
    if Path(f"/sys/class/net/{bed.host_device}").exists():
        _batch(None, [f"link delete {bed.host_device}"])
    if exists(bed):
        execute(["ip", "netns", "delete", bed.netns], deadline_seconds=DEADLINE_SECONDS)


def exists(bed: Bed) -> bool:
    """Whether the namespace is there."""
    return Path(f"/run/netns/{bed.netns}").exists()


def devices(bed: Bed) -> set[str]:
    """Network devices inside."""
    listed = cast("list[dict[str, Any]]", json.loads(_within(bed, ["ip", "-json", "link"]) or "[]"))
    return {str(one["ifname"]) for one in listed}


def _within(bed: Bed, command: Sequence[str], *, stdin: str | None = None) -> str:
    """In the network namespace alone: there may be no holder yet."""
    enter = ["nsenter", f"--net=/run/netns/{bed.netns}", "--"]
    return execute([*enter, *command], stdin=stdin, deadline_seconds=DEADLINE_SECONDS)


def _batch(bed: Bed | None, lines: Sequence[str]) -> None:
    command, text = ["ip", "-batch", "-"], "\n".join([*lines, ""])
    if bed is None:
        execute(command, stdin=text, deadline_seconds=DEADLINE_SECONDS)
    else:
        _within(bed, command, stdin=text)


def _sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys") / name
    if path.exists():
        path.write_text(value)


def connect(beds: Sequence[Bed], *, rate: str = LINK_RATE) -> None:
    """The link between two regions: their nodes and pods reach each other over it at most at `rate`."""
    one, other = beds
    if not all(LINK_DEVICE in devices(bed) for bed in beds):
        disconnect(beds)  # one end may be there still while the other went with its namespace
        ends = ["type", "veth", "peer", "name", LINK_DEVICE, "netns", other.netns]
        _within(one, ["ip", "link", "add", LINK_DEVICE, *ends])
    for near, far in ((one, other), (other, one)):
        _batch(near, [f"address replace {near.link_address}/30 dev {LINK_DEVICE}", f"link set {LINK_DEVICE} up"])
        _batch(near, link_routes(far))
        _limit(near, rate)


def link_routes(far: Bed) -> list[str]:
    """Node, pods and Services of the other region."""
    ranges = (f"{far.address}/32", far.pod_range, far.service_range)
    return [f"route replace {one} via {far.link_address} dev {LINK_DEVICE}" for one in ranges]


def _limit(bed: Bed, rate: str) -> None:
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
    try:
        _within(bed, ["tc", "qdisc", "replace", "dev", LINK_DEVICE, *limit])
    except CommandError as error:
        raise ConfigError(f'"{rate}" is not a rate for the link', hint="write it as tc does: 100mbit, 1gbit") from error


def disconnect(beds: Sequence[Bed]) -> None:
    """Remove the link; deleting one end deletes both."""
    for bed in beds:
        if exists(bed) and LINK_DEVICE in devices(bed):
            try:
                _batch(bed, [f"link delete {LINK_DEVICE}"])
            except CommandError:
                if LINK_DEVICE in devices(bed):  # the kernel removes the other end by itself, a moment later
                    raise


def cut(beds: Sequence[Bed]) -> None:
    """Packets between the regions vanish, as when a line is cut: nothing answers, nothing is refused."""
    for bed in beds:
        if LINK_DEVICE not in devices(bed):
            raise ConfigError("there is no link between two regions", hint="make cluster REGIONS=2")
        _ensure_rule(bed, CUT)


def mend(beds: Sequence[Bed]) -> None:
    """End what `cut` began."""
    for bed in beds:
        if exists(bed) and _has_rule(bed, CUT):
            _within(bed, _iptables("-D", CUT))


def _ensure_rule(bed: Bed, rule: tuple[str, ...]) -> None:
    if not _has_rule(bed, rule):
        _within(bed, _iptables("-I", rule))


def _has_rule(bed: Bed, rule: tuple[str, ...]) -> bool:
    try:
        _within(bed, _iptables("-C", rule))
    except CommandError:
        return False
    return True


def _iptables(action: str, rule: tuple[str, ...]) -> list[str]:
    table, chain, *rest = rule
    return ["iptables", "-w", "5", "-t", table, action, chain, *rest]
