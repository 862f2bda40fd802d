"""Stands in for grpcurl, which can't be installed by pip: the options that the example uses.

It knows nothing but the protoset: messages come from its descriptors alone, JSON is read strictly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-max-time", type=float)
    parser.add_argument("-protoset", type=Path, required=True)
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data", required=True)
    parser.add_argument("address")
    parser.add_argument("symbol")
    options = parser.parse_args()

    pool = descriptor_pool.DescriptorPool()
    for file in FileDescriptorSet.FromString(options.protoset.read_bytes()).file:
        pool.Add(file)
    service, method_name = options.symbol.split("/")
    method = pool.FindServiceByName(service).FindMethodByName(method_name)
    request = message_factory.GetMessageClass(method.input_type)()
    json_format.Parse(options.data, request, descriptor_pool=pool)
    metadata = [tuple(header.split(": ", 1)) for header in options.headers]
    with grpc.insecure_channel(options.address) as channel:
        call = channel.unary_unary(
            f"/{options.symbol}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        try:
            reply = call(request, metadata=metadata, timeout=options.max_time)
        except grpc.RpcError as error:
            print(
                f"ERROR:\n  Code: {error.code().name}\n  Message: {error.details()}",
                file=sys.stderr,
            )
            return 64 + error.code().value[0]
    print(json_format.MessageToJson(reply, descriptor_pool=pool))
    return 0


if __name__ == "__main__":
    sys.exit(main())
