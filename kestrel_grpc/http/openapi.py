"""GET /openapi.json: a description of the HTTP port for programs, made from what the port itself reads.

The methods of kestrel.v1, by Connect, come from the protos: names, types, rules, and comments with the defaults. Of
interfaces that other programs own, the document has the names that the port reads, refuses or ignores, from the tables
of the dialects. It needs no credentials.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__, services
from .dialects.known_fields import MOONDREAM_SETTINGS
from .edge import Endpoint

_Schema = dict[str, Any]
_CONTRACT = Path(services.__file__).with_name("kestrel.v1.binpb")
_INTEGER, _NUMBER = ["integer", "string"], ["number", "string"]
"""ProtoJSON takes numbers as text too, and writes numbers of 64 bits so."""
_KINDS: dict[int, str | list[str]] = {
    FieldDescriptor.CPPTYPE_DOUBLE: _NUMBER,
    FieldDescriptor.CPPTYPE_FLOAT: _NUMBER,
    FieldDescriptor.CPPTYPE_INT64: _INTEGER,
    FieldDescriptor.CPPTYPE_UINT64: _INTEGER,
    FieldDescriptor.CPPTYPE_INT32: _INTEGER,
    FieldDescriptor.CPPTYPE_UINT32: _INTEGER,
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
}
_OWN_FORMS = {"Struct": "object", "Any": "object", "Timestamp": "string", "Duration": "string"}
"""The types of google.protobuf that have a form of their own in JSON."""
_RULES = {
    "gte": "minimum",
    "lte": "maximum",
    "gt": "exclusiveMinimum",
    "lt": "exclusiveMaximum",
    "min_len": "minLength",
    "max_len": "maxLength",
    "pattern": "pattern",
    "min_items": "minItems",
    "max_items": "maxItems",
}
"""The rules of buf.validate that JSON Schema has too."""
_PLAIN = ("/healthz", "/health", "/metrics", "/api/version", "/openapi.json")
_ERROR = {
    "type": "object",
    "required": ["code", "message", "details"],
    "properties": {
        **{name: {"type": "string"} for name in ("code", "message")},
        "details": {"type": "array", "items": {"type": "object", "required": ["type", "value"]}},
    },
}


def document_of(paths: Mapping[str, Sequence[tuple[str, Endpoint]]]) -> Callable[[Request], Any]:
    """The handler of /openapi.json. ``paths``: the endpoints of each path, with their verbs."""
    made = functools.cache(lambda: orjson.dumps(_document(paths)))

    async def send(request: Request) -> Response:
        return Response(await asyncio.to_thread(made), media_type="application/json")

    return send


def _document(paths: Mapping[str, Sequence[tuple[str, Endpoint]]]) -> _Schema:
    contract = _Contract()
    described: dict[str, _Schema] = {path: {"get": {"responses": _responses()}} for path in _PLAIN}
    for path, endpoints in paths.items():
        made: _Schema = {}
        for verb, endpoint in endpoints:
            if not endpoint.is_served:
                continue
            is_ours = path.startswith("/kestrel.v1.")
            make = contract.operation if is_ours else contract.foreign
            made[verb.lower()] = make(path, endpoint)
        if made:
            described.setdefault(path.replace(":path}", "}"), {}).update(made)
    about = "Fields of kestrel.v1 may also have the names of the protos. docs/use/http.md has more."
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kestrel over HTTP", "version": __version__, "description": about},
        "paths": described,
        "components": {
            "schemas": contract.schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _responses(kind: str = "", schema: _Schema | None = None) -> _Schema:
    failed: _Schema = {}
    if kind:
        error = {"$ref": "#/components/schemas/connect.Error"}
        failed = {"content": {"application/json": {"schema": error}}}
    return {
        "200": {
            "description": "Done.",
            **({"content": {kind: {"schema": schema}}} if kind else {}),
        },
        "414": {"description": "The target has more than 8000 bytes."},
        "4XX": {"description": "The request is refused.", **failed},
        "5XX": {"description": "The server can't answer.", **failed},
    }


class _Contract:
    """What the protos say. ``schemas``: of all messages that an operation has named, by name."""

    def __init__(self) -> None:
        self._pool, self._comments = descriptor_pool.DescriptorPool(), dict[str, str]()
        for file in descriptor_pb2.FileDescriptorSet.FromString(_CONTRACT.read_bytes()).file:
            self._pool.Add(file)
            self._comments.update(_comments(file))
        options = self._pool.FindMessageTypeByName("google.protobuf.FieldOptions")
        self._options: Any = message_factory.GetMessageClass(options)
        self._rules = self._pool.FindExtensionByName("buf.validate.field")
        self.schemas: _Schema = {"connect.Error": _ERROR}

    def operation(self, path: str, endpoint: Endpoint) -> _Schema:
        """A method by the Connect protocol."""
        service, _, name = path[1:].partition("/")
        method: Any = self._pool.FindServiceByName(service).methods_by_name[name]
        request, response = self._message(method.input_type), self._message(method.output_type)
        kind, about = "application/json", self._comments[method.full_name]
        if method.server_streaming or method.client_streaming:
            # By the ending +json (RFC 6839), programs would take envelopes of JSON for JSON.
            kind, request = "application/connect+proto", {"type": "string", "format": "binary"}
            response = request
            about += " Each message is in an envelope of the Connect protocol, in binary form, or as JSON"
            about += " with application/connect+json."
        made: _Schema = {"description": about, "responses": _responses(kind, response)}
        content = {kind: {"schema": request}}
        if endpoint.takes_body:
            return made | {"requestBody": {"required": True, "content": content}}
        fixed = {"connect": {"const": "v1"}, "encoding": {"const": "json"}}
        parameters: list[_Schema] = [{"name": name, "schema": fixed[name]} for name in fixed]
        parameters.append({"name": "message", "content": content})
        return made | {"parameters": [{"in": "query", "required": True, **p} for p in parameters]}

    def foreign(self, path: str, endpoint: Endpoint) -> _Schema:
        """An operation of another program's interface."""
        names = [part[1:-1].removesuffix(":path") for part in path.split("/") if part[:1] == "{"]
        placed = {"in": "path", "required": True, "schema": {"type": "string"}}
        about = f"{endpoint.method[1:]} in the form of other programs."
        made: _Schema = {"description": about, "responses": _responses()}
        made["parameters"] = [{"name": name, **placed} for name in names]
        if not endpoint.takes_body:
            return made
        schema: _Schema = {"type": "object"}
        if (known := endpoint.fields) is not None:
            task = f"{path.rpartition('/')[2].title()}Task"
            fields = schema["properties"] = self._named(known.honoured, task)
            if "settings" in fields:
                inner = self._named(MOONDREAM_SETTINGS.honoured, task)
                fields["settings"] = {"type": ["object", "null"], "properties": inner}
            schema |= {"x-refused": dict(known.refused), "x-ignored": sorted(known.ignored)}
        content = {kind.decode(): {"schema": schema} for kind in endpoint.types if kind}
        return made | {"requestBody": {"required": True, "content": content}}

    def _named(self, names: Iterable[str], task: str) -> _Schema:
        """The schemas of fields by their names in the protos; {} for what the protos lack, or have in another form."""
        found: _Schema = {name: {} for name in sorted(names)}
        messages = self._pool.FindFileContainingSymbol("kestrel.v1.Task").message_types_by_name
        sampling = self._pool.FindMessageTypeByName("kestrel.v1.Sampling")
        for message in filter(None, (messages.get(task), sampling)):
            for field in message.fields:
                if (
                    found.get(field.name) == {}
                    and not field.is_repeated
                    and field.cpp_type in _KINDS
                ):
                    kinds = _KINDS[field.cpp_type]
                    plain = kinds if isinstance(kinds, str) else kinds[0]
                    about = self._comments[field.full_name]
                    found[field.name] = {"type": [plain, "null"], "description": about}
        return found

    def _message(self, kind: Any) -> _Schema:
        if kind.full_name.startswith("google.protobuf."):
            return {"type": own} if (own := _OWN_FORMS.get(kind.name)) else {}
        if kind.full_name not in self.schemas:
            self.schemas[kind.full_name] = made = {  # First, because a message may hold itself.
                "description": self._comments.get(kind.full_name, ""),
                "type": "object",
                "additionalProperties": False,
            }
            made["properties"] = {field.json_name: self._field(field) for field in kind.fields}
            made["required"] = [
                field.json_name for field in kind.fields if self._ruled(field).required
            ]
        return {"$ref": f"#/components/schemas/{kind.full_name}"}

    def _ruled(self, field: Any) -> Any:
        options = self._options.FromString(field.GetOptions().SerializeToString())
        return options.Extensions[self._rules]

    def _field(self, field: Any) -> _Schema:
        rules, about = self._ruled(field), self._comments.get(field.full_name, "")
        schema: _Schema
        if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
            about += f" At most one field of the group {field.containing_oneof.name} may be set."
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            value = self._value(entry.fields_by_name["value"], type(rules)())
            schema = {"type": "object", "additionalProperties": value}
        elif field.is_repeated:
            items = self._value(field, rules.repeated.items)
            schema = {"type": "array", "items": items, **_limits(rules.repeated)}
        else:
            schema = self._value(field, rules)
        if not rules.required:  # ProtoJSON takes null for the default.
            schema = {"anyOf": [schema, {"type": "null"}]}
        return {"description": about.strip(), **schema}

    def _value(self, field: Any, rules: Any) -> _Schema:
        if field.message_type is not None:
            return self._message(field.message_type)
        if field.enum_type is not None:
            values = field.enum_type.values
            return {"enum": [each.name for each in values] + [each.number for each in values]}
        of = rules.WhichOneof("type")
        limits = _limits(getattr(rules, of)) if of else {}
        form = {"contentEncoding": "base64"} if field.type == field.TYPE_BYTES else {}
        return {"type": _KINDS[field.cpp_type], **form, **limits}


def _limits(rules: Any) -> _Schema:
    return {
        _RULES[field.name]: value for field, value in rules.ListFields() if field.name in _RULES
    }


def _comments(file: Any) -> Iterator[tuple[str, str]]:
    """The comments of a file's messages, fields and methods, by the full names. The file has no messages within
    messages but those of maps."""
    at = {
        tuple(each.path): " ".join(each.leading_comments.split())
        for each in file.source_code_info.location
    }
    for kinds, number in ((file.message_type, 4), (file.service, 6)):
        for n, kind in enumerate(kinds):
            name = f"{file.package}.{kind.name}"
            yield name, at.get((number, n), "")
            for k, each in enumerate(kind.field if number == 4 else kind.method):
                yield f"{name}.{each.name}", at.get((number, n, 2, k), "")
