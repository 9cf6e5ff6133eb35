"""The JSON Schema of stack configurations, which editors show."""

from __future__ import annotations

import json

from spec.schemas import FOLDER
from spec.stack import KEY

SCHEMA = json.loads((FOLDER / "stack.json").read_text(encoding="utf-8"))


def test_every_field_has_help() -> None:
    bare = [
        f"{model}.{name}"
        for model, body in SCHEMA["$defs"].items()
        for name, field in body.get("properties", {}).items()
        if not field.get("description") and "$ref" not in field
    ]
    assert bare == []


def test_the_three_kinds_are_told_apart_by_kind() -> None:
    assert set(SCHEMA["discriminator"]["mapping"]) == {"global", "region", "platform"}
    assert KEY in SCHEMA["title"]
    for kind in ("GlobalStack", "RegionStack", "PlatformStack"):
        assert SCHEMA["$defs"][kind]["additionalProperties"] is False
