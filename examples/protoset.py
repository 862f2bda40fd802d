"""Writes what grpcurl must know of the messages: PredictionService, ModelService, LabelService.

python examples/protoset.py perennial.protoset
"""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

from serving.protos import labels_pb2


def main(path: str) -> None:
    files: dict[str, FileDescriptor] = {}

    def add(file: FileDescriptor) -> None:
        # What a file imports stands before it.
        for imported in file.dependencies:
            add(imported)
        files.setdefault(file.name, file)

    for module in (prediction_service_pb2, model_service_pb2, labels_pb2):
        add(module.DESCRIPTOR)
    found = FileDescriptorSet()
    for file in files.values():
        file.CopyToProto(found.file.add())
    Path(path).write_bytes(found.SerializeToString())


if __name__ == "__main__":
    main(sys.argv[1])
