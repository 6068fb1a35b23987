"""NVSentinel's platform connector for tests: a real gRPC server, and the published form of the messages."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Names, numbers and types of data-models/protobufs/health_event.proto of NVIDIA/NVSentinel (package datamodels).
TEXT, FLAG, NUMBER, ENUM, MESSAGE = 9, 8, 13, 14, 11
MESSAGES: dict[str, list[tuple[str, int, int, str | None, bool]]] = {
    "HealthEvents": [("version", 1, NUMBER, None, False), ("events", 2, MESSAGE, "HealthEvent", True)],
    "Entity": [("entityType", 1, TEXT, None, False), ("entityValue", 2, TEXT, None, False)],
    "BehaviourOverrides": [("force", 1, FLAG, None, False), ("skip", 2, FLAG, None, False)],
    "Stamp": [("seconds", 1, 3, None, False), ("nanos", 2, 5, None, False)],
    "HealthEvent": [
        ("version", 1, NUMBER, None, False),
        ("agent", 2, TEXT, None, False),
        ("componentClass", 3, TEXT, None, False),
        ("checkName", 4, TEXT, None, False),
        ("isFatal", 5, FLAG, None, False),
        ("isHealthy", 6, FLAG, None, False),
        ("message", 7, TEXT, None, False),
        ("recommendedAction", 8, ENUM, "RecommendedAction", False),
        ("errorCode", 9, TEXT, None, True),
        ("entitiesImpacted", 10, MESSAGE, "Entity", True),
        ("metadata", 11, MESSAGE, "HealthEvent.MetadataEntry", True),
        ("generatedTimestamp", 12, MESSAGE, "Stamp", False),  # as google.protobuf.Timestamp is written
        ("nodeName", 13, TEXT, None, False),
        ("quarantineOverrides", 14, MESSAGE, "BehaviourOverrides", False),
        ("drainOverrides", 15, MESSAGE, "BehaviourOverrides", False),
        ("processingStrategy", 16, ENUM, "ProcessingStrategy", False),
    ],
}
ENUMS = {
    "ProcessingStrategy": {"UNSPECIFIED": 0, "EXECUTE_REMEDIATION": 1, "STORE_ONLY": 2},
    "RecommendedAction": {
        "NONE": 0, "COMPONENT_RESET": 2, "CONTACT_SUPPORT": 5, "RUN_FIELDDIAG": 6, "RESTART_VM": 15, "RESTART_BM": 24,
        "REPLACE_VM": 25, "RUN_DCGMEUD": 26, "RESTART_APP": 39, "UNKNOWN": 99,
    },
}  # fmt: skip
SERVES = "/datamodels.PlatformConnector/HealthEventOccurredV1"


def _health_events() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="health_event.proto", package="datamodels", syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for each, number in values.items():
            enum.value.add(name=each, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "HealthEvent":
            entry = message.nested_type.add(name="MetadataEntry")
            entry.options.map_entry = True
            for at, each in enumerate(("key", "value"), 1):
                entry.field.add(name=each, number=at, type=TEXT, label=1)
        for each, number, kind, of, many in fields:
            field = message.field.add(name=each, number=number, type=kind, label=3 if many else 1)
            if of is not None:
                field.type_name = f".datamodels.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("datamodels.HealthEvents"))


HealthEvents = _health_events()


class Connector:
    """Takes calls; ``answer`` is what it says to each: taken, refused, or nothing for a while."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[Any] = []
        self.answer = "taken"
        self._done = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        service, method = SERVES[1:].split("/")
        handler = grpc.unary_unary_rpc_method_handler(self._take, request_deserializer=HealthEvents.FromString)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def stop(self) -> None:
        self._done.set()
        self._server.stop(None).wait(10)

    def _take(self, request: Any, context: grpc.ServicerContext) -> bytes:
        if self.answer == "refused":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such node")
        if self.answer == "silent":
            self._done.wait(20)
        self.told.append(request)
        return b""
