"""Collectors meet real conditions: a full disk, a read-only folder, a taken port, a corrupt shard, a control group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from spec.shards import Manifest, Sample, Shape, Shard, Splits, pack_shard, seal
from storage import open_bucket
from storage.folder import Folder
from tests.builders.object_store import environment_of, serve_objects
from tests.builders.pictures import encoded, picture
from tests.builders.tar_datasets import Picture, make_tar_dataset
from training.preflight import collect
from training.preflight import verdicts as v

MIB = 2**20
ROOT_ON_LINUX = sys.platform == "linux" and os.geteuid() == 0
Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Generator[Mount]:
    """Mounts small tmpfs file systems; unmounts them at the end."""
    if not ROOT_ON_LINUX:
        pytest.skip("mounting a tmpfs needs root on Linux")
    made: list[Path] = []

    def one(*, options: str) -> Path:
        folder = tmp_path / f"mount-{len(made)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield one
    for folder in made:
        subprocess.run(["umount", str(folder)], timeout=20, check=True)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A tiny dataset of three shards; returns the manifest's path."""
    folder = tmp_path / "data"
    return write_dataset(folder)


def write_dataset(folder: Path, *, shards: int = 3) -> Path:
    folder.mkdir()
    shape, written = Shape(4, 4, 1), list[Shard]()
    for number in range(shards):
        samples = [Sample(id=10 * number + i, label=i, caption="a", pixels=bytes([i]) * 16) for i in range(3)]
        data = pack_shard(samples, shape=shape)
        (folder / f"{number}.shard").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        written.append(Shard(path=f"{number}.shard", samples=3, bytes=len(data), sha256=digest))
    manifest = seal(
        Manifest(
            name="tiny", source="test", recipe="test", image_height=4, image_width=4, image_channels=1,
            labels=["0", "1", "2"], splits=Splits(train=written, test=written[:1]),
        )
    )  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(manifest.write_json())
    return path


def judged(disk: collect.Disk) -> str:
    return v.judge_disk(disk, needed_bytes=MIB).verdict


