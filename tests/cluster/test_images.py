"""The real images, built by buildah on a base made by debootstrap, and tested inside themselves.

Needs root on Linux, buildah and debootstrap. The first build installs torch with its CUDA libraries (minutes, 8 GB of
disk); buildah keeps the layers, so that the next run rebuilds what changed. Remove them with `buildah rmi --prune`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spec.errors import GkrError, UnreachableError
from tools import image, image_context

pytestmark = [pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary-5f0c1e"
"""Stands for a password of the caller's package index."""
REGISTRY_PORT = 5057


def run(*command: str | Path, deadline_seconds: float = 120, cwd: Path = ROOT, check: bool = True) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, errors="replace", check=False, timeout=deadline_seconds
    )
    assert not check or done.returncode == 0, f"{command}: {done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def build(name: str, *, tree: Path = ROOT, smoke_test: bool = True) -> dict[str, Any]:
    """`make image NAME=... BASE=local` as a person calls it, with a password in the environment."""
    flags = [] if smoke_test else ["--no-smoke-test"]
    command = [
        sys.executable,
        "-m",
        "tools.image",
        name,
        "--engine",
        "buildah",
        "--base",
        "local",
        "-o",
        "json",
        *flags,
    ]
    environment = {**os.environ, "UV_INDEX_OWN_PASSWORD": CANARY, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=2700)
    assert done.returncode == 0, done.stderr[-6000:]
    return {**json.loads(done.stdout), "log": done.stderr}


class Builder:
    """Builds an image when a test first asks for it; the images share layers, so one after another is no waste."""

    def __init__(self) -> None:
        self._results: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._results:
            self._results[name] = build(name)
        return self._results[name]


@pytest.fixture(scope="module")
def built() -> Builder:
    assert os.geteuid() == 0, "buildah and debootstrap need root here"
    if shutil.which("debootstrap") is None:
        run("apt-get", "install", "--yes", "--no-install-recommends", "debootstrap", deadline_seconds=600)
    return Builder()


def inspect(reference: str) -> dict[str, Any]:
    return json.loads(run("buildah", "inspect", "--type", "image", reference))


def layers(reference: str) -> list[str]:
    return inspect(reference)["OCIv1"]["rootfs"]["diff_ids"]


@pytest.mark.parametrize("name", ["trainer", "services", "dev"])
def test_image_builds_and_passes_its_own_test(built: Builder, name: str) -> None:
    result = built[name]
    assert result["digest"].startswith("sha256:")
    checks = [line for line in result["log"].splitlines() if line.startswith(("ok ", "FAILED "))]
    assert len(checks) >= 7, result["log"][-3000:]
    assert not [line for line in checks if line.startswith("FAILED")]
    config = inspect(result["reference"])["OCIv1"]["config"]
    assert config["User"] == "1000:1000"
    assert config["Labels"]["gkr.content"] == result["content"]


@pytest.mark.parametrize("name", ["trainer", "services", "dev"])
def test_nothing_of_the_callers_index_settings_is_in_the_image(built: Builder, name: str) -> None:
    reference = built[name]["reference"]
    assert CANARY not in json.dumps(inspect(reference))
    container = run("buildah", "from", "--pull-never", reference).strip()
    try:
        folder = Path(run("buildah", "mount", container).strip())
        for place in ("opt/gkr/build", "opt/gkr/smoke", "opt/gkr/requirements", "etc", "root", "tmp", "run", "home"):
            found = run("grep", "-rlI", CANARY, folder / place, check=False)
            assert found == "", found
        assert not list((folder / "var" / "lib" / "apt" / "lists").iterdir())
        assert not (folder / "var" / "cache" / "caller-uv").exists() or not any(
            (folder / "var" / "cache" / "caller-uv").iterdir()
        )
        assert "://" not in "".join(path.read_text() for path in (folder / "etc" / "apt").rglob("*.list"))
    finally:
        run("buildah", "rm", container)


def test_images_share_the_layers_of_system_and_training_packages(built: Builder) -> None:
    trainer, services, dev = (layers(built[name]["reference"]) for name in ("trainer", "services", "dev"))
    shared = len(trainer) - 2
    assert shared >= 5
    assert trainer[:shared] == services[:shared] == dev[:shared]
    assert services[: shared + 2] == dev[: shared + 2], "the services' lock is a layer of dev as well"


