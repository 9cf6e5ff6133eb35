"""The provider protocol over `Cloud`, `answers`, `differences` and `schema`; what a bed adds is in `on_bed`.

Method names are the protocol's. A refusal goes back as the engine shows it: a check failure names the input, everything
else is a status with what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, empty_pb2, json_format, struct_pb2
from google.rpc import status_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

from spec.errors import GkrError
from tests.builders.gcp_double import answers, on_bed, schema
from tests.builders.gcp_double.cloud import Cloud
from tests.builders.gcp_double.differences import Difference, differences

VERSION = "10.2.0"
_KINDS = provider_pb2.PropertyDiff
_STOCK_OUT = (
    "Error waiting for creating GKE NodePool: Google Compute Engine: ZONE_RESOURCE_POOL_EXHAUSTED: the zone does not "
    "have enough resources available to fulfill the request (this is the test double; it was told so)"
)
_BAD_STATE = grpc.StatusCode.FAILED_PRECONDITION


class Double(provider_pb2_grpc.ResourceProviderServicer):
    """Google Cloud as the engine sees it."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._settings: dict[str, Any] = {}

    def Handshake(self, request: Any, context: Any) -> Any:  # noqa: N802
        return provider_pb2.ProviderHandshakeResponse()

    def GetPluginInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return plugin_pb2.PluginInfo(version=VERSION)

    def GetMapping(self, request: Any, context: Any) -> Any:  # noqa: N802
        return provider_pb2.GetMappingResponse()

    def Cancel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return empty_pb2.Empty()

    def CheckConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        given = _plain(request.news)
        known = schema.types(schema.provider_arguments())
        failures = [(key, "the provider has no such setting") for key in given if key not in {*known, *schema.OWN_KEYS}]
        return provider_pb2.CheckResponse(inputs=request.news, failures=_failures(failures))

    def DiffConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        old, new = _plain(request.olds), _plain(request.news)
        keys = sorted(key for key in {*old, *new} - schema.OWN_KEYS if old.get(key) != new.get(key))
        return _diff([Difference(key, "update", forces=key == "project") for key in keys])

    def Configure(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._settings = _plain(request.args)
        return provider_pb2.ConfigureResponse(supportsPreview=True)

    def Invoke(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = answers.looked_up(request.tok, _plain(request.args))
        if found is None:
            reason = f"the test double does not know how to answer {request.tok}"
            return provider_pb2.InvokeResponse(failures=_failures([("", reason)]))
        return provider_pb2.InvokeResponse(**{"return": _struct(found)})

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, inputs = _type(request), _plain(request.news)
        try:
            of = schema.arguments(kind)
        except schema.SchemaError as error:
            return provider_pb2.CheckResponse(failures=_failures([("", str(error))]))
        if "project" in schema.types(of) and inputs.get("project") is None and "project" in self._settings:
            inputs["project"] = self._settings["project"]
        return provider_pb2.CheckResponse(inputs=_struct(inputs), failures=_failures(schema.faults(inputs, of=of)))

    def Diff(self, request: Any, context: Any) -> Any:  # noqa: N802
        old = _plain(request.old_inputs) or _plain(request.olds)
        found = differences(_type(request), old=old, new=_plain(request.news))
        return _diff([one for one in found if one.top not in request.ignoreChanges])

    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, inputs = _type(request), _plain(request.properties)
        if request.preview:
            return provider_pb2.CreateResponse(properties=_struct(inputs))
        identity = answers.identity(kind, inputs, urn=request.urn)
        if self._cloud.read(kind, identity) is not None:
            _refuse(context, grpc.StatusCode.ALREADY_EXISTS, f"Error 409: {identity} already exists")
        found = answers.outputs(kind, inputs, identity=identity)
        self._cloud.write(kind, identity, found)
        found = self._apply(context, kind, identity, inputs, found)
        return provider_pb2.CreateResponse(id=identity, properties=_struct(found))

    def Update(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, inputs = _type(request), _plain(request.news)
        if request.preview:
            return provider_pb2.UpdateResponse(properties=_struct({**_plain(request.olds), **inputs}))
        if self._cloud.read(kind, request.id) is None:
            _refuse(context, grpc.StatusCode.NOT_FOUND, f"Error 404: {request.id} is not there")
        found = answers.outputs(kind, inputs, identity=request.id)
        self._cloud.write(kind, request.id, found)
        found = self._apply(context, kind, request.id, inputs, found)
        return provider_pb2.UpdateResponse(properties=_struct(found))

    def Delete(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, outputs = _type(request), _plain(request.properties)
        if kind == answers.CLUSTER and outputs.get("deletionProtection") is True:
            _refuse(context, _BAD_STATE, f"{request.id} has deletion protection; switch it off in an update first")
        if kind == answers.NODE_POOL:
            _reported(context, lambda: on_bed.remove_pool(outputs))
        if kind == answers.CLUSTER:
            _reported(context, lambda: on_bed.remove_types(str(outputs["location"])))
        self._cloud.remove(kind, request.id)
        return empty_pb2.Empty()

    def Read(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = self._cloud.read(_type(request), request.id)
        if found is None:
            return provider_pb2.ReadResponse()
        return provider_pb2.ReadResponse(id=request.id, properties=_struct(found), inputs=request.inputs)

    def _apply(
        self, context: Any, kind: str, identity: str, inputs: dict[str, Any], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """What happens besides remembering it."""
        if kind == answers.NODE_POOL:
            if self._cloud.stocked_out(str(inputs["name"])):
                # As the real provider: the pool is there, without machines, and stays in the state.
                _half_made(context, identity, inputs, outputs, reason=_STOCK_OUT)
            _reported(context, lambda: on_bed.provide_pool(inputs))
        if kind == answers.CLUSTER:
            _reported(context, lambda: on_bed.provide_types(str(inputs["location"])))
            reach = _reported(context, lambda: on_bed.reach(str(inputs["location"]))) or self._keys()
            if reach:
                outputs = {**outputs, **reach}
                self._cloud.write(kind, identity, outputs)
        return outputs

    def _keys(self) -> dict[str, Any]:
        key = self._cloud.client_key()
        return {"masterAuth": {"clusterCaCertificate": "CA", "clientCertificate": "C", "clientKey": key}} if key else {}


def _reported(context: Any, work: Any) -> Any:
    """Run what touches a bed; what went wrong there is told with its remedy."""
    try:
        return work()
    except GkrError as error:
        _refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))


def _refuse(context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
    context.abort(code, reason)
    raise AssertionError("abort raises")


def _half_made(
    context: Any, identity: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, reason: str
) -> NoReturn:
    detail = provider_pb2.ErrorResourceInitFailed(
        id=identity, properties=_struct(outputs), inputs=_struct(inputs), reasons=[reason]
    )
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=reason, details=[packed])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    _refuse(context, grpc.StatusCode.UNKNOWN, reason)


def _diff(found: list[Difference]) -> Any:
    names = {"add": "ADD", "delete": "DELETE", "update": "UPDATE"}
    detailed = {
        one.path: _KINDS(kind=_KINDS.Kind.Value(names[one.kind] + ("_REPLACE" if one.forces else "")), inputDiff=True)
        for one in found
    }
    some = provider_pb2.DiffResponse.DIFF_SOME if found else provider_pb2.DiffResponse.DIFF_NONE
    return provider_pb2.DiffResponse(
        changes=some,
        replaces=sorted({one.top for one in found if one.forces}),
        diffs=sorted({one.top for one in found}),
        detailedDiff=detailed,
        hasDetailedDiff=True,
    )


def _failures(found: Iterable[tuple[str, str]]) -> list[Any]:
    return [provider_pb2.CheckFailure(property=path, reason=reason) for path, reason in found]


def _type(request: Any) -> str:
    return str(request.urn).split("::")[2].rpartition("$")[2]


def _plain(values: Any) -> dict[str, Any]:
    """A protobuf struct as values; whole numbers are whole again."""
    return json.loads(json.dumps(json_format.MessageToDict(values)), parse_float=_number)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _struct(values: Mapping[str, Any]) -> Any:
    found = struct_pb2.Struct()
    found.update({key: value for key, value in values.items() if value is not None})
    return found
