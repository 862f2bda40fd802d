"""Who may call, how often, and what they may say: the listener's side that faces clients.

    TLS       `router_tls_dir` holds server.crt, server.key and, for mTLS, clients.crt. Envoy reads
              them by SDS: what is renamed into the folder is used for new handshakes.
    keys      `router_api_keys`: a file of lines `client key`, sent as `x-api-key`; or
    JWT       `router_jwks`: a file of public keys; sent as `authorization: Bearer …`.
    rate      `router_rate_per_s` calls per client: per key or subject, else per address.
    testers   who may name the arm (`x-perennial-arm`): callers of a router on loopback; elsewhere
              those who send `x-perennial-tester` with the token in `router_tester_token`. From
              everybody else the header is removed before a route is chosen.

A router that listens beyond loopback without mTLS, keys or JWT is refused.
"""

from __future__ import annotations

import ipaddress
import json
import re
import stat
from pathlib import Path
from typing import Any, Final

from perennial.errors import Permanent
from perennial.settings import Settings
from perennial.store import write_atomic
from serving.router.message import TYPE, typed
from serving.router.routes import VERSIONS_HEADER

CLIENT_HEADER: Final = "x-perennial-client"
"""Who calls, as the key or the token says; never taken from a client."""

TESTER_HEADER: Final = "x-perennial-tester"
_ARM_HEADER: Final = "x-perennial-arm"
_SECRETS: Final = ("server", "clients")
_WORD: Final = re.compile(r"[A-Za-z0-9._~+/=@-]{1,200}")
_MIN_SECRET: Final = 16
_MAX_CLIENTS: Final = 10_000

_TESTERS: Final = """\
function envoy_on_request(handle)
  local headers = handle:headers()
  if headers:get("{tester}") ~= "{token}" then
    headers:remove("{arm}")
  end
  headers:remove("{tester}")
end
"""


def check(settings: Settings) -> None:
    """Refuses settings that would open the router by mistake, and files that can't be used.

    Raises:
        Permanent: `router.open`, `router.two_ways`, `router.tls`, `router.secret`.
    """
    host = listen_address(settings)
    if settings.router_api_keys and settings.router_jwks:
        raise Permanent(
            "router.two_ways",
            "PERENNIAL_ROUTER_API_KEYS and PERENNIAL_ROUTER_JWKS are both set",
            hint="callers identify themselves in one way: unset one of the two",
        )
    if settings.router_tls_dir:
        _check_tls(Path(settings.router_tls_dir))
    for name in ("router_api_keys", "router_jwks", "router_tester_token"):
        if getattr(settings, name):
            _check_file(f"PERENNIAL_{name.upper()}", Path(getattr(settings, name)))
    if settings.router_api_keys:
        api_keys(Path(settings.router_api_keys))
    if settings.router_tester_token:
        _token(Path(settings.router_tester_token))
    if not (is_loopback(host) or _knows_callers(settings) or settings.router_open):
        raise Permanent(
            "router.open",
            f"the router would listen on {host} and answer anybody",
            hint="set PERENNIAL_ROUTER_TLS_DIR (with clients.crt), PERENNIAL_ROUTER_API_KEYS or "
            "PERENNIAL_ROUTER_JWKS; PERENNIAL_ROUTER_OPEN=true if anybody is meant",
            bind=host,
        )


def listen_address(settings: Settings) -> str:
    """The address that clients reach the router at."""
    return settings.router_bind or settings.bind


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_keys(path: Path) -> dict[str, str]:
    """key → client, of a file of lines `client key`; `#` begins a comment.

    Raises:
        Permanent: `router.secret`, naming the line and never the key.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not all(map(_WORD.fullmatch, words)) or len(words[1]) < _MIN_SECRET:
            raise _secret(
                f"{path}, line {number} is not `client key`, {_MIN_SECRET} letters or more"
            )
        if words[1] in keys:
            raise _secret(f"{path}, line {number}: two clients have the same key")
        keys[words[1]] = words[0]
    if not keys:
        raise _secret(f"{path} holds no key")
    return keys


def early_mutations(settings: Settings) -> list[dict[str, Any]]:
    """Removes what no client may say, before a route is chosen."""
    removed = [CLIENT_HEADER, VERSIONS_HEADER]
    if not settings.router_tester_token:
        removed.append(TESTER_HEADER)
        if not is_loopback(listen_address(settings)):
            removed.append(_ARM_HEADER)
    return [
        typed(
            "envoy.http.early_header_mutation.header_mutation",
            "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[{"remove": name} for name in removed],
        )
    ]


def filters(settings: Settings) -> list[dict[str, Any]]:
    """The HTTP filters that decide whether a call goes on."""
    found = []
    if settings.router_api_keys:
        found.append(_api_key_filter(api_keys(Path(settings.router_api_keys))))
    if settings.router_jwks:
        found.append(_jwt_filter(settings))
    if settings.router_rate_per_s:
        found.append(_rate_filter(settings))
    if settings.router_tester_token:
        token = _token(Path(settings.router_tester_token))
        code = _TESTERS.format(tester=TESTER_HEADER, token=token, arm=_ARM_HEADER)
        found.append(
            # Named apart from the capture, which routes switch off by the filter's name.
            typed(
                "perennial.testers",
                "extensions.filters.http.lua.v3.Lua",
                default_source_code={"inline_string": code},
            )
        )
    return found


def write_secrets(settings: Settings, folder: Path) -> None:
    """Writes the SDS files: where the certificates are, and which folder to watch."""
    if not settings.router_tls_dir:
        return
    tls = Path(settings.router_tls_dir).absolute()
    watched = {"watched_directory": {"path": str(tls)}}
    kind = {"@type": TYPE + "extensions.transport_sockets.tls.v3.Secret"}
    contents = {
        "server": {
            "tls_certificate": {
                "certificate_chain": {"filename": str(tls / "server.crt")},
                "private_key": {"filename": str(tls / "server.key")},
                **watched,
            }
        },
        "clients": {
            "validation_context": {"trusted_ca": {"filename": str(tls / "clients.crt")}, **watched}
        },
    }
    for name in _SECRETS:
        resource = {**kind, "name": name, **contents[name]}
        write_atomic(folder / f"sds-{name}.json", json.dumps({"resources": [resource]}).encode())


def transport_socket(settings: Settings, folder: Path) -> dict[str, Any]:
    """The listener's TLS, as a part of its filter chain; empty without TLS."""
    if not settings.router_tls_dir:
        return {}
    is_mutual = (Path(settings.router_tls_dir) / "clients.crt").exists()
    server, clients = [
        {
            "name": name,
            "sds_config": {
                "path_config_source": {"path": str(folder / f"sds-{name}.json")},
                "resource_api_version": "V3",
            },
        }
        for name in _SECRETS
    ]
    context: dict[str, Any] = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [server],
    }
    if is_mutual:
        context["validation_context_sds_secret_config"] = clients
    socket = typed(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context=context,
        require_client_certificate=is_mutual,
    )
    return {"transport_socket": socket}


