"""Claim: pictures of 512 px become uint8 batches at 1.3 times the rate of torch's DataLoader, and as fast as with SPDL.

The field in one run, round by round in turn, each in a process of its own that is stopped while others are measured:
ours, torch's DataLoader, SPDL (with its own decoder, and with ours), Grain, MosaicML Streaming, WebDataset and LitData.
The same JPEG files with as much texture as photographs have, the same size of batch, as many workers (SPDL: threads)
and as many batches ahead. All but SPDL's own decoder share the function that decodes a picture, so what differs is how
samples are read, batched and moved. Two datasets: pictures whose shorter side is 512, which are only cropped, and
larger ones, which are scaled as well. Each batch is read a byte a page. Then: how long a consumer waits that takes
80 % of what our loader can deliver.

The other libraries are installed into an environment of their own; one that cannot be is named and left out. SPDL has
no FFmpeg of its own and gets PyAV's.

    python -m benchmarks.loader_field [--rounds 5] [--contenders ours torch spdl] [--kinds cropped]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks._environment import make_environment
from benchmarks._pictures import make_photos
from benchmarks._verdicts import RESULTS, machine, verdict, write_result

OUTPUT = RESULTS / "loader_field.json"
SCRIPT = Path(__file__).with_name("_field_contender.py")
PACKAGES: dict[str, list[list[str]]] = {
    "spdl": [["spdl==0.8.0", "av==18.1.0"]],
    "grain": [["grain==0.2.18"]],
    # Most of its requirements serve stores that are not used here, and are not imported.
    "mosaic": [
        ["--no-deps", "mosaicml-streaming==0.13.0", "torchvision"],
        ["Brotli", "python-snappy", "xxhash<4", "zstd", "catalogue"],
    ],
    "webdataset": [["webdataset==1.0.2"]],
    "litdata": [["litdata==0.2.76"]],
}
NEEDS = {"spdl-pillow": "spdl"}
CONTENDERS = ("ours", "torch", "spdl", "spdl-pillow", "grain", "mosaic", "webdataset", "litdata")
NAMES = {
    "torch": "torch DataLoader", "spdl": "SPDL", "spdl-pillow": "SPDL with our decoder", "grain": "Grain",
    "mosaic": "MosaicML Streaming", "webdataset": "WebDataset", "litdata": "LitData",
}  # fmt: skip
SIZES = {
    "cropped": [(512, 512), (688, 512), (512, 688), (768, 512)],
    "scaled": [(640, 640), (800, 600), (600, 800), (960, 640)],
}
COUNT, WORKERS, UNTIMED, TIMED = 1024, 2, 8, 16
DEMAND, STALL_SECONDS = 0.8, 10.0
ANSWER_SECONDS, PREPARE_SECONDS, END_SECONDS = 120.0, 300.0, 10.0


class Contender:
    """A contender's process; it only runs while it is asked something."""

    def __init__(self, name: str, *, task: Path, programs: Path, log: Path) -> None:
        self.name, self._log = name, log
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}
        if name == "spdl":
            environment["LD_LIBRARY_PATH"] = str(ffmpeg_of(programs))
        self._process = subprocess.Popen(
            [programs / "python", SCRIPT, name, task], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("ab"), env=environment, text=True, start_new_session=True,
        )  # fmt: skip
        self.first_batch_seconds: float = self._answer()["first_batch_seconds"]
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, **command: float) -> dict[str, Any]:
        """What it answers to one command."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps({"do": do, **command}), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def end(self) -> None:
        """It and its workers are gone; it may tidy up first, since some of them share memory under a name."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait(END_SECONDS)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.end()
            raise RuntimeError(f"{self.name} did not answer: {self._log.read_text()[-2000:]}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)


def ffmpeg_of(programs: Path) -> Path:
    """Folder in which PyAV's FFmpeg has the names that SPDL asks the linker for."""
    folder = next((programs.parent / "lib").glob("python*/site-packages")) / "av.libs"
    for path in folder.glob("lib*-*.so.*"):
        if found := re.fullmatch(r"(lib(?:av|sw)\w+)-\w+(\.so\.\d+)[.\d]*", path.name):
            plain = folder / f"{found[1]}{found[2]}"
            if not plain.exists():
                plain.symlink_to(path.name)
    return folder


def make_task(folder: Path, *, kind: str, programs: Path, contenders: Sequence[str]) -> Path:
    """The pictures, also in the formats of those that read only their own."""
    uri = make_photos(folder / "pictures", sizes=SIZES[kind], count=COUNT)
    task = folder / "task.json"
    task.write_text(json.dumps({
        "uri": uri, "mosaic": str(folder / "mosaic"), "litdata": str(folder / "litdata"), "workers": WORKERS,
    }))  # fmt: skip
    for name in ("mosaic", "litdata"):
        if name in contenders:
            environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
            command = [programs / "python", SCRIPT, f"prepare-{name}", task]
            done = subprocess.run(
                command, check=False, env=environment, capture_output=True, text=True, timeout=PREPARE_SECONDS
            )
            if done.returncode:
                raise RuntimeError(f"the pictures cannot be written for {name}: {done.stderr[-2000:]}")
    return task


@contextmanager
def running(names: Sequence[str], *, task: Path, programs: Path) -> Generator[list[Contender]]:
    """All contenders, each stopped behind its first batch."""
    with ExitStack() as stack:
        some: list[Contender] = []
        for name in names:
            one = Contender(name, task=task, programs=programs, log=task.with_name(f"{name}.log"))
            stack.callback(one.end)
            some.append(one)
        yield some


def measure(kind: str, *, names: Sequence[str], programs: Path, rounds: int) -> dict[str, Any]:
    """Rates of all on one dataset, and our consumer's waits."""
    with tempfile.TemporaryDirectory(prefix="gkr-bench-") as temporary:
        task = make_task(Path(temporary), kind=kind, programs=programs, contenders=names)
        with running(names, task=task, programs=programs) as some:
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(rounds):
                for one in some:
                    answers[one.name].append(one.ask("batches", untimed=UNTIMED, timed=TIMED))
            rows = {one.name: row_of(one, answers=answers[one.name], ours=answers["ours"]) for one in some}
            rate = rows["ours"]["images_per_second"] * DEMAND
            stall = some[0].ask("stall", rate=rate, seconds=STALL_SECONDS)
    return {"rows": [{"kind": kind, **row} for row in rows.values()], "stall": {"kind": kind, "rate": rate, **stall}}


def row_of(one: Contender, *, answers: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; ratios compare the rounds with our own beside them."""
    rates = [answer["images"] / answer["seconds"] for answer in answers]
    own = [answer["images"] / answer["seconds"] for answer in ours]
    return {
        "contender": one.name,
        "images_per_second": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "cpu_ms_per_image": statistics.median(1000 * answer["cpu_seconds"] / answer["images"] for answer in answers),
        "ours_over_it": statistics.median(mine / its for mine, its in zip(own, rates, strict=True)),
        "first_batch_seconds": one.first_batch_seconds,
        "brightness": statistics.mean(answer["brightness"] for answer in answers),
    }


def verdicts_of(found: dict[str, Any]) -> list[dict[str, object]]:
    """Targets hold for pictures of 512 px; what scaling costs on top is reported."""
    verdicts: list[dict[str, object]] = []
    kind = found["stall"]["kind"]
    rows = {row["contender"]: row for row in found["rows"]}
    rate = rows["ours"]["images_per_second"]
    what = "512 px JPEG to uint8 batch" if kind == "cropped" else "larger JPEG scaled to 512 px, uint8 batch"
    targets = {"torch": 1.3, "spdl": 0.95, "spdl-pillow": 0.95} if kind == "cropped" else {}
    for name, row in rows.items():
        if name != "ours":
            verdicts.append(verdict(
                what, measured=rate, unit="images/s", ratio=row["ours_over_it"], at_least=targets.get(name),
                against=f"{NAMES[name]}, {row['images_per_second']:.0f} images/s",
            ))  # fmt: skip
    own = rows["ours"]["cpu_ms_per_image"]
    verdicts += [
        verdict(
            f"CPU of that: {what}", measured=own, unit="ms an image", ratio=rows[name]["cpu_ms_per_image"] / own,
            against=f"less than {NAMES[name]}, {rows[name]['cpu_ms_per_image']:.2f} ms",
        )
        for name in ("torch", "spdl")
        if name in rows
    ]  # fmt: skip
    verdicts.append(verdict(
        f"wait of a consumer at 80 % of the rate, {what}", measured=100 * found["stall"]["waited_share"], unit="%",
        at_most=1 if kind == "cropped" else None,
    ))  # fmt: skip
    return verdicts


def main() -> None:
    """Install, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--kinds", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    names = ["ours", *(name for name in given.contenders if name != "ours")]
    wanted = {NEEDS.get(name, name) for name in names}
    programs, missing = make_environment(
        "loader-field", packages={name: calls for name, calls in PACKAGES.items() if name in wanted}
    )
    names = [name for name in names if NEEDS.get(name, name) not in missing]
    found = {kind: measure(kind, names=names, programs=programs, rounds=given.rounds) for kind in given.kinds}
    rows = [row for one in found.values() for row in one["rows"]]
    for row in rows:
        print(
            f"{row['kind']:8} {row['contender']:12} {row['images_per_second']:7.1f} images/s"
            f"  {row['cpu_ms_per_image']:6.2f} ms CPU per image  ours {row['ours_over_it']:5.2f} x"
        )
    for name, reason in missing.items():
        print(f"not installed: {name}: {reason}")
    write_result(given.output, {
        "machine": machine(), "workers": WORKERS, "packages": {name: calls[0] for name, calls in PACKAGES.items()},
        "missing": missing, "verdicts": [row for one in found.values() for row in verdicts_of(one)], "rows": rows,
        "stalls": [one["stall"] for one in found.values()],
    })  # fmt: skip


if __name__ == "__main__":
    main()
