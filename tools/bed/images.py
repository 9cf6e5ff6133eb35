"""Images of the bed's own pods, built from nothing but what lies on this machine.

There is no registry: an image is a scratch root with one static binary, built once with buildah into an archive that is
named by the digest of what went in, and imported into the node's containerd unless it is there already. The tag is the
same digest, so an image that changed is another image and nothing has to be pulled or restarted by force.

`hostroot` is the image of experiments' pods: a root of symbolic links into /usr, which the pod mounts from the host
(read-only, with the virtual environment and the repository). It is a quarter of a megabyte where a copy is gigabytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from spec.errors import ConfigError, GkrError, UnreachableError
from tools.bed.layout import PAUSE_IMAGE, REPOSITORY, Bed
from tools.bed.run import ctr
from tools.binaries import binary, cache_folder

PREFIX = "localhost/gkr"
NOBODY = "65532:65532"
BUILD_SECONDS = 300.0
IMPORT_SECONDS = 120.0
LOCK_SECONDS = 2 * BUILD_SECONDS
POLL_SECONDS = 0.1
DIGEST_LENGTH = 12


@dataclass(frozen=True)
class Recipe:
    """What an image holds. Equal recipes give equal images."""

    name: str
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Path in the image -> file or folder of this machine."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path in the image -> content."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path in the image -> where it points."""
    folders: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    user: str = "0:0"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    tag: str = ""
    """Empty: the digest of everything above."""

    @property
    def digest(self) -> str:
        """Of all that goes in; a file counts by where it lies, its size and its time of change, not by its bytes."""
        parts = [self.containerfile, repr(sorted(self.texts.items())), repr(sorted(self.links.items()))]
        parts += [repr(self.folders), *(_identity(target, source) for target, source in sorted(self.files.items()))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def reference(self) -> str:
        """What a pod writes as its image."""
        return f"{PREFIX}/{self.name}:{self.tag or self.digest}"

    @property
    def archive(self) -> Path:
        """Where the built image lies."""
        return cache_folder() / "images" / f"{self.name}-{self.digest}.tar"

    @property
    def containerfile(self) -> str:
        """How buildah makes it of a folder `root`."""
        lines = ["FROM scratch", "COPY root/ /", f"USER {self.user}"]
        lines += [f'ENV {name}="{value}"' for name, value in sorted(self.env.items())]
        if self.entrypoint:
            words = ", ".join(f'"{word}"' for word in self.entrypoint)
            lines.append(f"ENTRYPOINT [{words}]")
        return "\n".join(lines) + "\n"


def _identity(target: str, source: Path) -> str:
    about = source.stat()
    return f"{target} {source} {about.st_size} {about.st_mtime_ns}"


def pause() -> Recipe:
    """The sandbox, which only waits: coreutils' sleep with its loader and C library, which every machine has.

    Its tag is fixed, because containerd's configuration names it before any image is there.
    """
    sleep = Path(shutil.which("sleep") or "/usr/bin/sleep").resolve()
    files = {"/pause": sleep, **{str(path): path.resolve() for path in _libraries(sleep)}}
    return Recipe("pause", files=files, entrypoint=("/pause", "infinity"), user=NOBODY, tag=PAUSE_IMAGE.split(":")[-1])


@cache
def _libraries(program: Path) -> tuple[Path, ...]:
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False, timeout=30)
    return tuple(Path(word) for line in done.stdout.splitlines() for word in line.split() if word.startswith("/"))


def coredns() -> Recipe:
    """Runs as root because it binds port 53."""
    return Recipe("coredns", files={"/coredns": binary("coredns")}, entrypoint=("/coredns",))


def kuberay() -> Recipe:
    """KubeRay's manifests start `/manager`."""
    return Recipe("kuberay", files={"/manager": binary("kuberay-operator")}, folders=("/tmp",), user=NOBODY)


def kueue() -> Recipe:
    """Kueue's manifests start `/manager`."""
    return Recipe("kueue", files={"/manager": binary("kueue")}, folders=("/tmp",), user=NOBODY)


def versitygw() -> Recipe:
    """Root, because it sets extended attributes on files of a folder of the host."""
    return Recipe("versitygw", files={"/versitygw": binary("versitygw")}, folders=("/tmp",), entrypoint=("/versitygw",))


