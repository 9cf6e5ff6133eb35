"""What our views read in the JSON of Kubernetes, Kueue and KubeRay objects; pure.

The objects stay plain JSON because a view reads a handful of fields out of thousands of objects: typed models of ten
thousand pods cost seconds. A field that is missing reads as empty, never as an error: what a component wrote is read
leniently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from manifests.labels import EXPERIMENT, GROUP, ROLE, RUN

Object = Mapping[str, Any]

GPU = "nvidia.com/gpu"
_ENDED = frozenset({"Succeeded", "Failed"})

_UNITS = {
    "": 1, "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": 10**3, "M": 10**6, "G": 10**9,
    "T": 10**12, "P": 10**15, "E": 10**18, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
    "Ei": 2**60,
}  # fmt: skip


def quantity(value: object) -> float:
    """A Kubernetes quantity as a number; 0 for what is none."""
    text = str(value if value is not None else "0").strip()
    number = text.rstrip("numkMGTPEi") if not text[-1:].isdecimal() else text
    try:
        return float(Decimal(number) * Decimal(_UNITS[text[len(number) :]]))
    except (InvalidOperation, KeyError):
        return 0.0


def seconds(text: object) -> float | None:
    """Seconds since 1970 of a Kubernetes time; none if there is none."""
    if not isinstance(text, str) or not text:
        return None
    head, _, rest = text.partition(".")
    fraction = rest.rstrip("Z") or "0"
    try:
        whole = datetime.fromisoformat(head.removesuffix("Z")).replace(tzinfo=UTC).timestamp()
        return whole + float(f"0.{fraction}")
    except ValueError:
        return None


def sub(one: Object | None, *path: str) -> Object:
    """The object that stands at a path of keys; empty if nothing does."""
    found: Any = one
    for key in path:
        if not found:
            break
        found = found.get(key)
    return found or {}


def subs(one: Object | None, *path: str) -> Sequence[Object]:
    """The list of objects at a path of keys; empty if there is none."""
    *above, last = path
    found: Any = sub(one, *above).get(last)
    return found or []


def called(objects: Iterable[Object], wanted: object) -> Object:
    """The one whose `name` that is; empty if there is none."""
    return sub(next((one for one in objects if one.get("name") == wanted), None))


def meta(one: Object) -> Object:
    """Its metadata."""
    return sub(one, "metadata")


def name(one: Object) -> str:
    """Its name."""
    return str(meta(one).get("name") or "")


def labels(one: Object) -> Mapping[str, str]:
    """Its labels."""
    return sub(one, "metadata", "labels")


def spec(one: Object) -> Object:
    """Its spec."""
    return sub(one, "spec")


def status(one: Object) -> Object:
    """Its status."""
    return sub(one, "status")


def condition(one: Object, kind: str) -> Object | None:
    """The condition of that type."""
    return next((found for found in subs(one, "status", "conditions") if found.get("type") == kind), None)


def holds(one: Object, kind: str) -> bool:
    """The condition is there and true."""
    found = condition(one, kind)
    return found is not None and found.get("status") == "True"


def owner(one: Object, kind: str) -> Object | None:
    """Its owner of that kind."""
    return next((found for found in subs(one, "metadata", "ownerReferences") if found.get("kind") == kind), None)


def pod_gpus(pod_spec: Object) -> int:
    """GPUs that a pod asks of one node: its containers together, or one init container if that asks for more."""
    together = sum(_gpus(container) for container in subs(pod_spec, "containers"))
    return max([together, *(_gpus(container) for container in subs(pod_spec, "initContainers"))])


def _gpus(container: Object) -> int:
    resources = sub(container, "resources")
    asked = sub(resources, "requests").get(GPU) or sub(resources, "limits").get(GPU)
    return int(quantity(asked)) if asked else 0


def node_of(pod: Object) -> str:
    """The node it was placed on; empty before."""
    return str(spec(pod).get("nodeName") or "")


def phase(pod: Object) -> str:
    """Pending, Running, Succeeded, Failed or Unknown."""
    return str(status(pod).get("phase") or "Pending")


def ended(pod: Object) -> bool:
    """It holds no resources any more."""
    return phase(pod) in _ENDED


def leaving(pod: Object) -> bool:
    """It was told to end."""
    return "deletionTimestamp" in meta(pod)


def ready(pod: Object) -> bool:
    """It serves."""
    return holds(pod, "Ready")


def group(pod: Object) -> str:
    """Its group, else its role."""
    own = labels(pod)
    return own.get(GROUP) or own.get(ROLE) or own.get("ray.io/group") or own.get("ray.io/node-type") or "pods"


def holder(one: Object) -> str:
    """Who holds what this pod holds: `experiment (run)`, else the namespace and its owner or itself."""
    return holder_of(labels(one), otherwise=_foreign(one))


def holder_of(own: Mapping[str, str], *, otherwise: str) -> str:
    """The same from labels."""
    if own.get(RUN):
        return f"{own.get(EXPERIMENT, '?')} ({own[RUN]})"
    return otherwise


def _foreign(one: Object) -> str:
    owners = subs(one, "metadata", "ownerReferences")
    last = next((str(found.get("name")) for found in owners), name(one))
    return f"{meta(one).get('namespace', '')}/{last}"


def plural(count: float, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count:g} {noun}" + ("" if count == 1 else "s")


def listed(parts: Iterable[str], *, most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    known = list(parts)
    rest = len(known) - most
    return ", ".join(known[:most]) + (f" and {rest} more" if rest > 0 else "")
