"""TLS for the gRPC port, as an SSLConfig file says. REST has none."""

from __future__ import annotations

from pathlib import Path

import grpc

from serving.embedded.config import read_text_proto
from serving.embedded.status import Code, StatusError, invalid
from serving.protos import ssl_config_pb2


def read_credentials(path: Path) -> grpc.ServerCredentials:
    """The credentials of a text-format SSLConfig, which holds keys and certificates as PEM text.

    With `client_verify` a client must show a certificate that `custom_ca` has signed.

    Raises:
        StatusError: the file cannot be read, does not parse, or lacks what it needs.
    """
    config = read_text_proto(path, ssl_config_pb2.SSLConfig(), "tensorflow.serving.SSLConfig")
    if not config.server_key or not config.server_cert:
        raise invalid(f"{path}: server_key and server_cert must hold PEM text")
    if config.client_verify and not config.custom_ca:
        raise invalid(f"{path}: client_verify needs custom_ca, which signs the clients")
    return grpc.ssl_server_credentials(
        [(config.server_key.encode(), config.server_cert.encode())],
        root_certificates=config.custom_ca.encode() or None,
        require_client_auth=config.client_verify,
    )


def listen(
    server: grpc.aio.Server, addresses: list[str], credentials: grpc.ServerCredentials | None
) -> None:
    """Binds the addresses, with TLS when there are credentials.

    Raises:
        StatusError: UNAVAILABLE for an address that is taken, or PEM text that is none.
    """
    for address in addresses:
        try:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StatusError(Code.UNAVAILABLE, f"cannot listen on {address}: {error}") from error