def test_a_healthy_folder_is_written_and_read_back_and_left_clean(tmp_path: Path) -> None:
    found = collect.disk(tmp_path / "new" / "folder", probe_bytes=3 * MIB + 17)
    assert found.problem == ""
    assert found.free_bytes
    assert found.probe_seconds > 0
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_a_full_disk_fails_and_says_so(mount: Mount) -> None:
    folder = mount(options="size=8m")
    with (folder / "filler").open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * MIB)
    found = collect.disk(folder, probe_bytes=MIB)
    assert found.problem == "No space left on device"
    assert found.free_bytes == 0
    judgement = v.judge_disk(found, needed_bytes=MIB)
    assert judgement.verdict == "FAIL"
    assert str(folder) in judgement.hint
    store = collect.store(Folder(folder))
    assert v.judge_store(store).verdict == "FAIL"
    assert "No space left on device" in v.judge_store(store).evidence
    assert [path.name for path in folder.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_while_writing_fails_and_is_left_clean(mount: Mount) -> None:
    folder = mount(options="size=4m")
    found = collect.disk(folder, probe_bytes=16 * MIB)
    assert found.problem == "No space left on device"
    assert list(folder.iterdir()) == []


def test_a_disk_without_inodes_fails(mount: Mount) -> None:
    folder = mount(options="size=64m,nr_inodes=20")
    for number in range(19):
        (folder / str(number)).touch()
    found = collect.disk(folder, probe_bytes=0)
    assert found.free_inodes == 0
    assert judged(found) == "FAIL"
    assert v.judge_store(collect.store(Folder(folder))).verdict == "FAIL"


def test_a_write_cut_short_by_a_limit_fails(tmp_path: Path) -> None:
    """The way of a user who may not mount: the kernel ends the write at RLIMIT_FSIZE."""
    code = (
        "import resource, sys; from pathlib import Path; from training.preflight import collect;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20));"
        "print(collect.disk(Path(sys.argv[1]), probe_bytes=4 * 2**20).problem)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "File too large"
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_checkpoint_folder_fails_with_a_remedy(mount: Mount) -> None:
    folder = mount(options="size=8m,ro")
    judgement = v.judge_store(collect.store(Folder(folder)))
    assert judgement.verdict == "FAIL"
    assert judgement.value == "write failed"
    assert "Read-only file system" in judgement.evidence
    assert "write access" in judgement.hint
    assert "Read-only file system" in collect.disk(folder, probe_bytes=MIB).problem
    assert v.judge_clock(collect.clock(Folder(folder))).verdict in {
        "PASS",
        "WARN",
        "UNKNOWN",
    }  # the store's check tells it


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any folder")
def test_a_folder_without_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "Permission denied" in v.judge_store(collect.store(Folder(tmp_path))).evidence


def test_a_checkpoint_folder_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert v.judge_store(collect.store(Folder(tmp_path / "file" / "checkpoints"))).verdict == "FAIL"
    assert collect.disk(tmp_path / "file" / "x", probe_bytes=1).problem


def test_a_good_checkpoint_folder_passes_and_is_left_clean(tmp_path: Path) -> None:
    assert v.judge_store(collect.store(Folder(tmp_path / "checkpoints"))).verdict in {"PASS", "WARN"}
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        found = collect.ports((taken, 0), host="127.0.0.1")
    assert found.loopback_ms is not None
    assert [one.problem for one in found.ports] == ["Address already in use", ""]
    assert f"(pid {os.getpid()})" in found.ports[0].holder
    assert v.judge_ports(found).verdict == "FAIL"
    assert collect.ports((taken,), host="127.0.0.1").ports[0].problem == ""  # free again


def test_an_address_that_is_not_ours_cannot_be_bound() -> None:
    found = collect.ports((0,), host="192.0.2.1")
    assert found.ports[0].problem
    assert v.judge_ports(found).verdict == "FAIL"


def test_a_small_dataset_is_verified_whole(dataset: Path) -> None:
    assert collect.dataset(dataset.as_uri(), pick="n").found.endswith("all 4 shards verified")


def test_of_a_large_dataset_nodes_verify_different_shards(dataset: Path) -> None:
    found = {collect.dataset(dataset.as_uri(), pick=f"node-{number}", small_bytes=0).found for number in range(12)}
    assert len(found) == 3
    assert all(text.startswith("tiny ") and text.endswith("verified") for text in found)


def test_a_missing_an_unreadable_and_a_changed_manifest_fail_with_place_and_remedy(dataset: Path) -> None:
    def check(said: str) -> None:
        judgement = v.judge_dataset(collect.dataset(dataset.as_uri(), pick="n"))
        assert judgement.verdict == "FAIL"
        assert str(dataset) in judgement.evidence
        assert said in judgement.evidence
        assert judgement.hint

    document = json.loads(dataset.read_text())
    dataset.write_text(json.dumps(document | {"name": "other"}))
    check("it was changed")
    dataset.write_text("{")
    check("cannot be read")
    dataset.unlink()
    check("does not exist")
    dataset.mkdir()
    check("cannot be read")


def test_a_corrupt_a_short_and_a_missing_shard_fail_with_its_path(dataset: Path) -> None:
    paths = [dataset.parent / f"{number}.shard" for number in range(3)]
    whole = paths[0].read_bytes()

    def check(said: str) -> None:
        problems = [collect.dataset(dataset.as_uri(), pick=f"n{number}").problem for number in range(12)]
        hit = [problem for problem in problems if problem]
        assert hit
        assert all(str(paths[0]) in problem and said in problem for problem in hit)

    paths[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    check("corrupt")
    paths[0].write_bytes(whole[:-1])
    check("the manifest says")
    paths[0].unlink()
    check("does not exist")


def test_shards_of_encoded_images_are_verified_as_files(tmp_path: Path) -> None:
    uri = make_tar_dataset(tmp_path / "pictures", train=[Picture(encoded(picture(one)), 32, 24) for one in range(9)])
    assert collect.dataset(uri, pick="n").found.endswith("all 1 shards verified")
    path = tmp_path / "pictures" / "train-0000.tar"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    problem = collect.dataset(uri, pick="n").problem
    assert f"{path}: the shard is corrupt: {len(data) - 1} bytes" in problem
    path.unlink()
    assert "does not exist" in collect.dataset(uri, pick="n").problem


def test_an_object_store_is_checked_like_a_folder_and_left_clean(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GKR_DATA_CACHE", str(tmp_path / "cache"))
    with serve_objects(tmp_path) as server, environment_of(server):
        bucket = server.open()
        assert v.judge_store(collect.store(bucket)).verdict in {"PASS", "WARN"}
        clock = collect.clock(bucket)
        assert clock.store_offset_ms is not None
        assert abs(clock.store_offset_ms) < 2000
        assert list(bucket.list()) == []
        for path in dataset.parent.iterdir():
            bucket.send(path.name, path)
        uri = f"{bucket.uri}/manifest.json"
        assert v.judge_dataset(collect.dataset(uri, pick="n", small_bytes=0)).verdict == "PASS"
        assert len(list((tmp_path / "cache" / "datasets").glob("*/*.shard"))) == 1, (
            "one shard is verified, one is fetched"
        )
        for number in range(3):
            bucket.put(f"{number}.shard", b"damaged")
        judgement = v.judge_dataset(collect.dataset(uri, pick="n"))
        assert (judgement.verdict, "damaged" in judgement.evidence) == ("FAIL", True)
        stranger = open_bucket(bucket.uri, environment={**server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
        judgement = v.judge_store(collect.store(stranger))
        assert (judgement.verdict, judgement.value) == ("FAIL", "write failed")
        assert "access is refused" in judgement.evidence
        assert "credentials" in judgement.hint


def test_an_address_of_another_store_fails_with_a_remedy() -> None:
    judgement = v.judge_dataset(collect.dataset("ftp://host/manifest.json", pick="n"))
    assert judgement.verdict == "FAIL"
    assert "file:///" in judgement.hint


def test_this_machine_is_measured(tmp_path: Path) -> None:
    memory, limits, clock = collect.memory(), collect.limits(), collect.clock(Folder(tmp_path))
    assert memory.total_bytes
    assert limits.open_files
    assert clock.drift_ms is not None
    assert abs(clock.drift_ms) < 10_000
    if sys.platform == "linux":
        assert memory.available_bytes is not None
        assert memory.available_bytes <= memory.total_bytes
        assert collect.shared_memory().total_bytes


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\nHugePages_Total: 0\n"}


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (MEMINFO, 1000, 600),
        (MEMINFO | {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"}, 1000, 600),
        (
            MEMINFO
            | {
                "sys/fs/cgroup/memory.max": str(400 * 1024),
                "sys/fs/cgroup/memory.current": str(300 * 1024),
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {100 * 1024}\n",
            },
            400,
            200,
        ),
        (
            MEMINFO
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(500 * 1024),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(600 * 1024),
            },
            500,
            0,
        ),
        (MEMINFO | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 1000, 600),
        ({"proc/meminfo": "MemTotal: lots\nMemAvailable: 1000 kB"}, None, 1000),
    ],
)
def test_memory_of_a_container_is_its_limit(
    tmp_path: Path, files: dict[str, str], total: int | None, available: int
) -> None:
    found = collect.memory(root=write(tmp_path, files))
    assert found.available_bytes == available * 1024
    if total is not None:
        assert found.total_bytes == total * 1024


def test_a_container_limits_processes(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/pids.max": "500\n", "sys/fs/cgroup/pids.current": "480\n"})
    assert collect.limits(root=tmp_path).processes == 20
    assert v.judge_limits(collect.limits(root=tmp_path)).verdict == "FAIL"


def test_no_shared_memory_is_unknown(tmp_path: Path) -> None:
    found = collect.shared_memory(folder=tmp_path / "none")
    assert v.judge_shared_memory(found, needed_bytes=0).verdict == "UNKNOWN"
