"""The side of the router that faces clients: who may call, how often, and what they may say."""

from __future__ import annotations

import socket
import ssl
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from perennial.errors import Permanent
from perennial.settings import Settings
from serving.router import edge, envoy
from serving.router.routes import ModelRouting
from tests.support.certificates import Authority, Pair
from tests.support.edge import jwks, place, private, token
from tests.support.traffic import Pool, Router, eventually, make_settings, routing

OK = grpc.StatusCode.OK
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED

KEYS = "alice key-of-alice-000001\n# a comment\nbob   key-of-bob-000000002 # mine\n"


def tls(folder: Path) -> dict[str, Any]:
    place(folder / "tls", Authority(), "router", mutual=False)
    return {"router_tls_dir": str(folder / "tls")}


def mutual_tls(folder: Path) -> dict[str, Any]:
    place(folder / "tls", Authority(), "router")
    return {"router_tls_dir": str(folder / "tls")}


def keys(folder: Path) -> dict[str, Any]:
    return {"router_api_keys": str(private(folder / "keys", KEYS))}


def tokens(folder: Path) -> dict[str, Any]:
    issuer = {"router_jwt_issuer": "perennial", "router_jwt_audience": "router"}
    return {"router_jwks": str(jwks(folder / "jwks.json")), **issuer}


def rate(_: Path) -> dict[str, Any]:
    return {"router_rate_per_s": 5}


def the_token(folder: Path) -> dict[str, Any]:
    return {"router_tester_token": str(private(folder / "token", "a-token-of-testers"))}