def _token(path: Path) -> str:
    token = path.read_text().strip()
    if not _WORD.fullmatch(token) or len(token) < _MIN_SECRET:
        raise _secret(f"{path} is not one word of {_MIN_SECRET} letters or more")
    return token


def _knows_callers(settings: Settings) -> bool:
    mutual = settings.router_tls_dir and (Path(settings.router_tls_dir) / "clients.crt").exists()
    return bool(mutual or settings.router_api_keys or settings.router_jwks)


def _api_key_filter(keys: dict[str, str]) -> dict[str, Any]:
    return typed(
        "envoy.filters.http.api_key_auth",
        "extensions.filters.http.api_key_auth.v3.ApiKeyAuth",
        credentials=[{"key": key, "client": client} for key, client in keys.items()],
        key_sources=[{"header": "x-api-key"}],
        forwarding={"header": CLIENT_HEADER, "hide_credentials": True},
    )


def _jwt_filter(settings: Settings) -> dict[str, Any]:
    provider: dict[str, Any] = {
        "local_jwks": {"filename": str(Path(settings.router_jwks).absolute())},
        "claim_to_headers": [{"header_name": CLIENT_HEADER, "claim_name": "sub"}],
    }
    if settings.router_jwt_issuer:
        provider["issuer"] = settings.router_jwt_issuer
    if settings.router_jwt_audience:
        provider["audiences"] = [settings.router_jwt_audience]
    return typed(
        "envoy.filters.http.jwt_authn",
        "extensions.filters.http.jwt_authn.v3.JwtAuthentication",
        providers={"callers": provider},
        rules=[{"match": {"prefix": "/"}, "requires": {"provider_name": "callers"}}],
    )


def _rate_filter(settings: Settings) -> dict[str, Any]:
    """A bucket per client of a second's calls; over it RESOURCE_EXHAUSTED, REST: 429."""
    named = {"request_headers": {"header_name": CLIENT_HEADER, "descriptor_key": "client"}}
    if settings.router_api_keys or settings.router_jwks:
        action, key = named, "client"
    else:
        action, key = {"remote_address": {}}, "remote_address"
    rate = settings.router_rate_per_s
    bucket = {"max_tokens": rate, "tokens_per_fill": rate, "fill_interval": "1s"}
    everything = {"max_tokens": 1 << 30, "tokens_per_fill": 1 << 30, "fill_interval": "1s"}
    on = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    return typed(
        "envoy.filters.http.local_ratelimit",
        "extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="router",
        token_bucket=everything,
        filter_enabled=on,
        filter_enforced=on,
        rate_limits=[{"actions": [action]}],
        # An entry without a value is a bucket per value.
        descriptors=[{"entries": [{"key": key}], "token_bucket": bucket}],
        max_dynamic_descriptors=_MAX_CLIENTS,
        rate_limited_as_resource_exhausted=True,
    )


def _check_tls(folder: Path) -> None:
    for name in ("server.crt", "server.key"):
        if not (folder / name).is_file():
            raise Permanent(
                "router.tls",
                f"PERENNIAL_ROUTER_TLS_DIR: {folder / name} is missing",
                hint="server.crt and server.key in PEM; clients.crt as well for mTLS",
            )
    _check_file("PERENNIAL_ROUTER_TLS_DIR", folder / "server.key")


def _check_file(variable: str, path: Path) -> None:
    """A file of secrets is private and in no repository."""
    if not path.is_file():
        raise _secret(f"{variable}: {path} is no file")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise _secret(f"{variable}: others can read {path}", hint=f"chmod 600 {path}")
    if any((parent / ".git").exists() for parent in path.resolve().parents):
        raise _secret(f"{variable}: {path} lies in a repository", hint="keep secrets outside of it")


def _secret(message: str, hint: str = "") -> Permanent:
    return Permanent("router.secret", message, hint=hint)
