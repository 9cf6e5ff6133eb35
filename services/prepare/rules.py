"""The rules as a person or a client sent them."""

from __future__ import annotations

from pydantic import ValidationError

from spec.errors import ConfigError
from spec.preparation import PrepareRules


def read_rules(text: str) -> PrepareRules:
    """From JSON; ConfigError names all that is wrong."""
    try:
        return PrepareRules.model_validate_json(text)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"the rules are refused: {told}", hint="see spec.preparation.PrepareRules") from error
