"""How a node asks a child process for the two steps and reads its answer: two small files, no torch.

The child is told the path of its question by one environment variable; it writes its answer beside it, whole or not
at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec.errors import GkrError
from spec.train import TrainConfig
from training.preflight.measurements import TwoSteps

VARIABLE = "GKR_TWO_STEPS"
_QUESTION, _ANSWER = "two-steps.json", "two-steps-answer.json"


@dataclass(frozen=True, slots=True)
class Question:
    """What the child is asked."""

    train: TrainConfig
    manifest: str
    folder: Path


def ask(folder: Path, *, train: TrainConfig, manifest: str) -> dict[str, str]:
    """Write the question, drop an older answer, and return the child's environment."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ANSWER).unlink(missing_ok=True)
    (folder / _QUESTION).write_text(json.dumps({"train": train.model_dump(mode="json"), "manifest": manifest}))
    return {VARIABLE: str(folder)}


def read_question(environment: Mapping[str, str]) -> Question:
    """The child's side of `ask`."""
    if VARIABLE not in environment:
        raise GkrError(f"{VARIABLE} is not set", hint="this process is started by the preflight of a node")
    folder = Path(environment[VARIABLE])
    document: Any = json.loads((folder / _QUESTION).read_text())
    return Question(train=TrainConfig.model_validate(document["train"]), manifest=document["manifest"], folder=folder)


def write_answer(folder: Path, measured: TwoSteps) -> None:
    """The child's last act."""
    temporary = folder / f"{_ANSWER}.tmp"
    losses = [str(loss) for loss in measured.losses]  # as text: JSON has no NaN
    temporary.write_text(json.dumps({"losses": losses, "problem": measured.problem, "hint": measured.hint}))
    temporary.replace(folder / _ANSWER)


def answer(folder: Path, *, code: int, log: Path) -> TwoSteps:
    """What the child wrote; a child that died without a word failed the check."""
    try:
        document: Any = json.loads((folder / _ANSWER).read_text())
    except FileNotFoundError:
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return TwoSteps(problem=f"the process of the two steps {ended}", hint=f"see {log}")
    losses = tuple(float(text) for text in document["losses"])
    return TwoSteps(losses=losses, problem=document["problem"], hint=document["hint"])
