"""The process that libFuzzer drives: `tools.chaos.frames` starts it in the environment that has atheris.

The first inputs are the good messages, to each of the readers.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from tools.chaos.frames import packed, unpacked

atheris: Any = importlib.import_module("atheris")  # not in this environment

with atheris.instrument_imports(include=["services.wire", "services.reception", "services.scheduler"]):
    from tests.builders.hostile_frames import TAKES, good_messages

_READERS = list(TAKES.values())


def main() -> None:
    """Arguments are libFuzzer's; the last one is the folder of the corpus, which begins with the good messages."""
    corpus = Path(sys.argv[-1])
    for reader in range(len(_READERS)):
        for number, message in enumerate(good_messages()):
            _READERS[reader](message)  # what is imported on first use is imported now
            (corpus / f"good-{reader}-{number}").write_bytes(packed(reader, message))
    logging.disable()

    def take(data: bytes) -> None:
        modules = len(sys.modules)
        reader, frames = unpacked(data)
        _READERS[reader % len(_READERS)](frames)
        if len(sys.modules) != modules:
            raise AssertionError("an input made somebody import a module")

    atheris.Setup(sys.argv, take)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