def hostroot() -> Recipe:
    """A root that is the host's /usr under another hat; `mounts` says what a pod must mount into it."""
    names = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
    links = {f"/{name}": str(Path(f"/{name}").readlink()) for name in names if Path(f"/{name}").is_symlink()}
    solid = [f"/{name}" for name in names if Path(f"/{name}").is_dir() and not Path(f"/{name}").is_symlink()]
    if solid:
        raise ConfigError(
            f"{', '.join(solid)} of this machine are folders, not links into /usr",
            hint="the bed needs a merged /usr (Debian 12, Ubuntu 20.04, later ones); or use kind or any KUBECONFIG",
        )
    kept = (
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "alternatives",
        "ssl",
        "nsswitch.conf",
        "localtime",
        "mime.types",
    )
    files = {f"/etc/{name}": Path(f"/etc/{name}") for name in kept if Path(f"/etc/{name}").exists()}
    texts = {"/etc/passwd": "root:x:0:0:root:/root:/bin/bash\n", "/etc/group": "root:x:0:\n"}
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "VIRTUAL_ENV": sys.prefix, "PYTHONUNBUFFERED": "1"}
    folders = ("/usr", "/tmp", "/var/tmp", "/root", "/proc", "/sys", "/dev", "/run", "/home")
    return Recipe("hostroot", files=files, texts=texts, links=links, folders=folders, env=env)


def mounts() -> tuple[Path, ...]:
    """Folders of this machine that a pod of `hostroot` mounts read-only at the same path, outermost only.

    /usr; the virtual environment; the installation that its interpreter belongs to; the repository, into which the
    editable installation points.
    """
    wanted = sorted({Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), REPOSITORY})
    return tuple(path for path in wanted if not any(other in path.parents for other in wanted))


def all_recipes() -> tuple[Recipe, ...]:
    """Every image that a bed's node needs; `pause` comes first, because no pod starts without it."""
    return (pause(), coredns(), kueue(), kuberay(), versitygw(), hostroot())


def build(recipe: Recipe) -> Path:
    """The archive of an image, built if it is not there. Safe to call from several processes."""
    target = recipe.archive
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f"{recipe.name}.lock"):
        if not target.is_file():
            _build(recipe, target)
    for other in target.parent.glob(f"{recipe.name}-*.tar"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _build(recipe: Recipe, target: Path) -> None:
    for left_behind in target.parent.glob(f".{recipe.name}-*"):  # by a build that was killed; the lock is ours
        shutil.rmtree(left_behind, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{recipe.name}-") as scratch:
        context = Path(scratch) / "context"
        _lay_out(recipe, context / "root")
        (context / "Containerfile").write_text(recipe.containerfile)
        store = ["--storage-driver", "vfs", "--root", f"{scratch}/root", "--runroot", f"{scratch}/run"]
        result = Path(scratch) / "image.tar"
        _buildah(
            [*store, "build", "--isolation", "chroot", "--layers=false", "--timestamp", "0", "--quiet",
             "--file", str(context / "Containerfile"), "--tag", recipe.reference, str(context)],
            recipe=recipe,
        )  # fmt: skip
        _buildah(
            [*store, "push", "--quiet", recipe.reference, f"docker-archive:{result}:{recipe.reference}"], recipe=recipe
        )
        result.rename(target)


def _lay_out(recipe: Recipe, root: Path) -> None:
    root.mkdir(parents=True)
    for folder in recipe.folders:
        _below(root, folder).mkdir(parents=True, exist_ok=True)
    if "/tmp" in recipe.folders:
        _below(root, "/tmp").chmod(0o1777)
    for target, text in recipe.texts.items():
        path = _below(root, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for target, source in recipe.files.items():
        path = _below(root, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, path, symlinks=True)
        else:
            shutil.copy2(source, path)
    for target, where in recipe.links.items():
        path = _below(root, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(where)


def _below(root: Path, target: str) -> Path:
    return root / target.lstrip("/")


def _buildah(arguments: list[str], *, recipe: Recipe) -> None:
    env = {**os.environ, "TMPDIR": str(recipe.archive.parent)}
    try:
        done = subprocess.run(
            ["buildah", *arguments], capture_output=True, text=True, check=False, timeout=BUILD_SECONDS, env=env
        )
    except FileNotFoundError:
        raise ConfigError("buildah is not installed", hint="apt-get install buildah") from None
    except subprocess.TimeoutExpired:
        raise GkrError(f"image {recipe.name} was not built within {BUILD_SECONDS:.0f} s") from None
    if done.returncode:
        raise GkrError(f"image {recipe.name} cannot be built: {done.stderr.strip()[-2000:]}")


@contextmanager
def _locked(path: Path) -> Generator[None]:
    deadline = time.monotonic() + LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UnreachableError(f"another build has held {path} for {LOCK_SECONDS:.0f} s") from None
                time.sleep(POLL_SECONDS)
        yield


def provide(bed: Bed, *, recipes: tuple[Recipe, ...]) -> list[str]:
    """Put images into the node's containerd; the names of those that were missing."""
    present = set(ctr(bed, "images", "list", "--quiet").split())
    missing = [recipe for recipe in recipes if recipe.reference not in present]
    for recipe in missing:
        ctr(bed, "images", "import", str(build(recipe)), deadline_seconds=IMPORT_SECONDS)
    return [recipe.name for recipe in missing]
