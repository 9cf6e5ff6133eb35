"""What is sent by mistake, by a stranger or by a process of the past: refused with its word, counted, logged once, and
nothing that is durable changes by a bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gkr.sync_keys import write_keys
from spec.sync_keys import SyncKeys, open_connection
from tests.builders.sync_world import DEADLINE, LAYOUT, ROUND_SAMPLES, Server, ToyLearner, ema_of, make_plan
from tests.unit.training.sync.conftest import Join, Serve
from training.sync.chunks import CHUNK_BYTES, CRC_HEADER, UploadState, chunk, crc_of
from training.sync.client import SyncClient
from training.sync.contract import contract_hash
from training.sync.layout import Floats, Layout, view_bytes
from training.sync.members import Rules
from training.sync.messages import Contribution, ErrorReply, PartHeader, PartReceipt, Status, Verdict, encode
from training.sync.transport import SyncRefusedError

BIG = Layout.from_shapes({"w": [3, 1_000_000]})
"""Its parts have three chunks."""


@dataclass
class World:
    """A run of one learner after its first round, and what of it is durable."""

    server: Server
    east: ToyLearner

    @property
    def keys(self) -> SyncKeys:
        keys = self.server.keys_of("east")
        assert keys is not None
        return keys

    @property
    def client(self) -> SyncClient:
        return self.east.clients[0]

    @property
    def generation(self) -> int:
        assert self.east.registration is not None
        return self.east.registration.generation

    def status(self) -> Status:
        return self.client.status()

    def lines(self, word: str) -> int:
        """Lines of the syncer's log and events of the run that say so."""
        return len(re.findall(word, (self.server.folder / "syncer.log").read_text()))

    def durable(self) -> str:
        """Digest of everything on the syncer's disk, with the names of the files."""
        digest = hashlib.sha256()
        for path in sorted((self.server.folder / "sync").rglob("*")):
            digest.update(f"{path}".encode() + (path.read_bytes() if path.is_file() else b""))
        return digest.hexdigest()

    def weights(self) -> tuple[int, str, bytes]:
        """What a verdict that is recorded must leave as it was, too."""
        status = self.status()
        return status.version, status.theta_sha256, self.client.fetch(status.version).tobytes()

    def ask(self, method: str, path: str, body: bytes, *, run: str = "r1", **headers: str) -> tuple[int, bytes]:
        """A request of somebody who has the learner's keys and does as he likes."""
        host, _, port = self.server.bulk.rpartition(":")
        connection = open_connection(host, int(port), timeout_seconds=DEADLINE, keys=self.keys)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/v1/{run}/{path}", body=body, headers={**self.keys.headers, **named})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    def refused(self, method: str, path: str, body: bytes, *, run: str = "r1", **headers: str) -> str:
        status, data = self.ask(method, path, body, run=run, **headers)
        assert status >= 400, data
        return msgspec.json.decode(data, type=ErrorReply).reason

    @contextmanager
    def nothing_changes(self, reason: str, *, times: int = 1, logged: int = 1) -> Generator[None]:
        before, counted = self.durable(), self.status().refusals.get(reason, 0)
        yield
        assert self.durable() == before
        assert self.status().refusals[reason] - counted == times
        assert self.lines(rf"refused .*\({reason}\)") == logged


@pytest.fixture
def world(tmp_path: Path, serve: Serve, learn: Join) -> World:
    plan = make_plan(tmp_path, learners=["east"], target=100 * ROUND_SAMPLES)
    write_keys(tmp_path / "keys", plan=plan)
    server = serve(plan)
    east = learn(server, "east")
    east.join()
    east.round()
    return World(server, east)


def part(world: World, **changes: object) -> bytes:
    """A part as it would be sent next, but for the changes."""
    values = np.ones(LAYOUT.total, np.float32)
    data = values.tobytes() + ema_of(values).tobytes()
    header = PartHeader(
        learner="east",
        generation=world.generation,
        seq=2,
        rank=0,
        fingerprint=LAYOUT.fingerprint,
        ranges=LAYOUT.whole,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
    )
    text = encode(msgspec.structs.replace(header, **changes))
    return len(text).to_bytes(4, "little") + text + data


