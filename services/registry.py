"""Which class serves which kind. Imported only where a replica runs: the classes load torch."""

from __future__ import annotations

import importlib
from typing import Any

from services.service import Service
from spec.services import ServiceKind

CLASSES: dict[ServiceKind, str] = {
    "encode": "services.encode:EncodeService",
    "sample": "services.sample:SampleService",
    "evaluate": "services.evaluate.service:EvaluateService",
    "prepare": "services.prepare.service:PrepareService",
}
"""Kind to `module:class`. The names are ours, never from a message."""


def load_class(path: str) -> type[Service]:
    """The class behind `module:class`."""
    module, _, name = path.partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Service)):
        raise TypeError(f"{path} is not a Service")
    return found