Variant = Callable[[Path], dict[str, Any]]


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (tls,),
        (mutual_tls,),
        (keys,),
        (tokens,),
        (rate,),
        (the_token,),
        (mutual_tls, keys, rate, the_token),
        (tls, tokens, rate, the_token),
    ],
    ids=lambda parts: "-".join(part.__name__ for part in parts) or "plain",
)
@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_envoy_accepts_each_form(tmp_path: Path, parts: tuple[Variant, ...], bind: str) -> None:
    given: dict[str, Any] = {}
    for part in parts:
        given |= part(tmp_path)
    settings = make_settings(tmp_path, router_bind=bind, router_open=True, **given)
    try:
        envoy.write_bootstrap(settings)
        envoy.validate(settings)
    finally:
        for path in settings.spool_dir.glob("*"):
            path.unlink()
        settings.spool_dir.rmdir()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The ports of two pools that all routers of this file stand before."""
    settings = make_settings(tmp_path_factory.mktemp("pools"))
    stable, canary = Pool(version=1), Pool(version=2)
    with (
        stable.serving(settings.stable_port, settings.stable_rest_port),
        canary.serving(settings.canary_port, settings.canary_rest_port),
    ):
        yield {
            name: getattr(settings, name)
            for name in ("stable_port", "stable_rest_port", "canary_port", "canary_rest_port")
        }


@contextmanager
def router_of(folder: Path, pools: dict[str, int], **given: Any) -> Iterator[Router]:
    """A router that answers by stable alone."""
    with routing(make_settings(folder, **pools, **given)) as router:
        router.declare({"trips": ModelRouting(0.0, "e1")})
        yield router


def test_only_callers_with_a_key_are_answered_each_with_its_own_rate(
    tmp_path: Path, pools: dict[str, int]
) -> None:
    with router_of(tmp_path, pools, **keys(tmp_path), router_rate_per_s=5) as router:
        alice, bob = {"x-api-key": "key-of-alice-000001"}, {"x-api-key": "key-of-bob-000000002"}
        assert router.predict().code == UNAUTHENTICATED
        assert router.predict(headers={"x-api-key": "another"}).code == UNAUTHENTICATED
        spoofed = {"x-perennial-client": "alice"}
        assert router.predict(headers=spoofed).code == UNAUTHENTICATED
        assert router.rest("/v1/models/trips").status_code == 401
        codes = Counter(router.predict(headers={**alice, **spoofed}).code for _ in range(20))
        assert codes[OK] >= 5
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] >= 5
        assert codes.total() == codes[OK] + codes[grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert router.rest("/v1/models/trips", **alice).status_code == 429
        assert router.predict(headers=bob).code == OK
        # What was refused here is no failure of the model's.
        counted = eventually(
            lambda: [n for n in router.stats("perennial.requests") if ".model.trips." in n],
            "the answered ones are counted",
        )
        assert {name.partition(".grpc_status.")[2].split(".")[0] for name in counted} == {"0"}
        dump = httpx.get(envoy.admin_url(router.settings) + "/config_dump", trust_env=False).text
        assert "key-of-alice" not in dump
    folder = envoy.bootstrap_path(router.settings).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_without_keys_the_rate_is_by_address_whatever_a_client_says(
    tmp_path: Path, pools: dict[str, int]
) -> None:
    with router_of(tmp_path, pools, router_rate_per_s=5) as router:
        codes = Counter(
            router.predict(headers={"x-forwarded-for": f"10.0.0.{n}"}).code for n in range(20)
        )
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] >= 5
        eventually(lambda: router.predict().code == OK, "a second later")


def test_only_callers_with_a_token_are_answered(tmp_path: Path, pools: dict[str, int]) -> None:
    with router_of(tmp_path, pools, **tokens(tmp_path)) as router:

        def code(sent: str) -> grpc.StatusCode:
            return router.predict(headers={"authorization": f"Bearer {sent}"}).code

        claims = {"iss": "perennial", "aud": "router"}
        assert router.predict().code == UNAUTHENTICATED
        assert code(token("alice", **claims)) == OK
        assert code(token("alice", b"x" * 32, **claims)) == UNAUTHENTICATED
        assert code(token("alice", **{**claims, "iss": "others"})) == UNAUTHENTICATED
        assert code(token("alice", **{**claims, "aud": "others"})) != OK


def test_testers_are_known_by_their_token(tmp_path: Path, pools: dict[str, int]) -> None:
    canary = {"x-perennial-arm": "canary"}
    with router_of(tmp_path, pools, **the_token(tmp_path)) as router:
        assert router.predict(headers=canary).arm == "stable"
        assert router.predict(headers={**canary, edge.TESTER_HEADER: "wrong"}).arm == "stable"
        known = {**canary, edge.TESTER_HEADER: "a-token-of-testers"}
        assert router.predict(headers=known).arm == "canary"
        log = envoy.capture_log(router.settings)
        eventually(lambda: log.exists() and b"\tforced\t" in log.read_bytes(), "it is captured")
        assert b"a-token-of-testers" not in log.read_bytes()


def test_beyond_loopback_nobody_names_the_arm_unasked(
    tmp_path: Path, pools: dict[str, int]
) -> None:
    with router_of(tmp_path, pools, router_bind="0.0.0.0", **keys(tmp_path)) as router:
        headers = {"x-perennial-arm": "canary", "x-api-key": "key-of-alice-000001"}
        assert router.predict(headers=headers).arm == "stable"


def test_mutual_tls_and_a_certificate_that_is_replaced(
    tmp_path: Path, pools: dict[str, int]
) -> None:
    authority, others = Authority(), Authority("others")
    folder = tmp_path / "tls"
    place(folder, authority, "router-1")
    settings = make_settings(tmp_path, **pools, router_tls_dir=str(folder))
    client = authority.issue("client")
    known = grpc.ssl_channel_credentials(authority.certificate, client.key, client.certificate)
    with routing(settings, known) as router:
        assert router.predict().code == OK
        serving = server_name(settings, authority, client)
        assert serving == "router-1"
        stranger = others.issue("stranger")
        for refused in (
            grpc.ssl_channel_credentials(authority.certificate),
            grpc.ssl_channel_credentials(authority.certificate, stranger.key, stranger.certificate),
        ):
            with grpc.secure_channel(f"127.0.0.1:{settings.router_port}", refused) as channel:
                with pytest.raises(grpc.FutureTimeoutError):
                    grpc.channel_ready_future(channel).result(1)
        place(folder, authority, "router-2")
        eventually(
            lambda: server_name(settings, authority, client) == "router-2",
            "new handshakes get the new certificate",
        )
        cut = "http.router.downstream_cx_destroy_local"
        assert router.predict().code == OK
        assert int(router.stats(cut)[cut]) == 0


def server_name(settings: Settings, authority: Authority, client: Pair) -> str:
    """The name in the certificate that the router shows."""
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    with tempfile.NamedTemporaryFile() as file:
        file.write(client.certificate + client.key)
        file.flush()
        context.load_cert_chain(file.name)
    with socket.create_connection(("127.0.0.1", settings.router_port)) as raw:
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as secure:
            subject = secure.getpeercert()["subject"]
    return dict(pair for entry in subject for pair in entry)["commonName"]


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"bind": "0.0.0.0"}, "router.open", "PERENNIAL_ROUTER_API_KEYS"),
        ({"router_bind": "192.0.2.1"}, "router.open", "192.0.2.1"),
        ({"router_bind": "0.0.0.0", "router_tls_dir": "{tls}"}, "router.open", "clients.crt"),
        ({"router_api_keys": "{keys}", "router_jwks": "{jwks}"}, "router.two_ways", "unset one"),
        ({"router_tls_dir": "{empty}"}, "router.tls", "server.crt is missing"),
        ({"router_api_keys": "{missing}"}, "router.secret", "is no file"),
        ({"router_api_keys": "{open}"}, "router.secret", "chmod 600"),
        ({"router_api_keys": "{repository}"}, "router.secret", "lies in a repository"),
        ({"router_api_keys": "{short}"}, "router.secret", "line 2"),
        ({"router_api_keys": "{twice}"}, "router.secret", "line 2: two clients"),
        ({"router_api_keys": "{empty_file}"}, "router.secret", "holds no key"),
        ({"router_tester_token": "{short_token}"}, "router.secret", "16 letters"),
    ],
)
def test_settings_that_would_open_the_router_are_refused(
    tmp_path: Path, given: dict[str, str], code: str, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "tls").mkdir()
    place(tmp_path / "tls", Authority(), "router", mutual=False)
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    contents = {
        "keys": KEYS,
        "jwks": "{}",
        "open": KEYS,
        "repository/keys": KEYS,
        "short": "alice key-of-alice-000001\nbob short",
        "twice": "alice key-of-alice-000001\nbob key-of-alice-000001",
        "empty_file": "# nobody\n",
        "short_token": "short",
    }
    for name, content in contents.items():
        private(tmp_path / name, content)
    (tmp_path / "open").chmod(0o640)
    paths = {name: tmp_path / name for name in [*contents, "empty", "missing", "tls"]}
    paths["repository"] = tmp_path / "repository" / "keys"
    settings = make_settings(tmp_path, **{k: v.format(**paths) for k, v in given.items()})
    with pytest.raises(Permanent) as error:
        envoy.write_bootstrap(settings)
    assert error.value.code == code
    assert says in str(error.value)
    for secret in ("key-of-alice", "short\n"):
        assert secret not in str(error.value)
    assert not settings.spool_dir.exists()