def contribution(world: World, floats: Floats, *, seq: int = 2, base_version: int = 1) -> Contribution:
    ema = np.ones(LAYOUT.total, np.float32)
    receipt = world.client.put_part(floats, ema=ema, ranges=LAYOUT.whole, generation=world.generation, seq=seq, rank=0)
    return Contribution(
        learner="east", generation=world.generation, seq=seq, base_version=base_version, steps=1,
        samples=ROUND_SAMPLES, cursor=seq * ROUND_SAMPLES, parts=[receipt], fingerprint=LAYOUT.fingerprint,
    )  # fmt: skip


def test_another_experiment(world: World) -> None:
    with world.nothing_changes("unknown_run", times=2):
        assert world.refused("PUT", "part", part(world), run="another") == "unknown_run"
        assert world.refused("PUT", "part", part(world), run="another") == "unknown_run"


def test_another_model(world: World) -> None:
    with world.nothing_changes("layout", times=2):
        assert world.refused("PUT", "part", part(world, fingerprint="0" * 64)) == "layout"
        other = SyncClient(
            world.server.control, bulk=world.server.bulk, run="r1", learner="east", layout=BIG, keys=world.keys
        )
        with pytest.raises(SyncRefusedError, match="another layout"):
            other.register(contract_hash(world.server.plan), world_size=1)
        other.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": "bf16", "bytes": 4 * LAYOUT.total}, "codec"),
        ({"codec": "int8"}, "codec"),
        ({"has_ema": False}, "codec"),
        ({"codec": "fp64"}, "bad_request"),
        ({"bytes": 8 * LAYOUT.total - 1}, "bad_request"),
        ({"bytes": 2**60}, "bad_request"),
        ({"ranges": [(0, 2**60)], "bytes": 2**63}, "bad_request"),
        ({"ranges": [(-1, LAYOUT.total)]}, "bad_request"),
        ({"ranges": [(0, 10), (5, LAYOUT.total - 10)]}, "bad_request"),
        ({"fragment": 1}, "bad_request"),
        ({"fragment": -1}, "bad_request"),
        ({"rank": "x"}, "bad_request"),
        ({"generation": 0}, "fenced"),
        ({"learner": "west"}, "sender"),
    ],
)
def test_a_header_that_is_wrong(world: World, changes: dict[str, object], reason: str) -> None:
    with world.nothing_changes(reason):
        assert world.refused("PUT", "part", part(world, **changes)) == reason


def test_a_body_that_is_cut_short_or_has_a_flipped_bit(world: World) -> None:
    body = part(world)
    with world.nothing_changes("bad_request"):
        assert world.refused("PUT", "part", body[:-9]) == "bad_request"
    with world.nothing_changes("damaged"):
        assert world.refused("PUT", "part", body[:-1] + bytes([body[-1] ^ 4])) == "damaged"
    status, data = world.ask("PUT", "part", body)
    assert (status, msgspec.json.decode(data, type=UploadState).missing) == (200, [])


def test_more_than_the_limit_is_not_read(world: World) -> None:
    with world.nothing_changes("too_large", times=2):
        assert world.refused("PUT", "part", b"", Content_Length=str(2**50)) == "too_large"
        assert world.refused("PUT", "part", (2**31).to_bytes(4, "little") + b"x" * 100) == "too_large"


