"""A way into one cluster: a lightkube client for exactly the context that was recorded, and the few requests we make.

Promises: the context is the recorded one, whatever the current one is; every request has a deadline; every answer that
a person can mend is a GkrError (`gkr.cluster.errors`). Objects are plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gkr.cluster.errors import translate
from gkr.cluster.kinds import KINDS, instance, resource
from gkr.cluster.registry import ClusterEntry
from spec.errors import NotFoundError

if TYPE_CHECKING:
    from lightkube import Client
    from lightkube.config.kubeconfig import SingleConfig

    from gkr.cluster.kubeconfig import Context

FIELD_MANAGER = "gkr"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 20.0
_PAGE = 500


@dataclass(frozen=True)
class Connection:
    """One cluster and the namespace where nothing else is said."""

    client: Client
    name: str
    namespace: str
    context: str
    kubeconfig: str
    server: str

    def translate(self, doing: str = "") -> AbstractContextManager[None]:
        """For requests made with `client` directly."""
        return translate(self.name, server=self.server, doing=doing)

    def get(self, kind: str, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        """The object; NotFoundError if there is none."""
        with self.translate(f"read {kind} {name}"):
            return self._client.get(resource(kind), name, **self._place(kind, namespace))

    def find(self, kind: str, name: str, *, namespace: str | None = None) -> dict[str, Any] | None:
        """The object, or none."""
        try:
            return self.get(kind, name, namespace=namespace)
        except NotFoundError:
            return None

    def list(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]]:
        """All objects of a kind in a namespace (`kinds.ALL`: in every one). A label without a value must exist."""
        with self.translate(f"list {kind} objects"):
            return list(
                self._client.list(
                    resource(kind),
                    chunk_size=_PAGE,
                    labels=dict(labels) if labels else None,
                    fields=dict(fields) if fields else None,
                    **self._place(kind, namespace),
                )
            )

    def watch(
        self,
        kind: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        resource_version: str | None = None,
        seconds: int = 60,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Changes as (ADDED, MODIFIED, DELETED; object). It goes on for as long as the caller reads."""
        with self.translate(f"watch {kind} objects"):
            yield from self._client.watch(
                resource(kind),
                labels=dict(labels) if labels else None,
                resource_version=resource_version,
                server_timeout=seconds,
                **self._place(kind, namespace),
            )

    def apply(self, obj: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Server-side apply as field manager `gkr`; what others own of it is not taken from them."""
        with self.translate(f"create {label_of(obj)}"):
            return self._client.apply(
                instance(dict(obj)),
                obj["metadata"]["name"],
                field_manager=FIELD_MANAGER,
                dry_run=dry_run,
                **self._place(obj["kind"], obj["metadata"].get("namespace")),
            )

    def create(self, obj: Mapping[str, Any]) -> dict[str, Any]:
        """Create it; ConflictError if it is there. Also for reviews, which have no name."""
        with self.translate(f"create {label_of(obj)}"):
            place = self._place(obj["kind"], obj.get("metadata", {}).get("namespace"))
            return self._client.create(instance({"metadata": {}, **obj}), **place)

    def patch(self, kind: str, name: str, change: Mapping[str, Any], *, namespace: str | None = None) -> dict[str, Any]:
        """A merge patch."""
        from lightkube.types import PatchType

        with self.translate(f"change {kind} {name}"):
            place = self._place(kind, namespace)
            return self._client.patch(resource(kind), name, dict(change), patch_type=PatchType.MERGE, **place)

    def delete(self, kind: str, name: str, *, namespace: str | None = None, grace_seconds: int | None = None) -> bool:
        """Ask for its removal, and of what it owns in the background; false if it was gone already."""
        from lightkube.types import CascadeType

        try:
            with self.translate(f"delete {kind} {name}"):
                self._client.delete(
                    resource(kind),
                    name,
                    grace_period=grace_seconds,
                    cascade=CascadeType.BACKGROUND,
                    **self._place(kind, namespace),
                )
        except NotFoundError:
            return False
        return True

    @property
    def _client(self) -> Any:
        """lightkube types its generic resources only in part."""
        return self.client

    def close(self) -> None:
        """Give its sockets back."""
        self.client.close()

    def _place(self, kind: str, namespace: str | None) -> dict[str, Any]:
        return {"namespace": namespace or self.namespace} if KINDS[kind].namespaced else {}


Connect = Callable[[ClusterEntry], Connection]


def connect(entry: ClusterEntry, *, namespace: str | None = None) -> Connection:
    """A client for the entry's own context. Makes no request, runs no login helper yet, refuses what cannot work."""
    from gkr.cluster.kubeconfig import read_context
    from gkr.cluster.login import helper_transport, require_helper

    context = read_context(entry.kubeconfig, name=entry.context)
    require_helper(context.user, folder=context.folder, cluster=entry.name)
    home = namespace or entry.namespace or context.namespace or "default"
    with translate(entry.name, server=context.server):
        import httpx2
        from lightkube import Client

        config = lightkube_config(context, namespace=home)
        transport = helper_transport(context, config=config, name=entry.name)
        client = Client(
            config,
            namespace=home,
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            field_manager=FIELD_MANAGER,
            transport=transport,
            proxy=None if transport else context.cluster.get("proxy-url"),
        )
    return Connection(client, entry.name, home, context.name, entry.kubeconfig, context.server)


def lightkube_config(context: Context, *, namespace: str) -> SingleConfig:
    """A context as lightkube wants it; without login helper, which is ours."""
    from lightkube.config.kubeconfig import SingleConfig
    from lightkube.config.models import Cluster, User
    from lightkube.config.models import Context as LightkubeContext

    user = User(
        username=context.user.get("username"),
        password=context.user.get("password"),
        token=context.user.get("token"),
        token_file=context.user.get("tokenFile"),
        auth_provider=context.user.get("auth-provider"),
        client_cert=context.user.get("client-certificate"),
        client_cert_data=context.user.get("client-certificate-data"),
        client_key=context.user.get("client-key"),
        client_key_data=context.user.get("client-key-data"),
    )
    cluster = Cluster(
        server=context.server,
        certificate_auth=context.cluster.get("certificate-authority"),
        certificate_auth_data=context.cluster.get("certificate-authority-data"),
        insecure=bool(context.cluster.get("insecure-skip-tls-verify")),
    )
    return SingleConfig(context.name, LightkubeContext(cluster=context.name, namespace=namespace), cluster, user)


def label_of(obj: Mapping[str, Any]) -> str:
    """`RayJob portrait-2b-east-3fa9c1`."""
    return f"{obj['kind']} {obj.get('metadata', {}).get('name', '')}".rstrip()
