"""Encryption keys of our own: one for what the stacks keep secret, one for buckets in the keys' location.

A key ring can never be deleted and a key's versions only be destroyed, with everything they encrypt: whatever the
configuration says, neither goes with a stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import kms

from infra.components.base import options
from infra.components.gcp.storage import Key
from spec.stack_global import Keys as Config

SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class KeysArgs:
    """Keys of an environment."""

    project: str
    storage: pulumi.Input[str]
    """Member that is the storage service's own account, which must exist already."""
    keys: Config
    labels: dict[str, str]


class Keys(pulumi.ComponentResource):
    """Declares them."""

    def __init__(self, name: str, args: KeysArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:Keys", name, None, opts)
        self._ring = kms.KeyRing(
            args.keys.ring,
            name=args.keys.ring,
            project=args.project,
            location=args.keys.location,
            opts=options(self, kind="key"),
        )
        secrets, data = self._key(args, "secrets"), self._key(args, "data")
        agent = kms.CryptoKeyIAMMember(
            "data-storage",
            crypto_key_id=data.id,
            role="roles/cloudkms.cryptoKeyEncrypterDecrypter",
            member=args.storage,
            opts=options(self),
        )
        self.data = Key(location=args.keys.location, id=data.id, ready=agent)
        self.secrets = secrets.id
        self.register_outputs({"secrets": self.secrets})

    def _key(self, args: KeysArgs, name: str) -> kms.CryptoKey:
        return kms.CryptoKey(
            name,
            name=name,
            key_ring=self._ring.id,
            purpose="ENCRYPT_DECRYPT",
            rotation_period=f"{args.keys.rotate_days * SECONDS_OF_A_DAY}s",
            labels=args.labels,
            opts=options(self, kind="key"),
        )
