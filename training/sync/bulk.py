"""The bulk port: parts of contributions and the seed come in, weights and published models go out. Raw little-endian.

A body of up to one chunk comes in one request: four bytes with the length of a JSON header (little-endian), the header,
then exactly the bytes that the header announces. A larger one is opened with its header alone; the answer names the
chunks that are missing, each is put by itself, and opening again says what is still missing, or that nothing is. So a
sender goes on after a cut, whatever was cut. Every size is checked before memory is taken for it; a digest is checked
before anything is believed. Weights go out in the ranges that are asked for, each answer with its digest.
"""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np

from training.sync.chunks import CHUNK_BYTES, CRC_HEADER, PIECE_BYTES, Upload, UploadState, upload_key
from training.sync.layout import find_range_problem, gather, shift, view_bytes
from training.sync.messages import PartHeader, RangesArgs, SeedHeader
from training.sync.refusals import Refusal
from training.sync.staging import Slot
from training.sync.wire import JSON_LIMIT, Handler, read_counts

_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")
_READ_BYTES = 256 << 10
_Header = type[PartHeader] | type[SeedHeader]


class BulkHandler(Handler):
    """Routes of the bulk port."""

    def handle_path(self, path: list[str], query: dict[str, str]) -> None:
        match (self.command, path):
            case ("PUT", ["part"]):
                self._take(PartHeader)
            case ("POST", ["part"]):
                self._open(PartHeader)
            case ("PUT", ["seed"]):
                self._take(SeedHeader)
            case ("POST", ["seed"]):
                self._open(SeedHeader)
            case ("PUT", ["chunks", key, *numbers]) if len(found := read_counts(numbers)) == 1:
                self._take_chunk(key, found[0])
            case ("POST", ["theta", *numbers]) if len(found := read_counts(numbers)) == 2:
                self._send_weights(*found)
            case ("GET", ["models", digest]) if _DIGEST.fullmatch(digest):
                self._send_model(digest)
            case _:
                raise Refusal("unknown_path", f"{self.command} {self.path} is not served on the bulk port")

    # --- in

    def _open(self, kind: _Header) -> None:
        header = self.read_json(kind)
        slot = self._reserve(header)
        self.reply(UploadState(key=upload_key(header), missing=[]) if slot is None else self._complete(slot))

    def _take(self, kind: _Header) -> None:
        self.body_length(limit=CHUNK_BYTES + JSON_LIMIT)
        length = int.from_bytes(self.read_exactly(4), "little")
        if length > min(JSON_LIMIT, self.unread):
            raise Refusal(
                "too_large",
                f"the header claims {length} bytes; the body has {self.unread} left, the limit is {JSON_LIMIT}",
            )
        header = self.decode(self.read_exactly(length), kind)
        slot = self._reserve(header)
        if slot is None:
            self._discard()
            self.reply(UploadState(key=upload_key(header), missing=[]))
            return
        size = len(slot.upload.data)
        if self.unread != size:
            raise Refusal("bad_request", f"the header announces {size} bytes, the body has {self.unread}")
        if size > CHUNK_BYTES:
            raise Refusal("too_large", f"a body of {size} bytes comes in chunks of {CHUNK_BYTES}")
        if size:
            self._receive(slot.upload, 0)
        self.reply(self._complete(slot))

    def _take_chunk(self, key: str, index: int) -> None:
        slot = self.desk.find_upload(key)
        if slot is None:
            raise Refusal("unknown_upload", "no body is on its way under this key", hint="open it again")
        self.check_sender(slot.header.learner)
        upload = slot.upload
        if index >= upload.count:
            raise Refusal("bad_request", f"the body has {upload.count} chunks, there is no number {index}")
        length = self.body_length(limit=CHUNK_BYTES)
        if length != upload.length(index):
            raise Refusal("bad_request", f"chunk {index} has {upload.length(index)} bytes, not {length}")
        self._receive(upload, index, crc=self.headers.get(CRC_HEADER, ""))
        self.reply(None)

    def _reserve(self, header: PartHeader | SeedHeader) -> Slot | None:
        return self.desk.reserve_seed(header) if isinstance(header, SeedHeader) else self.desk.reserve_part(header)

    def _receive(self, upload: Upload, index: int, *, crc: str | None = None) -> None:
        """One chunk. Without a CRC it is the whole body, whose digest says all."""
        piece = memoryview(bytearray(min(_READ_BYTES, self.unread)))
        offset, value = 0, 0
        while self.unread:
            view = piece[: min(len(piece), self.unread)]
            self.read_into(view)
            if crc is not None:
                value = zlib.crc32(view, value)
            upload.write(index, offset=offset, piece=view)
            offset += len(view)
        if crc is not None and crc != f"{value:08x}":
            raise Refusal("damaged", f"chunk {index} does not have the CRC it was sent with", hint="send it again")
        upload.receive(index)

    def _complete(self, slot: Slot) -> UploadState:
        missing = slot.upload.missing()
        if not missing:
            if not slot.upload.verify():
                raise Refusal("damaged", "the body does not have the digest in its header", hint="send it again")
            if isinstance(slot.header, SeedHeader):
                self.desk.finish_seed(slot)
            else:
                self.desk.finish_part(slot)
        return UploadState(key=slot.key, missing=missing)

    def _discard(self) -> None:
        while self.unread > 0:
            self.read_exactly(min(self.unread, _READ_BYTES))

    # --- out

    def _send_weights(self, fragment: int, version: int) -> None:
        asked = self.read_json(RangesArgs)
        ranges = asked.ranges
        theta, first = self.desk.weights(version, fragment=fragment, learner=asked.learner or "")
        problem = find_range_problem(ranges, total=len(theta), first=first)
        if problem:
            raise Refusal("bad_request", problem)
        data = view_bytes(np.ascontiguousarray(gather(theta, shift(ranges, -first)), dtype="<f4"))
        self._begin(200, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for start in range(0, len(data), PIECE_BYTES):
            self.wfile.write(data[start : start + PIECE_BYTES])
        self.desk.sent(asked.learner or "", len(data))

    def _send_model(self, digest: str) -> None:
        """The file, or what is left of it from `Range: bytes=N-` on."""
        try:
            file = self.desk.open_model(digest)
        except FileNotFoundError:
            raise Refusal("unknown_model", f"there is no published model {digest[:12]} here (any more)") from None
        with file:
            size = file.seek(0, 2)
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            if start > size:
                raise Refusal("bad_request", f"the model has {size} bytes, there is nothing from {start} on")
            file.seek(start)
            self._begin(206 if asked else 200, size=size - start, sha256=digest)
            while data := file.read(PIECE_BYTES):
                self.wfile.write(data)

    def _begin(self, status: int, *, size: int, sha256: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size))
        self.send_header("X-Gkr-Sha256", sha256)
        self.end_headers()
