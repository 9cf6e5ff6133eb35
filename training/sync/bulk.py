"""The bulk port: parts of contributions and the seed come in, weights and published models go out. Raw little-endian
float32.

A body that comes in is: four bytes with the length of a JSON header (little-endian), the header, then exactly the
floats that the header announces. Every size is checked before memory is taken for it; a digest is checked before
anything is believed.
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeVar

import numpy as np
from msgspec import Struct

from training.sync.layout import Floats, count, find_range_problem, gather, view_bytes
from training.sync.messages import PartHeader, PartReceipt, RangesArgs, SeedHeader
from training.sync.refusals import Refusal
from training.sync.wire import JSON_LIMIT, Handler, decode

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 8 << 20
T = TypeVar("T", bound=Struct)


class BulkHandler(Handler):
    """Routes of the bulk port."""

    def handle_path(self, path: list[str], query: dict[str, str]) -> None:
        match (self.command, path):
            case ("PUT", ["part"]):
                self._take_part()
            case ("PUT", ["seed"]):
                self._take_seed()
            case ("POST", ["theta", version]) if version.isdigit():
                self._send_weights(int(version))
            case ("GET", ["models", digest]) if _DIGEST.fullmatch(digest):
                self._send_model(digest)
            case _:
                raise Refusal("unknown_path", f"{self.command} {self.path} is not served on the bulk port")

    def _read_header(self, kind: type[T]) -> T:
        length = int.from_bytes(self.read_exactly(4), "little")
        if length > min(JSON_LIMIT, self.unread):
            raise Refusal(
                "too_large",
                f"the header claims {length} bytes; the body has {self.unread} left, the limit is {JSON_LIMIT}",
            )
        return decode(self.read_exactly(length), kind)

    def _expect(self, elements: int) -> None:
        if self.unread != 4 * elements:
            raise Refusal(
                "bad_request", f"the header announces {4 * elements} bytes of floats, the body has {self.unread}"
            )

    def _take_part(self) -> None:
        header = self._read_header(PartHeader)
        self._expect(2 * count(header.ranges))
        slot = self.desk.reserve_part(header)
        if slot is None:
            self._discard()
            self.reply(PartReceipt(rank=header.rank, sha256=header.sha256))
            return
        received = False
        try:
            self._receive([slot.delta, slot.ema], sha256=header.sha256)
            received = True
        finally:
            self.desk.finish_part(slot, received=received)
        self.reply(PartReceipt(rank=header.rank, sha256=header.sha256))

    def _take_seed(self) -> None:
        header = self._read_header(SeedHeader)
        layout = self.desk.check_seed(header)
        if layout is None:
            self._discard()
            self.reply(None)
            return
        self._expect(layout.total * (2 if header.has_ema else 1))
        theta = np.empty(layout.total, np.float32)
        ema = np.empty(layout.total, np.float32) if header.has_ema else None
        self._receive([theta] if ema is None else [theta, ema], sha256=header.sha256)
        self.desk.seed(header, theta=theta, ema=ema)
        self.reply(None)

    def _receive(self, arrays: list[Floats], *, sha256: str) -> None:
        digest = hashlib.sha256()
        for array in arrays:
            if array.size:
                view = view_bytes(array)
                self.read_into(view)
                digest.update(view)
        if digest.hexdigest() != sha256:
            raise Refusal("damaged", "the floats do not have the digest in their header", hint="send them again")

    def _discard(self) -> None:
        while self.unread > 0:
            self.read_exactly(min(self.unread, 1 << 20))

    def _send_weights(self, version: int) -> None:
        ranges = self.read_json(RangesArgs).ranges
        theta = self.desk.weights(version)
        problem = find_range_problem(ranges, total=len(theta))
        if problem:
            raise Refusal("bad_request", problem)
        self._send(view_bytes(np.ascontiguousarray(gather(theta, ranges), dtype="<f4")))

    def _send(self, data: memoryview) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Gkr-Sha256", hashlib.sha256(data).hexdigest())
        self.end_headers()
        for start in range(0, len(data), _CHUNK):
            self.wfile.write(data[start : start + _CHUNK])

    def _send_model(self, digest: str) -> None:
        try:
            file = self.desk.open_model(digest)
        except FileNotFoundError:
            raise Refusal("unknown_model", f"there is no published model {digest[:12]} here (any more)") from None
        with file:
            size = file.seek(0, 2)
            file.seek(0)
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(size))
            self.send_header("X-Gkr-Sha256", digest)
            self.end_headers()
            while data := file.read(_CHUNK):
                self.wfile.write(data)
