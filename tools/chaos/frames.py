"""Hostile frames that follow coverage: a million inputs to everything that reads bytes from a socket.

libFuzzer, by way of atheris, changes good messages and keeps each change that reaches new code of ours; whatever is
read or refused is fine, any other exception, a new module, more than a gigabyte or ten seconds for one input is a
finding, and the input is kept. atheris comes from the package index into an environment of its own.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._environment import make_environment

ROOT = Path(__file__).resolve().parents[2]
ATHERIS = "atheris==3.0.0"
LONGEST_INPUT = 20_000
MOST_FRAMES = 8
SECONDS_FOR_EACH = 10
MEMORY_MB = 1024
LEAST_INPUTS_PER_SECOND = 50
"""What the deadline is made from; a busy machine does several thousands."""
_DONE = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)/")


def campaign(folder: Path, *, seed: int, inputs: int) -> dict[str, object]:
    """Give so many inputs; what was reached, and what was found."""
    programs, missing = make_environment("atheris", packages={"atheris": [["--no-deps", ATHERIS]]})
    if missing:
        raise SystemExit(f"{ATHERIS} cannot be installed: {missing['atheris']}")
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    command = [
        programs / "python", "-m", "tools.chaos._frames_target",
        f"-seed={seed + 1}", f"-runs={inputs}", f"-max_len={LONGEST_INPUT}", f"-timeout={SECONDS_FOR_EACH}",
        f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={folder}/found-", corpus,
    ]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, check=False, timeout=120 + inputs / LEAST_INPUTS_PER_SECOND,
    )  # fmt: skip
    said = f"{done.stdout}\n{done.stderr}"
    end = _DONE.search(said)
    found = sorted(folder.glob("found-*"))
    broken = [f"{path.name}: {path.read_bytes()!r}" for path in found]
    if done.returncode or end is None:
        broken.append(f"ended with {done.returncode}: {said[-3000:]}")
    count, code, features, kept = map(int, end.groups()) if end else (0, 0, 0, 0)
    seconds = time.monotonic() - began
    return {
        "seed": seed, "inputs": count, "seconds": seconds, "inputs_per_second": count / seconds, "code_reached": code,
        "features": features, "corpus": kept, "broken": broken,
    }  # fmt: skip


def packed(reader: int, frames: Sequence[bytes]) -> bytes:
    """An input: who reads, how many frames there are, and each with its length before it."""
    return bytes([reader, len(frames)]) + b"".join(struct.pack("<H", len(one)) + one for one in frames)


def unpacked(data: bytes) -> tuple[int, list[bytes]]:
    """Reader and frames; any bytes are an input."""
    reader, count = (data[0], data[1]) if len(data) > 1 else (0, 0)
    frames: list[bytes] = []
    rest = data[2:]
    for _ in range(count % (MOST_FRAMES + 1)):
        length = int.from_bytes(rest[:2], "little")
        frames.append(rest[2 : 2 + length])
        rest = rest[2 + length :]
    return reader, frames


def describe(result: dict[str, object]) -> str:
    """One line."""
    words = f"{result['inputs']} inputs in {result['seconds']:.0f} s, {result['corpus']} kept for what they reached"
    return f"frames, seed {result['seed']}: {words}; broken: {result['broken'] or 'nothing'}"
