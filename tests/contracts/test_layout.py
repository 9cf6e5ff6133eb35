"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spec", "storage", "manifests", "infra", "gkr", "training", "services")
MODULE_LIMIT = 600
LONGER_WITH_REASON: dict[str, str] = {}
"""Module to the reason why it may be longer than the limit."""


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def modules() -> dict[str, int]:
    paths = [path for package in PACKAGES for path in tracked(f"{package}/*.py")]
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}


def test_no_module_is_longer_than_the_limit_without_a_reason() -> None:
    long = {name: lines for name, lines in modules().items() if lines > MODULE_LIMIT and name not in LONGER_WITH_REASON}
    assert not long, f"split these modules or write the reason here: {long}"


def test_modules_are_small_on_the_whole() -> None:
    sizes = sorted(lines for name, lines in modules().items() if not name.endswith("__init__.py"))
    assert median(sizes) < 150
    assert quantiles(sizes, n=10)[-1] < 400


def test_every_python_file_under_tests_is_collected_or_a_helper() -> None:
    stray = [
        str(path.relative_to(ROOT))
        for path in tracked("tests/*.py")
        if not path.name.startswith("test_")
        and path.name not in {"__init__.py", "conftest.py"}
        and "builders" not in path.parts
    ]
    assert not stray, f"pytest never runs these; rename to test_*.py or move to tests/builders: {stray}"


def test_every_collected_file_has_a_test() -> None:
    empty = []
    for path in tracked("tests/*.py"):
        if not path.name.startswith("test_"):
            continue
        names = [
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        ]
        if not any(name.startswith(("test_", "Test")) or "Machine" in name for name in names):
            empty.append(str(path.relative_to(ROOT)))
    assert not empty


def test_our_top_level_names_belong_to_nobody_else_in_the_environment() -> None:
    owners = importlib.metadata.packages_distributions()
    for package in (*PACKAGES, "benchmarks", "recipes", "tools"):
        others = [owner for owner in owners.get(package, []) if owner != "gkr"]
        assert not others, f"{package} is also a top-level name of {others}"


def test_locks_carry_hashes_and_no_index_address() -> None:
    locks = tracked("requirements/*.txt")
    assert len(locks) >= 5
    for lock in locks:
        text = lock.read_text()
        assert "--index-url" not in text, lock
        assert "://" not in text, lock
        pinned = re.findall(r"^[A-Za-z0-9._-]+==", text, re.MULTILINE)
        assert pinned
        assert text.count("--hash=sha256:") >= len(pinned), lock


def test_locks_agree_on_every_version() -> None:
    seen: dict[str, str] = {}
    for line in (ROOT / "requirements" / "all.txt").read_text().splitlines():
        if match := re.match(r"^([A-Za-z0-9._-]+)==(\S+)", line):
            seen[match[1]] = match[2]
    for lock in tracked("requirements/*.txt"):
        if lock.name == "uv.txt":
            continue
        for line in lock.read_text().splitlines():
            if match := re.match(r"^([A-Za-z0-9._-]+)==(\S+)", line):
                assert seen[match[1]] == match[2], f"{lock.name}: {line}"


def test_every_make_target_is_written_in_contributing() -> None:
    targets = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    missing = [target for target in targets if f"`make {target}" not in text]
    assert not missing


def test_decisions_are_numbered_without_gaps_and_listed_in_the_architecture() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert all(name in text for name in names)


def test_no_wait_is_written_without_a_deadline() -> None:
    """`.join()`, `.wait()`, `.result()`, `.acquire()` on threads, processes and futures take a timeout."""
    pattern = re.compile(r"\.(join|wait|result|acquire)\(\)")
    allowed = re.compile(r"\"\.join|'\.join|\", \"|os\.path|str\.join")
    bad = []
    for package in PACKAGES:
        for path in tracked(f"{package}/*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(line) and not allowed.search(line) and not line.strip().startswith("#"):
                    bad.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not bad, "\n".join(bad)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom gkr.main import main\nsys.argv=['gkr','--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'pydantic', 'yaml', 'numpy', 'matplotlib', 'zmq', 'msgspec', 'rich', 'psutil'}\n"
        "heavy |= {'lightkube', 'httpx', 'obstore', 'pulumi'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
