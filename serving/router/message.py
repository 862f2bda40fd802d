"""How Envoy's configuration is written: typed messages as JSON."""

from __future__ import annotations

from typing import Any, Final

TYPE: Final = "type.googleapis.com/envoy."


def typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    """An extension and its configuration, of message type `envoy.<kind>`."""
    return {"name": name, "typed_config": {"@type": TYPE + kind, **fields}}


def address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