def test_a_chunk_with_a_flipped_bit_is_sent_again_and_the_others_are_not(tmp_path: Path, serve: Serve) -> None:
    plan = make_plan(tmp_path, learners=["east"])
    write_keys(tmp_path / "keys", plan=plan)
    server = serve(plan)
    client = SyncClient(
        server.control, bulk=server.bulk, run="r1", learner="east", layout=BIG, keys=server.keys_of("east")
    )
    found = client.register(contract_hash(plan), world_size=1)
    values = np.random.default_rng(3).standard_normal(BIG.total).astype(np.float32)
    client.put_seed(values, generation=found.generation, ema=values)
    world = World(server, ToyLearner(plan, "east", server.control, server.bulk, keys=server.keys_of("east")))
    before = world.durable()
    body = [view_bytes(values), view_bytes(values)]
    digest = hashlib.sha256(body[0])
    digest.update(body[1])
    header = PartHeader(
        learner="east", generation=found.generation, seq=1, rank=0, fingerprint=BIG.fingerprint, ranges=BIG.whole,
        sha256=digest.hexdigest(), bytes=8 * BIG.total,
    )  # fmt: skip

    def open_again() -> UploadState:
        status, data = world.ask("POST", "part", encode(header))
        assert status == 200
        return msgspec.json.decode(data, type=UploadState)

    def put(index: int, *, flip: bool = False, crc: str = "") -> tuple[int, bytes]:
        data = bytearray(b"".join(chunk(body, index)))
        data[1000] ^= flip
        crc = crc or crc_of(chunk(body, index))
        return world.ask("PUT", f"chunks/{key}/{index}", bytes(data), **{CRC_HEADER: crc})

    key, missing = (state := open_again()).key, state.missing
    assert missing == [0, 1, 2]
    assert put(1)[0] == 200
    status, reply = put(0, flip=True)
    assert (status, msgspec.json.decode(reply, type=ErrorReply).reason) == (422, "damaged")
    assert open_again() == UploadState(key=key, missing=[0, 2])
    assert put(2)[0] == 200
    assert put(1, flip=True)[0] == 422, "a chunk that is here is looked at, and not written"
    # A chunk whose CRC fits and that is wrong all the same: the digest of the whole finds it, and all comes again.
    data = bytearray(b"".join(chunk(body, 0)))
    data[5] ^= 1
    assert put(0, crc=crc_of([memoryview(data)]))[0] == 422
    assert world.ask("PUT", f"chunks/{key}/0", bytes(data), **{CRC_HEADER: crc_of([memoryview(data)])})[0] == 200
    assert world.refused("POST", "part", encode(header)) == "damaged"
    assert open_again().missing == [0, 1, 2]
    assert world.refused("PUT", f"chunks/{key}/3", b"") == "bad_request"
    assert world.refused("PUT", f"chunks/{key}/2", b"x" * 9) == "bad_request"
    assert world.refused("PUT", f"chunks/{'0' * 32}/0", b"x") == "unknown_upload"
    assert world.refused("PUT", f"chunks/{key}/0", b"x", Content_Length=str(CHUNK_BYTES + 1)) == "too_large"
    for index in range(3):
        assert put(index)[0] == 200
    assert open_again().missing == []
    assert world.durable() == before
    client.close()
    world.east.close()


@pytest.mark.parametrize(("value", "said"), [(np.nan, "not finite"), (np.inf, "not finite"), (1e3, "times the most")])
def test_values_that_would_spoil_the_model(world: World, value: float, said: str) -> None:
    """What is far larger than what has come lately is an accident; there has to be something to compare with."""
    while world.status().version < Rules.norm_minimum:
        world.east.round()
    before, version = world.weights(), world.status().version
    floats = np.full(LAYOUT.total, 0.1, np.float32)
    floats[7] = value
    made = contribution(world, floats, seq=version + 1, base_version=version)
    verdict = world.client.commit(made)
    assert (verdict.kind, said in verdict.reason) == ("invalid", True), verdict
    assert world.status().refusals["invalid"] == 1
    assert world.client.commit(made) == verdict, "asked again it is the same"
    assert world.weights() == before


def test_a_base_from_the_future(world: World) -> None:
    before = world.weights()
    verdict = world.client.commit(contribution(world, np.ones(LAYOUT.total, np.float32), base_version=9))
    assert (verdict.kind, world.weights()) == ("invalid", before)
    assert world.status().refusals["invalid"] == 1


def test_a_replay_is_answered_as_before_and_another_content_under_its_number_is_not_taken(
    world: World, learn: Join
) -> None:
    east = world.east
    east.run()
    made = east.upload()
    first = world.client.commit(made)
    before = world.durable()
    assert isinstance(first, Verdict)
    assert world.client.commit(made) == first
    assert world.durable() == before
    with world.nothing_changes("conflict"), pytest.raises(SyncRefusedError, match=r".") as caught:
        world.client.commit(msgspec.structs.replace(made, parts=[PartReceipt(rank=0, sha256="0" * 64)]))
    assert caught.value.reason == "conflict"
    newer = learn(world.server, "east").clients[0].register(contract_hash(world.server.plan), world_size=1)
    before = world.durable()
    assert newer.generation > world.generation
    east.run()
    with pytest.raises(SyncRefusedError, match="newer process"):
        east.upload()
    assert world.durable() == before
