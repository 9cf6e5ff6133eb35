"""What proves to the learners and the syncer of one run that they belong together: certificates both ways, and a token.

Each process of a run that speaks to the syncer, and the syncer itself, finds a folder with four small files whose path
is in the environment. `gkr` makes them at launch (`gkr.sync_keys`); nothing else holds the keys of a run, and another
run's are of no use here. Standard library only: trainer, services and `gkr` open their connections with it.
"""

from __future__ import annotations

import hmac
import http.client
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from spec.errors import ConfigError

ENVIRONMENT = "GKR_SYNC_KEYS"
"""Variable with the path of the folder."""
SHARED_ENVIRONMENT = "GKR_SHARED_KEYS"
"""Likewise of a folder with the token of the platform's services, and nothing else."""
AUTHORITY, CERTIFICATE, KEY, TOKEN = "ca.crt", "tls.crt", "tls.key", "token"
"""Files in it."""
SERVER_NAME = "syncer.gkr"
"""Name in the syncer's certificate that learners insist on, whatever address they reach it at: addresses change on
their way through gateways, and the run's own authority signs only one syncer."""
_HINT = "`gkr launch` makes them for each run; a syncer or learner started by hand needs that run's folder"


@dataclass(frozen=True, kw_only=True)
class SyncKeys:
    """The keys of one process."""

    folder: Path
    token: str = field(repr=False)

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ, *, variable: str = ENVIRONMENT) -> SyncKeys | None:
        """This process's keys; none where no folder is named."""
        name = environment.get(variable, "")
        return cls.read_folder(Path(name)) if name else None

    @classmethod
    def read_folder(cls, folder: Path) -> SyncKeys:
        """The keys in a folder. Raises ConfigError if they cannot be read."""
        try:
            return cls(folder=folder, token=(folder / TOKEN).read_text().strip())
        except OSError as error:
            text = f"the keys of the run cannot be read: {error.strerror}"
            raise ConfigError(text, where=str(error.filename or folder), hint=_HINT) from error

    @cached_property
    def client_context(self) -> ssl.SSLContext:
        """For those who call the syncer."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def server_context(self) -> ssl.SSLContext:
        """For the syncer: callers must have a certificate of this run."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections are kept open: nothing is resumed
        return context

    @property
    def headers(self) -> dict[str, str]:
        """Sent with every request."""
        return {"Authorization": f"Bearer {self.token}"}

    def knows(self, authorization: str) -> bool:
        """Whether a request's Authorization header has this run's token; takes the same time for every wrong one."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.folder / AUTHORITY)
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        except OSError as error:  # ssl.SSLError is one
            text = f"the keys of the run are not usable: {error.strerror or error}"
            raise ConfigError(text, where=str(error.filename or self.folder), hint=_HINT) from error
        return context


def open_connection(
    host: str, port: int, *, timeout_seconds: float, keys: SyncKeys | None
) -> http.client.HTTPConnection:
    """A connection to the syncer, made; through TLS where there are keys. Straight to the host, past any proxy."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    connection.connect()
    if keys is not None:
        try:
            connection.sock = keys.client_context.wrap_socket(connection.sock, server_hostname=SERVER_NAME)
        except BaseException:
            connection.close()
            raise
    return connection
