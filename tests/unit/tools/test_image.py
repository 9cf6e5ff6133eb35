"""The images' files keep their promises, and both engines get the command line they need."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from spec.errors import ConfigError, GkrError
from tools import image, image_base, image_context
from tools.image_commands import (
    Build,
    build_command,
    push_commands,
    push_target,
    pushed_digest,
    read_inspection,
    smoke_commands,
    tag_of,
)
from tools.streaming import stream

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "cluster_images"
NAMES = image_context.image_names(ROOT)
LOCKS = {"trainer": ["uv", "training"], "services": ["uv", "training", "services"],
         "dev": ["uv", "training", "services", "all"]}  # fmt: skip


def instructions(name: str) -> list[str]:
    """Instructions of a Dockerfile, continued lines joined, without comments."""
    lines = [line for line in (IMAGES / name / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]


def arguments(name: str, instruction: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in instructions(name) if line.startswith(f"{instruction} ")]


def test_the_three_images_are_there() -> None:
    assert NAMES == ["dev", "services", "trainer"]
    for name in NAMES:
        assert (IMAGES / name / "smoke_test.py").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_base_is_pinned_by_tag_and_digest(name: str) -> None:
    bases = [value for value in arguments(name, "ARG") if value.startswith("BASE=")]
    assert len(bases) == 1
    assert re.fullmatch(r"BASE=[a-z0-9./-]+:[A-Za-z0-9_.-]+@sha256:[0-9a-f]{64}", bases[0])
    stages: set[str] = set()
    for value in arguments(name, "FROM"):
        source, _, stage = value.partition(" AS ")
        assert source == "${BASE}" or source in stages, f"{name}: FROM {value} is neither the base nor a stage"
        stages.add(stage)
    assert len(stages) >= 3
    assert ":latest" not in (IMAGES / name / "Dockerfile").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_debian_packages_have_exact_versions(name: str) -> None:
    runs = [line for line in arguments(name, "RUN") if "install.sh" in line]
    assert runs
    for line in runs:
        packages = line.split("install.sh", 1)[1].split()
        assert packages
        for package in packages:
            assert re.fullmatch(r"[a-z0-9+.-]+=(\d+:)?\d[A-Za-z0-9+.~-]*", package), f"{name}: {package}"
    direct = [line for line in arguments(name, "RUN") if re.search(r"\b(apt|apt-get|curl|wget|pip|npm)\s", line)]
    assert not direct, f"{name}: installs around the pins: {direct}"


@pytest.mark.parametrize("name", NAMES)
def test_python_packages_come_from_hash_locks(name: str) -> None:
    copied = [match for value in arguments(name, "COPY") for match in re.findall(r"requirements/([a-z]+)\.txt", value)]
    assert copied == LOCKS[name]
    installs = [line for line in (IMAGES / "common" / "packages.sh").read_text().splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line for line in installs)
    assert "--no-deps" in (IMAGES / "common" / "code.sh").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_runs_as_a_numbered_user_that_is_not_root(name: str) -> None:
    """Numbered, because Kubernetes can hold only a number to runAsNonRoot."""
    final = instructions(name)
    final = final[max(place for place, line in enumerate(final) if line.startswith("FROM ")) :]
    users = [line.split()[1] for line in final if line.startswith("USER ")]
    assert users
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_secret_and_no_address_is_written_down(name: str) -> None:
    for path in [*(IMAGES / name).iterdir(), *(IMAGES / "common").iterdir()]:
        if not path.is_file():
            continue
        text = path.read_text()
        assert not re.search(r"https?://(?!127\.0\.0\.1)", text), path
        assert not re.search(r"(?i)(password|token|api_key|secret)\s*=\s*['\"]?\w", text), path
    declared = " ".join([*arguments(name, "ARG"), *arguments(name, "ENV")])
    assert not re.search(r"PIP_|UV_|PROXY|INDEX", declared, re.IGNORECASE), f"{name}: would be kept in the history"


def test_images_share_every_instruction_up_to_the_mark() -> None:
    """Equal instructions are one layer on the builder and one download on a node."""
    heads = set[str]()
    for name in NAMES:
        text = (IMAGES / name / "Dockerfile").read_text()
        head, mark, _ = text.partition(f"# From here on: {name}.\n")
        assert mark
        heads.add(head.partition("# Debian 12")[2])
    assert len(heads) == 1
    assert "training.txt" in heads.pop()


@pytest.mark.parametrize("name", NAMES)
def test_a_change_of_code_rebuilds_the_last_layer_only(name: str) -> None:
    lines = instructions(name)
    last = [line for line in lines if line.startswith(("RUN ", "COPY ", "ADD "))][-1]
    assert last == "COPY --from=code /opt/gkr/code /opt/gkr/code"
    first = next(place for place, line in enumerate(lines) if re.match(r"COPY code ", line))
    assert any(line.endswith(" AS code") for line in lines[:first]), "the code enters in a stage that is not kept"
    assert not [line for line in lines[:first] if line.startswith("COPY . ")]


def make(**changes: object) -> Build:
    values: dict[str, object] = {
        "name": "trainer",
        "context": Path("/c"),
        "tags": ("localhost/gkr/trainer:1",),
        "build_args": {"BASE": "localhost/base:1", "PINS": "minimum"},
        "secrets": {"index_env": Path("/s/index_env")},
        "labels": {"a": "b"},
        "uv_cache": Path("/cache/uv"),
        **changes,
    }
    return Build(**values)  # pyright: ignore[reportArgumentType]


def test_build_command_of_buildah() -> None:
    assert build_command(make(), engine="buildah", id_file=Path("/id")) == [
        "buildah", "build", "--layers", "--network", "host",
        "--file", "/c/cluster_images/trainer/Dockerfile", "--iidfile", "/id",
        "--build-arg", "BASE=localhost/base:1", "--build-arg", "PINS=minimum",
        "--secret", "id=index_env,src=/s/index_env", "--label", "a=b",
        "--volume", "/cache/uv:/var/cache/caller-uv", "--tag", "localhost/gkr/trainer:1", "/c",
    ]  # fmt: skip


def test_build_command_of_docker_has_no_volume_because_docker_has_none_for_builds() -> None:
    command = build_command(make(), engine="docker", id_file=Path("/id"))
    assert command[:2] == ["docker", "build"]
    assert "--volume" not in command
    assert command[command.index("--secret") + 1] == "id=index_env,src=/s/index_env"
    assert command[-1] == "/c"


def test_the_smoke_test_runs_without_a_network_on_both_engines() -> None:
    docker, _ = smoke_commands("r:1", engine="docker", container="c")
    assert docker == [
        ["docker", "run", "--rm", "--name", "c", "--network", "none", "--shm-size", "1g", "r:1",
         "python", "/opt/gkr/smoke/smoke_test.py"],
    ]  # fmt: skip
    buildah, clean = smoke_commands("r:1", engine="buildah", container="c")
    assert buildah[0][:2] == ["buildah", "from"]
    assert buildah[1][:5] == ["buildah", "run", "--network", "none", "c"]
    assert clean == ["buildah", "rm", "c"]


@pytest.mark.parametrize(
    ("target", "plain"),
    [("localhost:5000/gkr/a:1", True), ("127.0.0.1:5000/gkr/a:1", True), ("localhost.example/gkr/a:1", False),
     ("registry.example/gkr/a:1", False)],
)  # fmt: skip
def test_only_a_registry_on_the_loopback_is_spoken_to_without_tls(target: str, *, plain: bool) -> None:
    [command] = push_commands("r:1", target, engine="buildah", digest_file=Path("/d"))
    assert ("--tls-verify=false" in command) == plain
    assert command[-2:] == ["r:1", f"docker://{target}"]


def test_push_target() -> None:
    assert push_target("europe.example/p/gkr/", name="trainer", tag="v1") == "europe.example/p/gkr/trainer:v1"
    assert push_target("localhost:5000/gkr", name="dev", tag="v1") == "localhost:5000/gkr/dev:v1"


@pytest.mark.parametrize("where", ["registry", "https://registry.example/x", "r.example/X", "r.example/x:tag",
                                   "r.example/x@sha256:00", "r.example/ x"])  # fmt: skip
def test_push_target_refuses_what_is_no_place(where: str) -> None:
    with pytest.raises(ConfigError, match="registry/path"):
        push_target(where, name="trainer", tag="v1")


@pytest.mark.parametrize(
    ("description", "tag"),
    [("v1.2-3-gabc", "v1.2-3-gabc"), ("release/1.0+x-dirty", "release-1.0-x-dirty"), ("..a", "a"), ("", "unknown")],
)
def test_tag_of(description: str, tag: str) -> None:
    assert tag_of(description) == tag


def test_inspections() -> None:
    buildah = '[{"id": "ab12", "names": ["x"], "digest": "sha256:aa", "size": "5.96 GB"}]'
    found = read_inspection(buildah, engine="buildah")
    assert (found.id, found.digest, found.size_bytes) == ("ab12", "sha256:aa", 5_960_000_000)
    row = {
        "Id": "sha256:ab12",
        "Size": 7,
        "RepoDigests": ["r.example/x/trainer@sha256:bb", "localhost:5000/t@sha256:cc"],
    }
    docker = json.dumps([row])
    assert read_inspection(docker, engine="docker").id == "ab12"
    assert read_inspection('[{"Id": "sha256:ab12", "Size": 7, "RepoDigests": null}]', engine="docker").digest == ""
    assert pushed_digest(docker, target="localhost:5000/t:v1") == "sha256:cc"
    with pytest.raises(ConfigError, match="no digest"):
        pushed_digest(docker, target="r.example/y/trainer:v1")


def test_apt_sources_are_those_of_our_suite_once() -> None:
    targets = "u:/d/ bookworm main\nu:/d/ bookworm main\nu:/s/ bookworm-security main\nu:/t/ trixie main\n"
    assert image_base.apt_sources(targets) == "deb u:/d/ bookworm main\ndeb u:/s/ bookworm-security main\n"


def test_context_has_what_the_image_needs_and_nothing_that_git_ignores() -> None:
    trainer = image_context.sources(ROOT, name="trainer")
    assert {"requirements/training.txt", "cluster_images/common/checks.py", "cluster_images/trainer/Dockerfile",
            "code/pyproject.toml", "code/training/rank.py", "code/recipes/digits.yaml"} <= trainer.keys()  # fmt: skip
    assert not [name for name in trainer if name.startswith(("code/tests/", "cluster_images/dev/", ".venv", "code/."))]
    dev = image_context.sources(ROOT, name="dev")
    assert {"code/Makefile", "code/tests/unit/tools/test_image.py"} <= dev.keys()
    assert not [name for name in dev if "__pycache__" in name or ".venv/" in name or name.startswith("code/.git/")]


def test_everything_that_dockerfiles_copy_is_in_the_context() -> None:
    for name in NAMES:
        files = image_context.sources(ROOT, name=name)
        for value in arguments(name, "COPY"):
            words = [word for word in value.split() if not word.startswith("--")]
            if "--from=" in value:
                continue
            for source in words[:-1]:
                assert source in files or any(one.startswith(f"{source}/") for one in files), f"{name}: {source}"


def test_content_digest_depends_on_bytes_and_names_and_arguments_not_on_times(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("x")
    two.write_text("x")
    first = image_context.digest({"a": one}, build_args={})
    assert image_context.digest({"a": two}, build_args={}) == first
    assert image_context.digest({"b": one}, build_args={}) != first
    assert image_context.digest({"a": one}, build_args={"BASE": "other"}) != first
    two.write_text("y")
    assert image_context.digest({"a": two}, build_args={}) != first


def test_settings_of_the_caller_become_secret_files(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config" / "uv").mkdir(parents=True)
    (home / ".config" / "uv" / "uv.toml").write_text("offline = false\n")
    (home / ".netrc").write_text("machine m login l password p\n")
    authorities = tmp_path / "ca.crt"
    authorities.write_text("certificates")
    environment = {
        "HOME": str(home), "PATH": "/bin", "SSL_CERT_FILE": str(authorities), "HF_TOKEN": "t",
        "PIP_INDEX_URL": "i:/a b'c", "UV_INDEX_OWN_PASSWORD": "p", "https_proxy": "p:1",
        "PIP_FIND_LINKS": "/only/here", "UV_CACHE_DIR": "/only/here",
    }  # fmt: skip
    folder = tmp_path / "secrets"
    folder.mkdir()
    secrets = image_context.write_secrets(environment, folder=folder, with_uv_cache=True)
    assert {"index_env", "index_ca", "uv_toml", "netrc"} <= secrets.keys()
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets.values())
    assert secrets["index_ca"].read_text() == "certificates"
    shown = subprocess.run(
        ["bash", "-c", f". {secrets['index_env']} && env -0"],
        env={},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    got = dict(pair.split("=", 1) for pair in shown.stdout.split("\0") if pair)
    assert got["PIP_INDEX_URL"] == "i:/a b'c"
    assert got["UV_INDEX_OWN_PASSWORD"] == "p"
    assert got["https_proxy"] == "p:1"
    assert got["SSL_CERT_FILE"] == got["PIP_CERT"] == "/run/secrets/index_ca"
    assert got["UV_CONFIG_FILE"] == "/run/secrets/uv_toml"
    assert got["UV_CACHE_DIR"] == "/var/cache/caller-uv"
    assert not {"PIP_FIND_LINKS", "HF_TOKEN", "HOME"} & got.keys()


def test_every_secret_that_the_tool_gives_is_mounted_somewhere(tmp_path: Path) -> None:
    """A secret that no command mounts would be a setting that is silently ignored."""
    environment = {name: str(Path(__file__)) for name in ("PIP_CERT", "PIP_CONFIG_FILE", "UV_CONFIG_FILE", "NETRC")}
    secrets = image_context.write_secrets(environment, folder=tmp_path, with_uv_cache=False)
    for name in NAMES:
        mounted = set(re.findall(r"type=secret,id=(\w+)", (IMAGES / name / "Dockerfile").read_text()))
        assert mounted == {*secrets, "apt_sources"}


FABRIC_PROFILES = {
    "a3-mega": (
        "nvidia/lib64/nccl-env-profile.sh",
        'export NCCL_NET=FasTrak LD_LIBRARY_PATH="$NCCL_LIB_DIR:$LD_LIBRARY_PATH"',
    ),
    "a3-ultra": ("gib/scripts/set_nccl_env.sh", "export NCCL_IB_QPS_PER_CONNECTION=4"),
}


def shell_environment(tmp_path: Path, *, login: bool = False, given: dict[str, str] | None = None) -> dict[str, str]:
    """What `bash -c env` prints in the image, with /usr/local elsewhere."""
    script = tmp_path / "environment.sh"
    text = (IMAGES / "common" / "environment.sh").read_text()
    assert "/usr/local/" in text
    script.write_text(text.replace("/usr/local/", f"{tmp_path}/"))
    environment = {"BASH_ENV": str(script), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **(given or {})}
    flags = "-lc" if login else "-c"
    done = subprocess.run(
        ["/bin/bash", flags, "--", "env -0"], env=environment, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)


@pytest.mark.parametrize("login", [False, True])
def test_a_shell_without_fabric_gets_the_path_only(tmp_path: Path, *, login: bool) -> None:
    got = shell_environment(tmp_path, login=login)
    assert got["PATH"].startswith("/opt/gkr/code/bin:/opt/gkr/venv/bin:")
    assert not [name for name in got if name.startswith(("NCCL", "GKR_", "GLOO"))]


@pytest.mark.parametrize("kind", sorted(FABRIC_PROFILES))
def test_a_shell_reads_the_profile_of_the_mounted_plugin(tmp_path: Path, kind: str) -> None:
    name, content = FABRIC_PROFILES[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{content}\necho noise\n")
    got = shell_environment(tmp_path, given={"LD_LIBRARY_PATH": "/own"})
    assert got["GKR_FABRIC"] == kind
    assert got["GLOO_SOCKET_IFNAME"] == got["NCCL_SOCKET_IFNAME"] == "eth0"
    assert f"{tmp_path}/nvidia/lib64" in got["LD_LIBRARY_PATH"].split(":")
    if kind == "a3-ultra":
        assert got["NCCL_NET"] == "gIB"
        assert got["NCCL_IB_QPS_PER_CONNECTION"] == "4"
    else:
        assert got["NCCL_NET"] == "FasTrak"
        assert got["NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY"] == "/dev/aperture_devices"
    path.write_text("exit 3\n")
    again = shell_environment(tmp_path, given={"GKR_FABRIC": kind, "NCCL_NET": "kept", "PATH": got["PATH"]})
    assert again["NCCL_NET"] == "kept", "a child's shell leaves alone what its parent has set"
    assert again["PATH"] == got["PATH"]


def test_dry_run_prints_commands_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trainer", "--engine", "buildah", "--base", "registry.example/base:1", "--dry-run"]
    assert image.main([*arguments, "--push", "registry.example/p/gkr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("buildah build ")
    assert "--build-arg BASE=registry.example/base:1 --build-arg PINS=minimum" in lines[0]
    assert lines[-1].startswith("buildah push ")
    assert "docker://registry.example/p/gkr/trainer:" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(["nope"], 102, "dev, services, trainer"), (["dev", "--push", "x/y", "--no-smoke-test"], 3, "nobody has run"),
     (["dev", "--push", "x"], 3, "registry/path"), (["dev", "--engine", "docker", "--base", "local"], 3, "buildah"),
     (["dev", "--engine", "buildah", "--apt-sources", "/nonexistent"], 3, "no such file")],
)  # fmt: skip
def test_refusals_name_the_remedy(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert image.main(arguments) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="neither a docker engine"):
        image.choose_engine()


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "pid"
    with pytest.raises(GkrError, match="was ended"):
        stream(["bash", "-c", f"sleep 60 & echo $! > {alive}; wait"], deadline_seconds=2)
    stat = Path(f"/proc/{alive.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in {"Z", "X"}


def test_the_last_lines_of_both_streams_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    ended = stream(["bash", "-c", "echo out; echo err >&2; exit 7"], deadline_seconds=30)
    assert (ended.code, ended.tail) == (7, "out\nerr")
    assert capfd.readouterr().out == ""