def test_a_change_of_code_makes_one_new_layer(built: Builder, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    run("git", "init", "--quiet", cwd=tree)
    run("git", "add", "--all", cwd=tree)
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    run("git", *author, "commit", "--quiet", "--message", "copy", cwd=tree)
    path = tree / "training" / "__init__.py"
    path.write_text(path.read_text() + "\n# changed\n")
    changed = build("trainer", tree=tree, smoke_test=False)
    try:
        before, after = layers(built["trainer"]["reference"]), layers(changed["reference"])
    finally:
        run("buildah", "rmi", *changed["tags"], check=False)
    assert changed["reference"].endswith("-dirty")
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]


@pytest.mark.parametrize(("kind", "host", "profile"), [
    ("a3-mega", "nvidia", "lib64/nccl-env-profile.sh"), ("a3-ultra", "gib", "scripts/set_nccl_env.sh"),
])  # fmt: skip
def test_ray_inherits_the_environment_of_the_mounted_plugin(
    built: Builder, tmp_path: Path, kind: str, host: str, profile: str
) -> None:
    """A folder of this machine stands for what the installer's DaemonSet puts on the node."""
    (tmp_path / profile).parent.mkdir(parents=True)
    (tmp_path / profile).write_text("export NCCL_FROM_PROFILE=yes\n")
    tmp_path.chmod(0o755)
    container = run("buildah", "from", "--pull-never", built["trainer"]["reference"]).strip()
    try:
        mount = f"{tmp_path}:/usr/local/{host}:ro"
        shell = ["/bin/bash", "-lc", "--", "exec python -c 'import os, json; print(json.dumps(dict(os.environ)))'"]
        shown = run("buildah", "run", "--network", "none", "--volume", mount, container, "--", *shell)
    finally:
        run("buildah", "rm", container)
    environment = json.loads(shown)
    assert environment["GKR_FABRIC"] == kind
    assert environment["NCCL_FROM_PROFILE"] == "yes"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "/usr/local/nvidia/lib64" in environment["LD_LIBRARY_PATH"].split(":")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[image.Result]:
    """An image of one file, for what does not depend on what is inside."""
    (tmp_path / "file").write_text("content\n")
    container = run("buildah", "from", "scratch").strip()
    reference = "localhost/gkr/tiny:test"
    try:
        run("buildah", "copy", container, tmp_path / "file", "/file")
        run("buildah", "commit", container, reference)
        yield image.Result(name="tiny", engine="buildah", reference=reference, id="", digest="", size_bytes=0,
                           content="", tags=(reference,), build_seconds=0, smoke_seconds=0)  # fmt: skip
    finally:
        run("buildah", "rm", container)
        run("buildah", "rmi", "--force", reference, check=False)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry of Debian's package on the loopback, as a child of this test."""
    if shutil.which("docker-registry") is None:
        run("apt-get", "install", "--yes", "--no-install-recommends", "docker-registry", deadline_seconds=600)
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'registry'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{REGISTRY_PORT}'}}\n"
    )
    log = (tmp_path / "registry.log").open("w")
    process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        _wait_for_registry(process, deadline=time.monotonic() + 30)
        yield f"127.0.0.1:{REGISTRY_PORT}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        log.close()


def _wait_for_registry(process: subprocess.Popen[bytes], *, deadline: float) -> None:
    while True:
        assert process.poll() is None, "the registry ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{REGISTRY_PORT}/v2/", timeout=2).close()
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline
        else:
            return


def test_push_prints_a_reference_by_digest_that_can_be_pulled(
    tiny: image.Result, registry: str, tmp_path: Path
) -> None:
    pushed = image._push(tiny, target=f"{registry}/some/path/tiny:v1", folder=tmp_path)
    assert pushed.startswith(f"{registry}/some/path/tiny@sha256:")
    run("buildah", "rmi", "--force", tiny.reference)
    run("buildah", "pull", "--tls-verify=false", pushed)
    assert inspect(pushed)["FromImageDigest"] == pushed.partition("@")[2]
    run("buildah", "rmi", "--force", pushed)


def test_push_to_a_registry_that_does_not_answer_names_it(tiny: image.Result, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9 did not take the image"):
        image._push(tiny, target="127.0.0.1:9/some/path/tiny:v1", folder=tmp_path)


def test_an_image_that_fails_its_test_is_an_error(tiny: image.Result) -> None:
    """It holds no Python; so nothing would be pushed."""
    with pytest.raises(GkrError, match="smoke test of localhost/gkr/tiny:test failed"):
        image._smoke(tiny.reference, engine="buildah")
    left = json.loads(run("buildah", "containers", "--json")) or []
    assert not [one for one in left if one["containername"].startswith("gkr-smoke")]


def test_names_of_the_images_are_those_tested_here() -> None:
    assert image_context.image_names(ROOT) == ["dev", "services", "trainer"]
