"""A double of a Kubernetes API server: real HTTP and JSON on loopback, and a table behind it instead of a cluster.

It refuses what the real one refuses: a wrong token (401), a right that was taken away (403), an unknown kind or object
(404), a create of what is there (409), an object that a rule rejects (422). It has no controllers: a test says what
they would have written. Deleting removes what the object owns, as the garbage collector does, after `linger` looks.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from gkr.cluster.kinds import KINDS

TOKEN = "a-token-of-the-double"
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?"
)
_SLOW = frozenset({"RayJob", "RayCluster", "Job", "Pod", "Workload"})
"""What has finalizers or a grace period; everything else is gone at once."""

Key = tuple[str, str, str]


class ApiDouble:
    """One cluster. `objects` by (kind, namespace, name)."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.denied: set[tuple[str, str]] = set()
        """(verb, plural or plural/subresource) that the caller may not."""
        self.rejected: dict[Key, str] = {}
        """Objects that an admission rule rejects, with its words; `create` only."""
        self.requests: list[tuple[str, str]] = []
        self.token = TOKEN
        self.linger = 0
        self._leaving: dict[Key, int] = {}
        self._lock = threading.Lock()
        self._uids = 0
        self.url = ""

    def put(self, kind: str, name: str, *, namespace: str = "", **rest: Any) -> dict[str, Any]:
        """Place an object as a controller or a person would."""
        metadata: dict[str, Any] = {"name": name, "uid": self._uid(), **rest.pop("metadata", {})}
        if namespace:
            metadata["namespace"] = namespace
        metadata.setdefault("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        obj = {"apiVersion": KINDS[kind].api_version, "kind": kind, "metadata": metadata, **rest}
        self.objects[kind, namespace, name] = obj
        return obj

    def names(self, kind: str) -> list[str]:
        """Of all objects of a kind."""
        return sorted(name for one, _, name in self.objects if one == kind)

    def kubeconfig(self, path: Path, *, context: str = "double", namespace: str = "", user: Any = None) -> Path:
        """Write one that leads here."""
        inner = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN} if user is None else user}],
            "contexts": [{"name": context, "context": inner}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def answer(self, method: str, url: str, body: bytes, token: str) -> tuple[int, Any]:
        """Status and JSON of one request."""
        with self._lock:
            self.requests.append((method, url))
            if token != f"Bearer {self.token}":
                return _status(401, "Unauthorized")
            parts = urlsplit(url)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            match = _PATH.fullmatch(parts.path)
            kind = _kind(match["group"] or "", match["version"], match["plural"]) if match else None
            if match is None or kind is None:
                return _status(404, "the server could not find the requested resource")
            return self._serve(method, kind, match["namespace"] or "", match["name"], query, body)

    def _serve(
        self, method: str, kind: str, namespace: str, name: str | None, query: Mapping[str, str], body: bytes
    ) -> tuple[int, Any]:
        verb = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
        plural = KINDS[kind].plural
        if kind == "SelfSubjectAccessReview":
            return 201, self._review(json.loads(body))
        if (verb, plural) in self.denied:
            place = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
            return _status(403, f'{plural} is forbidden: User "tester" cannot {verb} resource "{plural}"{place}')
        self._leave()
        key = (kind, namespace, name or "")
        if verb == "list":
            return 200, {"kind": f"{kind}List", "metadata": {}, "items": self._select(kind, namespace, query)}
        if verb == "get":
            return (200, self.objects[key]) if key in self.objects else self._missing(key)
        if verb == "delete":
            return self._delete(key)
        return self._write(verb, kind, namespace, json.loads(body), name=name, dry_run="dryRun" in query)

    def _write(
        self, verb: str, kind: str, namespace: str, obj: dict[str, Any], *, name: str | None, dry_run: bool
    ) -> tuple[int, Any]:
        name = name or str(obj["metadata"]["name"])
        key = (kind, namespace, name)
        if namespace and ("Namespace", "", namespace) not in self.objects:
            return _status(404, f'namespaces "{namespace}" not found')
        if key in self.rejected:
            return _status(422, f'admission webhook "rules.double" denied the request: {self.rejected[key]}')
        if verb == "create" and key in self.objects:
            return _status(409, f'{KINDS[kind].plural} "{name}" already exists')
        kept = self.objects.get(key, {"metadata": {"uid": self._uid()}})
        made = {**kept, **obj, "metadata": {**kept["metadata"], **obj.get("metadata", {})}}
        made["metadata"].setdefault("creationTimestamp", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        if not dry_run:
            self.objects[key] = made
        return 200, made

    def _delete(self, key: Key) -> tuple[int, Any]:
        if key not in self.objects:
            return self._missing(key)
        if key[0] not in _SLOW:
            del self.objects[key]
            return 200, {"kind": "Status", "status": "Success"}
        self.objects[key]["metadata"]["deletionTimestamp"] = "2026-11-30T14:37:55Z"
        self._leaving.setdefault(key, self.linger)
        return 200, {"kind": "Status", "status": "Success"}

    def _leave(self) -> None:
        """One more look at the cluster: what was told to go goes, with all it owns."""
        for key, left in list(self._leaving.items()):
            self._leaving[key] = left - 1
            if left > 0:
                continue
            gone = self.objects.pop(key, None)
            del self._leaving[key]
            uid = gone["metadata"]["uid"] if gone else ""
            for other, obj in list(self.objects.items()):
                if any(owner.get("uid") == uid for owner in obj["metadata"].get("ownerReferences", [])):
                    obj["metadata"]["deletionTimestamp"] = "2026-11-30T14:37:56Z"
                    self._leaving.setdefault(other, self.linger)

    def _select(self, kind: str, namespace: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        wanted = [term.partition("=") for term in query.get("labelSelector", "").split(",") if term]
        found = [one for (which, where, _), one in self.objects.items() if which == kind and namespace in {"", where}]
        return [one for one in found if all(_labelled(one, key, sign, value) for key, sign, value in wanted)]

    def _review(self, review: dict[str, Any]) -> dict[str, Any]:
        asked = review["spec"]["resourceAttributes"]
        resource = "/".join(one for one in (asked["resource"], asked.get("subresource")) if one)
        return {**review, "status": {"allowed": (asked["verb"], resource) not in self.denied}}

    def _missing(self, key: Key) -> tuple[int, Any]:
        return _status(404, f'{KINDS[key[0]].plural} "{key[2]}" not found')

    def _uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"


@contextmanager
def serving(double: ApiDouble) -> Generator[ApiDouble]:
    """Answer on a port of loopback until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Quiet."""

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, value = double.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _kind(group: str, version: str, plural: str) -> str | None:
    return next(
        (name for name, one in KINDS.items() if (one.group, one.version, one.plural) == (group, version, plural)), None
    )


def _labelled(obj: Mapping[str, Any], key: str, sign: str, value: str) -> bool:
    labels = obj["metadata"].get("labels", {})
    return key in labels and (not sign or labels[key] == value)


def _status(code: int, message: str) -> tuple[int, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return code, {**status, "message": message, "reason": "", "code": code}
