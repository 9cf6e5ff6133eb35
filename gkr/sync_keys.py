"""Makes the keys by which the learners and the syncer of one run know each other.

A small authority of its own for each run signs one certificate for the syncer and one for each learner, which bears the
learner's name; beside them a random token. Promises: the authority's private key is never written anywhere, so nothing
can be signed later; the other private keys are in the returned files only. Elliptic curves: a run's keys take
milliseconds.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gkr.local.states import SYNCER
from spec.plan import Plan
from spec.sync_keys import AUTHORITY, CERTIFICATE, KEY, SERVER_NAME, TOKEN

Files = dict[str, bytes]
"""Content by file name."""
VALID_SECONDS = 60 * 86_400
"""Longest life of a run's keys. A run that is resumed gets new ones."""
_CLOCK_SKEW = timedelta(minutes=5)


class _Authority:
    """Signs, then is forgotten."""

    def __init__(self, run: str, *, valid_seconds: float) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gkr {run}"[:64])])
        self._begin = datetime.now(UTC) - _CLOCK_SKEW
        self._end = self._begin + _CLOCK_SKEW + timedelta(seconds=valid_seconds)
        certificate = (
            self._start(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, name: str, *, alternatives: Sequence[x509.GeneralName], purposes: Sequence[x509.ObjectIdentifier]
    ) -> Files:
        """A certificate and its private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            self._start(subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {CERTIFICATE: certificate.public_bytes(serialization.Encoding.PEM), KEY: private}

    def _start(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def make_keys(
    run: str, *, learners: Sequence[str], addresses: Sequence[str] = (), valid_seconds: float = VALID_SECONDS
) -> dict[str, Files]:
    """The files of each learner by name, and of the syncer under SYNCER, which no learner is called.

    `addresses`: names and addresses at which the syncer is reached; tools that check them find them in its certificate.
    """
    authority = _Authority(run, valid_seconds=valid_seconds)
    common = {AUTHORITY: authority.certificate, TOKEN: secrets.token_hex(32).encode()}
    names = [_general(one) for one in dict.fromkeys([SERVER_NAME, *addresses])]
    # The syncer's pod also asks itself: `gkr sync` starts `training.sync.ask` there. The name is no learner's, so these
    # keys speak for none.
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    found = {SYNCER: authority.issue(SYNCER, alternatives=names, purposes=both)}
    for learner in learners:
        found[learner] = authority.issue(learner, alternatives=[], purposes=[ExtendedKeyUsageOID.CLIENT_AUTH])
    return {name: {**common, **files} for name, files in found.items()}


def keys_of_plan(plan: Plan) -> dict[str, Files]:
    """`make_keys` for a plan; empty if it needs none, and none for a syncer that it does not have."""
    if not plan.has_keys:
        return {}
    hosts = {one.syncer_control.rpartition(":")[0] for one in plan.learners}
    hosts |= {plan.syncer.outer_host} if plan.syncer is not None else set()
    if plan.backend == "local":
        hosts |= {"127.0.0.1", "localhost"}
    timeouts = plan.timeouts
    seconds = min(VALID_SECONDS, timeouts.queue + timeouts.start + timeouts.run)
    found = make_keys(
        plan.run,
        learners=[one.name for one in plan.learners],
        addresses=sorted(one for one in hosts if one),
        valid_seconds=seconds,
    )
    return {owner: files for owner, files in found.items() if owner != SYNCER or plan.syncer is not None}


def write_keys(folder: Path, *, plan: Plan) -> None:
    """Make a plan's keys anew, for this user's eyes only: a folder for each learner, and one for SYNCER."""
    for owner, files in keys_of_plan(plan).items():
        own = folder / owner
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            path = own / name
            path.unlink(missing_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(content)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
