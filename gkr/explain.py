"""Help for one field of an experiment file, or the near ones when there is no such field."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from spec.errors import NotFoundError
from spec.experiment import Experiment
from spec.fields import SYNONYMS, FieldHelp, describe

_EXAMPLES = {
    "groups.resources.gpu": "H200:8", "resources.gpu": "H200:1", "memory": "64Gi", "shm": "16Gi", "cpu": "500m",
    "ranks": "2", "name": "portrait-2b", "image": "trainer", "cluster": "[us-east5, any]", "learners.name": "east",
    "groups.name": "trainer", "manifest": '"{bucket}/data/digits/manifest.json"', "source": "sklearn-digits",
    "recipe": "digits", "version": "1", "env": "{NCCL_DEBUG: WARN, WANDB_API_KEY: }", "secrets": "[hf-token]",
    "queue": "research", "run": "torchrun --nnodes $GKR_NODES --node-rank $GKR_NODE_RANK my_train.py", "code": ".",
    "train": "{recipe: digits, batch: 128}", "data": '{manifest: "{bucket}/data/digits/manifest.json"}',
    "sync": "{mode: barrier, inner_steps: 100}", "services": "{encoder: {kind: encode}}", "services.kind": "encode",
    "services.resources": "{cpu: 250m, memory: 1Gi}", "resources": "{cpu: 1, memory: 2Gi}", "learner": "east",
    "groups": "[{name: trainer, nodes: 2, resources: {gpu: H200:8}}]", "quorum": "1", "shard_size": "8",
    "learners": "[{name: east, cluster: any, groups: [{nodes: 2, resources: {gpu: H200:8}}]}]",
}  # fmt: skip
"""For fields whose default is no example, by the longest matching end of the path."""

_DEEPEST = 5


@dataclass(frozen=True)
class Explanation:
    """Everything `gkr explain` says."""

    path: str
    type: str
    default: str
    text: str
    example: str
    fields: tuple[tuple[str, str], ...]


def explain(path: str) -> Explanation:
    """The field at a dotted path, or NotFoundError with the near ones; an empty path is the whole file."""
    parts = [part for part in path.split(".") if part]
    found = _describe(parts)
    if found is None:
        raise NotFoundError(f'an experiment file has no field "{path}"', hint=_near_hint(path))
    return Explanation(found.path, found.type, found.default, found.text, _example(found), found.fields)


def lines(found: Explanation) -> list[str]:
    """The explanation for a person."""
    head = f"{found.path}: {found.type}" if found.path else "an experiment file"
    given = f"  default: {found.default}" if found.default not in {"", "None"} else ""
    text = [head, f"  {found.text}"]
    text += [given] if given else []
    text += [f"  example: {found.path.rpartition('.')[2]}: {found.example}"] if found.example else []
    width = max((len(name) for name, _ in found.fields), default=0)
    text += ["  fields:"] if found.fields else []
    text += [f"    {name.ljust(width)}  {help_text}" for name, help_text in found.fields]
    return text


def field_paths() -> list[str]:
    """Every dotted path of an experiment file."""
    return list(_walk(()))


def _walk(above: tuple[str, ...]) -> Iterator[str]:
    found = describe(Experiment, above)
    for name, _ in found.fields if found and len(above) < _DEEPEST else ():
        yield ".".join((*above, name))
        yield from _walk((*above, name))


def _describe(parts: list[str]) -> FieldHelp | None:
    """A name inside a mapping (`services.encoder.kind`) may be given or left out."""
    found = describe(Experiment, tuple(parts))
    if found is not None:
        return found
    for at in range(1, len(parts)):
        above = describe(Experiment, tuple(parts[:at]))
        if above is None:
            return None
        if parts[at] not in dict(above.fields):
            return _describe([*parts[:at], *parts[at + 1 :]]) if above.path in {"services", "env"} else None
    return None


def _example(found: FieldHelp) -> str:
    parts = found.path.split(".")
    for at in range(len(parts)):
        end = ".".join(parts[at:])
        if end in _EXAMPLES:
            return _EXAMPLES[end]
    return found.default.strip("'") if found.default not in {"", "None", "{}", "[]"} else ""


def _near_hint(path: str) -> str:
    known = field_paths()
    last = path.rpartition(".")[2]
    word = SYNONYMS.get(last, last)
    same_name = [one for one in known if one.rpartition(".")[2] == word]
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.7)
    by_last = {one.rpartition(".")[2]: one for one in reversed(known)}
    near_last = [by_last[one] for one in difflib.get_close_matches(word, by_last, n=3, cutoff=0.6)]
    found = list(dict.fromkeys([*same_name, *near, *near_last]))[:4]
    return f"did you mean {', '.join(found)}?" if found else "`gkr explain` lists the fields of a file"
