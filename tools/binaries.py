"""Builds the tools that come only as Go source: `python tools/binaries.py [TOOL ...]`.

One Go module per tool under `tools/go/` (their dependencies disagree), because its sum file pins every line of code
that goes in. What was built lies outside the repository, in a folder named by the digest of all that decided it, so a
second call returns at once and a changed pin builds anew. Nothing is linked to C. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GO_MODULES = Path(__file__).resolve().parent / "go"
OLDEST_GO = (1, 26)
DEADLINE_SECONDS = 3600.0
DOWNLOAD_TRIES = 3
PROVIDER = "github.com/pulumi/pulumi-kubernetes/provider/v4"
PROVIDER_VERSION = "4.34.2"
"""Of the Python SDK: the engine compares it with what the provider says."""


@dataclass(frozen=True)
class Tool:
    """One module of `tools/go` and the binaries it gives."""

    name: str
    binaries: dict[str, str]
    """File name -> package."""
    minutes: float
    """Of a cold build on two cores."""
    variables: tuple[str, ...] = ()
    """What the linker sets, `package.name=value`."""
    embed: Callable[[Path], None] | None = None
    """Writes what the main package of ours embeds."""


def _kubernetes_version() -> tuple[str, ...]:
    version, minor = _pin("kubernetes", "k8s.io/kubernetes"), "34"
    names = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    fields = {"gitVersion": version, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
    return tuple(f"{name}.{field}={value}" for name in names for field, value in fields.items())


def _pin(tool: str, module: str) -> str:
    for line in (GO_MODULES / tool / "go.mod").read_text().splitlines():
        words = line.removeprefix("require").split()
        if words[:1] == [module]:
            return words[1]
    raise SystemExit(f"tools/go/{tool}/go.mod does not require {module}")


def _module(module: str, *, folder: Path) -> Path:
    """Source of a module that `folder` pins, downloaded if Go's cache has lost it."""
    return Path(json.loads(_go("mod", "download", "-json", module, folder=folder))["Dir"])


def _embed_schema(folder: Path) -> None:
    """The provider's schema with the version it is to report: what its own `go generate` does."""
    source = _module(PROVIDER, folder=folder) / "cmd" / "pulumi-resource-kubernetes"
    schema = json.loads((source / "schema.json").read_text())
    schema["version"] = PROVIDER_VERSION
    (folder / "schema-embed.json").write_text(json.dumps(schema, separators=(",", ":")))
    shutil.copyfile(source / "terraform-mapping.json", folder / "terraform-mapping-embed.json")


_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")

