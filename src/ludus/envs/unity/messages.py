"""Message classes of ML-Agents' protocol, made from messages.proto when this module is imported.

    message = UnityMessage.FromString(data)

Generated modules work only with the versions of protobuf that follow their generator; descriptors that are built here work with
every version. They live in a pool of their own, so that `mlagents-envs` may be imported in the same process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ludus.errors import MissingExtra

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as error:
    raise MissingExtra("Unity players need protobuf.", "pip install 'ludus[unity]'") from error

METHOD = "/communicator_objects.UnityToExternalProto/Exchange"
STEP, RESET, QUIT = 0, 1, 2
OK, SHUT_DOWN = 200, 400
"""Values of header.status."""
NONE, PNG = 0, 1
"""Values of compression_type."""

_SOURCE = Path(__file__).with_name("messages.proto")
_TOKEN = re.compile(r"//[^\n]*|\"[^\"]*\"|[\w.]+|[{}=;<>,]")
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "float": _FIELD.TYPE_FLOAT,
    "int32": _FIELD.TYPE_INT32,
    "string": _FIELD.TYPE_STRING,
}


class _ProtoReader:
    """Reads the part of the proto3 language that messages.proto uses: enums, fields of scalars and messages, oneof, maps."""

    def __init__(self, source: str) -> None:
        self._tokens: list[str] = [token for token in _TOKEN.findall(source) if not token.startswith("//")]
        self._at = 0
        self.file = descriptor_pb2.FileDescriptorProto(name="ludus/envs/unity/messages.proto", syntax="proto3")
        self._enums: set[str] = set()

    def read(self) -> descriptor_pb2.FileDescriptorProto:
        while self._at < len(self._tokens):
            word = self._next()
            if word == "syntax":
                self._skip_to(";")
            elif word == "package":
                self.file.package = self._next()
                self._skip_to(";")
            elif word == "enum":
                self._read_enum()
            elif word == "message":
                self._read_message()
            else:
                raise ValueError(f"unexpected {word!r} in {_SOURCE.name}")
        return self.file

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip_to(self, token: str) -> None:
        while self._next() != token:
            pass

    def _read_enum(self) -> None:
        enum = self.file.enum_type.add(name=self._next())
        self._enums.add(enum.name)
        self._skip_to("{")
        while (name := self._next()) != "}":
            self._skip_to("=")
            enum.value.add(name=name, number=int(self._next()))
            self._skip_to(";")

    def _read_message(self) -> None:
        message = self.file.message_type.add(name=self._next())
        self._skip_to("{")
        while (word := self._next()) != "}":
            if word == "oneof":
                message.oneof_decl.add(name=self._next())
                self._skip_to("{")
                while (kind := self._next()) != "}":
                    self._read_field(message, kind).oneof_index = len(message.oneof_decl) - 1
            elif word == "map":
                self._read_map(message)
            elif word == "repeated":
                self._read_field(message, self._next()).label = _FIELD.LABEL_REPEATED
            else:
                self._read_field(message, word)

    def _read_field(self, message: Any, kind: str) -> Any:
        name = self._next()
        self._skip_to("=")
        field = message.field.add(name=name, number=int(self._next()), label=_FIELD.LABEL_OPTIONAL)
        self._skip_to(";")
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = _FIELD.TYPE_ENUM if kind in self._enums else _FIELD.TYPE_MESSAGE
            field.type_name = f".{self.file.package}.{kind}"
        return field

    def _read_map(self, message: Any) -> None:
        self._skip_to("<")
        self._next()  # keys are strings
        self._skip_to(",")
        value = self._next()
        self._skip_to(">")
        field = self._read_field(message, "")
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        entry = message.nested_type.add(name=f"{field.name[0].upper()}{field.name[1:].replace('_a', 'A')}Entry")
        field.type_name = f".{self.file.package}.{message.name}.{entry.name}"
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        entry.field.add(
            name="value",
            number=2,
            label=_FIELD.LABEL_OPTIONAL,
            type=_FIELD.TYPE_MESSAGE,
            type_name=f".{self.file.package}.{value}",
        )


def _load() -> Any:
    pool = descriptor_pool.DescriptorPool()
    description = _ProtoReader(_SOURCE.read_text(encoding="utf-8")).read()
    pool.AddSerializedFile(description.SerializeToString())
    return pool


_pool = _load()


def message_class(name: str) -> Any:
    """The class of a message of messages.proto."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"communicator_objects.{name}"))


UnityMessage = message_class("UnityMessageProto")
AgentInfo = message_class("AgentInfoProto")
AgentAction = message_class("AgentActionProto")
Observation = message_class("ObservationProto")
BrainParameters = message_class("BrainParametersProto")
