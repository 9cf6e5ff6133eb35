"""The two bases of every document.

`Document` is what a person writes: strict, nothing unknown accepted. `Record` is what a component writes: read
leniently, so that a newer writer does not break an older reader. Both are frozen; a change is a new value.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Document(BaseModel):
    """Base of documents that people write; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Record(BaseModel):
    """Base of documents that components write; unknown keys are ignored when read."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, ser_json_inf_nan="null")

    @classmethod
    def read_json(cls, text: str | bytes) -> Self:
        """Read one record leniently."""
        return cls.model_validate_json(text, extra="ignore")

    def write_json(self) -> str:
        """One line of JSON with keys in declaration order."""
        return self.model_dump_json()


def first_fault(error: ValidationError) -> str:
    """What is wrong first with a document, with its place in it where it has one."""
    one = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in one["loc"])
    return f"{place}: {one['msg']}" if place else one["msg"]
