"""What an image is built from: a context folder with tracked files only, its digest, and the caller's index settings.

The context never holds what git ignores, so that no local file gets into an image; the settings are files of mode 0600
that single commands see as secret mounts, so that no address and no password gets into a layer or its history.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from spec.errors import ConfigError
from tools.image_commands import CALLER_UV_CACHE

GIT_DEADLINE_SECONDS = 60
ALL_CODE = frozenset({"dev"})
"""Images that hold the whole repository; the others hold the packages that are installed."""
_SETTINGS = re.compile(
    r"(PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|DEFAULT_TIMEOUT|RETRIES)"
    r"|UV_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|INDEX_STRATEGY|INDEX_\w+_(USERNAME|PASSWORD)"
    r"|INSECURE_HOST|HTTP_TIMEOUT|HTTP_RETRIES|NATIVE_TLS|SYSTEM_CERTS|KEYRING_PROVIDER|CONCURRENT_\w+)"
    r"|(?i:https?_proxy|no_proxy|all_proxy))"
)
_AUTHORITIES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def image_names(root: Path) -> list[str]:
    """Every folder of cluster_images with a Dockerfile."""
    return sorted(path.parent.name for path in (root / "cluster_images").glob("*/Dockerfile"))


def git(root: Path, *arguments: str) -> str:
    """The answer of git, or ConfigError."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=GIT_DEADLINE_SECONDS
        )
    except FileNotFoundError:
        raise ConfigError("git is not on PATH; an image holds what git tracks", hint="install git") from None
    if done.returncode:
        raise ConfigError(
            f"git {arguments[0]} failed: {done.stderr.strip()}", hint="build in a clone, not in an export"
        )
    return done.stdout


def sources(root: Path, *, name: str) -> dict[str, Path]:
    """Path in the context -> file. What git tracks or would track, without what it ignores."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    packages = _packages(root)
    found: dict[str, Path] = {}
    for line in sorted(filter(None, listed)):
        path = root / line
        if not path.is_file():
            continue
        top = line.split("/", 1)[0]
        if top == "requirements" or line.startswith(("cluster_images/common/", f"cluster_images/{name}/")):
            found[line] = path
        if name in ALL_CODE or top in packages or line in {"pyproject.toml", "README.md", "LICENSE"}:
            found[f"code/{line}"] = path
    return found


def _packages(root: Path) -> set[str]:
    """The packages that an installation holds, as pyproject.toml names them."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())
    include = cast("Sequence[str]", project["tool"]["setuptools"]["packages"]["find"]["include"])
    return {pattern.rstrip("*") for pattern in include}


def digest(files: Mapping[str, Path], *, build_args: Mapping[str, str]) -> str:
    """Of all that decides the image: paths, executable bits, bytes and build arguments; not of times."""
    whole = hashlib.sha256()
    for name, value in sorted(build_args.items()):
        whole.update(f"{name}={value}\0".encode())
    for name, path in sorted(files.items()):
        whole.update(f"{name}\0{int(os.access(path, os.X_OK))}\0".encode())
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def write_context(files: Mapping[str, Path], *, folder: Path) -> None:
    """Copy the files, with one time for all of them: engines compare times, git does not keep them."""
    for name, path in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
        os.utime(target, (0, 0))


def uv_cache(environment: Mapping[str, str]) -> Path | None:
    """Where the caller's uv keeps packages, if it has any."""
    own = environment.get("UV_CACHE_DIR")
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/nonexistent") / ".cache")
    path = Path(own) if own else Path(base) / "uv"
    return path.absolute() if path.is_dir() else None


def write_secrets(environment: Mapping[str, str], *, folder: Path, with_uv_cache: bool) -> dict[str, Path]:
    """The caller's index settings as files: variables, certificate authorities, pip.conf, uv.toml, netrc."""
    home = Path(environment.get("HOME") or "/nonexistent")
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    settings = {name: value for name, value in environment.items() if _SETTINGS.fullmatch(name)}
    given: dict[str, list[str | Path | None]] = {
        "index_ca": [environment.get(name) for name in _AUTHORITIES],
        "pip_conf": [environment.get("PIP_CONFIG_FILE"), config / "pip" / "pip.conf", home / ".pip" / "pip.conf",
                     "/etc/pip.conf"],
        "uv_toml": [environment.get("UV_CONFIG_FILE"), config / "uv" / "uv.toml", "/etc/uv/uv.toml"],
        "netrc": [environment.get("NETRC"), home / ".netrc"],
    }  # fmt: skip
    variables = {"pip_conf": ["PIP_CONFIG_FILE"], "uv_toml": ["UV_CONFIG_FILE"], "netrc": ["NETRC"]}
    variables["index_ca"] = list(_AUTHORITIES)
    secrets: dict[str, Path] = {}
    for name, places in given.items():
        found = next((Path(place) for place in places if place and Path(place).is_file()), None)
        if found is None:
            continue
        secrets[name] = _secret(folder / name, found.read_bytes())
        settings |= dict.fromkeys(variables[name], f"/run/secrets/{name}")
    if with_uv_cache:
        settings["UV_CACHE_DIR"] = CALLER_UV_CACHE
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(settings.items())]
    secrets["index_env"] = _secret(folder / "index_env", "".join(lines).encode())
    return secrets


def _secret(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path