TOOLS: tuple[Tool, ...] = (
    Tool("kubernetes", {name: f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES}, minutes=8,
         variables=_kubernetes_version()),
    Tool("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}, minutes=1),
    Tool("coredns", {"coredns": "github.com/coredns/coredns"}, minutes=2),
    Tool("kuberay", {"kuberay-operator": "github.com/ray-project/kuberay/ray-operator"}, minutes=2),
    Tool("kueue", {"kueue": "sigs.k8s.io/kueue/cmd/kueue"}, minutes=3),
    Tool("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}, minutes=2),
    Tool("versitygw", {"versitygw": "github.com/versity/versitygw/cmd/versitygw"}, minutes=1),
    Tool("pulumi", {"pulumi": "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi"}, minutes=8),
    Tool("pulumi-kubernetes", {"pulumi-resource-kubernetes": "."}, minutes=13, embed=_embed_schema),
    Tool("actionlint", {"actionlint": "github.com/rhysd/actionlint/cmd/actionlint"}, minutes=1),
)  # fmt: skip
CLUSTER_TOOLS = ("kubernetes", "etcd", "coredns", "kuberay", "kueue", "kwok", "versitygw")
"""What a one-node cluster needs."""


def cache_folder() -> Path:
    """Where binaries lie: GKR_CACHE, else gkr in the user's cache folder."""
    own = os.environ.get("GKR_CACHE")
    if own:
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gkr"


def binary(name: str) -> Path:
    """Path of a built binary; SystemExit with the command that builds it if it is not there."""
    for tool in TOOLS:
        if name in tool.binaries:
            path = _folder(tool) / name
            if path.is_file():
                return path
            raise SystemExit(f"{name} is not built; run: make tools TOOLS={tool.name}")
    raise SystemExit(f"no tool gives a binary {name}")


def module_folder(tool: str, module: str) -> Path:
    """Where Go keeps the source of a module that a tool pins: manifests and schemas are read from there."""
    return _module(module, folder=GO_MODULES / tool)


def build(names: Sequence[str]) -> None:
    """Build what is missing of the named tools, one after another, with progress on stderr."""
    known = {tool.name: tool for tool in TOOLS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no tool {', '.join(unknown)}; there are {', '.join(known)}")
    with _locked():
        missing = [known[name] for name in names if not _is_built(known[name])]
        if not missing:
            return
        _check_go()
        whole = sum(tool.minutes for tool in missing)
        _say(f"building {', '.join(tool.name for tool in missing)} from source, once: about {whole:.0f} min on 2 cores")
        started = time.monotonic()
        for tool in missing:
            _build(tool)
        _say(f"all built in {(time.monotonic() - started) / 60:.1f} min; in {cache_folder() / 'tools'}")
        _say(f"the Go build cache {_go_cache()} may be removed")


def _is_built(tool: Tool) -> bool:
    return all((_folder(tool) / name).is_file() for name in tool.binaries)


def _folder(tool: Tool) -> Path:
    """Named by the digest of everything that decides the binaries, but for the Go version: any that builds it does."""
    parts = [path.read_bytes() for path in sorted((GO_MODULES / tool.name).iterdir()) if path.suffix != ".json"]
    parts.append(repr((sorted(tool.binaries.items()), tool.variables, _FLAGS)).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_folder() / "tools" / f"{tool.name}-{digest}"


_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")


def _build(tool: Tool) -> None:
    started = time.monotonic()
    target = _folder(tool)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{tool.name}-") as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        shutil.copytree(GO_MODULES / tool.name, source)
        out.mkdir()
        if tool.embed is not None:
            tool.embed(source)  # before the first `go list`, which looks for the embedded files
        _download(tool, source)
        packages = list(tool.binaries.values())
        total = len(_go("list", "-deps", *packages, folder=source).splitlines())
        linker = "-s -w " + " ".join(f"-X {one}" for one in tool.variables)
        # No debug information: it is stripped at the end, and not writing it saves a tenth of the compile time.
        command = ["build", "-v", *_FLAGS, "-gcflags=all=-dwarf=false", f"-ldflags={linker.strip()}", "-o", f"{out}/"]
        _compile(tool, [*command, *packages], folder=source, total=total, started=started)
        _name(tool, out)
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    size = sum((target / name).stat().st_size for name in tool.binaries) / 1e6
    _say(f"\r{tool.name}: built in {time.monotonic() - started:.0f} s, {size:.0f} MB{' ' * 30}")


def _download(tool: Tool, source: Path) -> None:
    """All modules, with retries: a registry that answers late must not end a build of half an hour."""
    for left in reversed(range(DOWNLOAD_TRIES)):
        try:
            _go("list", "-deps", *tool.binaries.values(), folder=source)
        except SystemExit:
            if not left:
                raise
            _say(f"{tool.name}: download failed, {left} more tries")
        else:
            return


def _name(tool: Tool, out: Path) -> None:
    """Go names a binary after the last part of its package; ours are named after what they are."""
    found = sorted(out.iterdir())
    if len(tool.binaries) == 1 and len(found) == 1:
        found[0].rename(out / next(iter(tool.binaries)))
    missing = [name for name in tool.binaries if not (out / name).is_file()]
    if missing:
        raise SystemExit(f"{tool.name}: the build did not give {', '.join(missing)}")


def _compile(tool: Tool, arguments: list[str], *, folder: Path, total: int, started: float) -> None:
    """Run `go build -v` and count the packages it names."""
    process = subprocess.Popen(
        ["go", *arguments], cwd=folder, env=_environment(), stderr=subprocess.PIPE, text=True, errors="replace"
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    done, last, said = 0, [""], 0.0
    deadline = started + DEADLINE_SECONDS
    try:
        while (line := lines.get(timeout=max(1.0, deadline - time.monotonic()))) is not None:
            if " " in line or line.startswith("#"):
                last = [*last, line][-20:]
                continue
            done += 1
            now = time.monotonic()
            if now - said > (1 if sys.stderr.isatty() else 30):
                said = now
                _say(f"\r{tool.name}: {done} packages of at most {total}, {now - started:.0f} s", end="")
        code = process.wait(timeout=60)
    except queue.Empty:
        raise SystemExit(f"{tool.name}: not built within {DEADLINE_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    if code:
        raise SystemExit("\n".join([f"{tool.name}: go build failed (exit {code})", *last]))


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in process.stderr or ():
        lines.put(line.rstrip())
    lines.put(None)


def _go(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        ["go", *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, check=False,
        timeout=DEADLINE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-10:])
        raise SystemExit(f"go {' '.join(arguments)} failed in {folder.name}:\n{tail}")
    return done.stdout


def _environment() -> dict[str, str]:
    # A larger heap before the compiler collects garbage: memory is there, and it saves a tenth of the time.
    own = {"CGO_ENABLED": "0", "GOCACHE": f"{_go_cache()}", "GOGC": "400", "GOWORK": "off"}
    return {**os.environ, **own, "GOFLAGS": ""}


def _go_cache() -> Path:
    return cache_folder() / "go-build"


def _check_go() -> None:
    remedy = f"install Go {OLDEST_GO[0]}.{OLDEST_GO[1]} or newer (go.dev/doc/install)"
    try:
        text = _go("env", "GOVERSION", folder=GO_MODULES)
    except FileNotFoundError:
        raise SystemExit(f"Go is not on PATH and these tools come only as Go source; {remedy}") from None
    found = tuple(int(part) for part in text.strip().removeprefix("go").split(".")[:2] if part.isdecimal())
    if found < OLDEST_GO:
        raise SystemExit(f"{text.strip()} is too old; {remedy}")


@contextmanager
def _locked() -> Generator[None]:
    """One build at a time: two would double each other's time and race for one folder."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tools.lock").open("w") as file:
        deadline = time.monotonic() + DEADLINE_SECONDS
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not waiting:
                    _say("another build of these tools is going on; waiting for it")
                    waiting = True
                if time.monotonic() > deadline:
                    raise SystemExit("another build of these tools has held its lock for an hour") from None
                time.sleep(1)
        yield


def _say(text: str, *, end: str = "\n") -> None:
    sys.stderr.write(text + (end if sys.stderr.isatty() or end == "\n" else "\n"))
    sys.stderr.flush()


def main() -> int:
    """Build tools, or list them with what is built."""
    parser = argparse.ArgumentParser(prog="tools/binaries.py", description=__doc__)
    parser.add_argument("tools", nargs="*", help="default: what a one-node cluster needs")
    parser.add_argument("--list", action="store_true", help="print every tool, its minutes and where it is or would be")
    options = parser.parse_args()
    if options.list:
        for tool in TOOLS:
            state = "built" if _is_built(tool) else f"about {tool.minutes:g} min"
            sys.stdout.write(f"{tool.name:20} {state:14} {', '.join(tool.binaries)}  {_folder(tool)}\n")
        return 0
    build(options.tools or CLUSTER_TOOLS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
