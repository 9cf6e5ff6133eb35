"""An experiment file, its recipe and the command line's changes, as one located document.

Layers, later over earlier: defaults, recipe, file, `--set`. The recipe is found by name among the texts that the caller
read; no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from spec.document import Located, validate
from spec.experiment import Experiment
from spec.nodes import Node, Source, overlay, read_tree
from spec.overrides import apply_overrides
from spec.problems import DocumentError, did_you_mean
from spec.train import TrainConfig

_RAW_KEYS = ("env",)


def load_experiment(
    source: Source, *, recipes: Mapping[str, Source] | None = None, overrides: Iterable[str] = ()
) -> Located[Experiment]:
    """The experiment with its recipe filled in; raises DocumentError with every problem."""
    tree = apply_overrides(read_tree(source), overrides=overrides)
    tree = _with_recipe(tree, recipes or {})
    return validate(tree, model=Experiment, raw_keys=_RAW_KEYS)


def load_recipe(source: Source) -> Located[TrainConfig]:
    """A training recipe alone, as recipes/train/ holds them."""
    return validate(read_tree(source, origin="recipe"), model=TrainConfig)


def _with_recipe(tree: Node, recipes: Mapping[str, Source]) -> Node:
    train = tree.entries.get("train")
    chosen = train.entries.get("recipe") if train else None
    if train is None or chosen is None or not isinstance(chosen.value, str):
        return tree
    if chosen.value not in recipes:
        hint = did_you_mean(chosen.value, recipes, noun="recipes") or "there are no recipes in recipes/train/"
        raise DocumentError(
            [chosen.mark.problem(f'there is no recipe "{chosen.value}"', path="train.recipe", hint=hint)]
        )
    base = read_tree(recipes[chosen.value], origin="recipe")
    validate(
        base, model=TrainConfig
    )  # a defect of the recipe is reported at the recipe's lines, before this file's values hide it
    return replace(tree, entries={**tree.entries, "train": replace(overlay(base, train), key_mark=train.key_mark)})
