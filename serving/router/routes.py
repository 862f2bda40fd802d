"""Routes: which share of each model's calls the canary gets, as Envoy's file-based RDS.

A routing key always meets the same arm: the arm is a salted hash of `x-routing-key` (of the request
id for calls without one) against the canary's share. A growing share keeps the keys that were on
the canary and adds others; another salt draws independently.

The routes of a model, in order. `forced` and `split` exist as twins: the first captures, for the
percentage in Envoy's runtime key `perennial.capture_percent`; the second does not.

    forced    header `x-perennial-arm: canary|stable`, for testers; no fallback
    split     by share; a canary that is away, dies, refuses or lacks the model: stable, once
    default   gRPC without a model's header while several models are declared: stable, no experiment

While a model is shadowed, the captured `split` route also sends a copy of each call to the canary,
through a second listener of the same Envoy, so that the answer is captured too (route `shadow`).

gRPC hides the model's name in the body, so a call says `x-perennial-model: NAME`. While exactly one
model is declared, its routes also take the calls without that header. REST says it in the path.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from perennial.errors import Permanent, Retryable
from perennial.settings import Settings
from perennial.spec import NAME_FORM
from perennial.store import write_atomic

ROUTE_CONFIG: Final = "perennial"
CAPTURE_KEY: Final = "perennial.capture_percent"
VERSIONS_HEADER: Final = "x-perennial-versions"
"""On copies: the versions that the routes declare."""

TOTAL_WEIGHT: Final = 100_000
"""Resolution of a share: one in a hundred thousand. Constant, so that a growing share nests."""

_TYPE = "type.googleapis.com/envoy."
_SALT_FORM = re.compile(r"[A-Za-z0-9._-]{1,80}")
_SERVICE = "/tensorflow.serving.PredictionService/"
_LUA = "envoy.filters.http.lua"
_NO_CAPTURE = {
    _LUA: {"@type": f"{_TYPE}extensions.filters.http.lua.v3.LuaPerRoute", "disabled": True}
}
_COUNTS = ("shadow_percent", "stable_version", "canary_version", "hedge_after_ms")
_ONCE: dict[str, Any] = {
    "num_retries": 1,
    "retry_back_off": {"base_interval": "0.005s"},
    # Within a pool of several replicas: not the one that just failed.
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {
                "@type": f"{_TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
            },
        }
    ],
    "host_selection_retry_max_attempts": 3,
}
_RETRY_GRPC = {
    **_ONCE,
    # Predict changes nothing, so that a call whose server died under it (`reset`) is sent again.
    # 5 = NOT_FOUND: the canary has no such model (yet, or no more); stable does.
    "retry_on": "unavailable,cancelled,retriable-headers,connect-failure,refused-stream,reset",
    "retriable_headers": [{"name": "grpc-status", "string_match": {"exact": "5"}}],
}
_RETRY_REST = {
    **_ONCE,
    "retry_on": "retriable-status-codes,connect-failure,refused-stream,reset",
    "retriable_status_codes": [404, 503],
}


@dataclass(frozen=True)
class ModelRouting:
    """One model's split.

    Args:
        share: of the calls that the canary gets, 0 to 1; with 0 it gets none.
        salt: of the hash, one per episode: letters, digits, `.`, `_`, `-`.
        shadow_percent: of the calls that are copied to the canary as well, whoever answers; its
            answer is recorded and given to nobody. Only captured calls are copied.
        stable_version, canary_version: what a pool serves when it serves one version alone; 0 when
            it holds several, or is changing. REST replies name no version: the log has this one.
        hedge_after_ms: while the canary has a share: a call that isn't answered by then is asked
            again, of stable, and whoever answers first is heard; 0: never.

    Raises:
        Permanent: `router.share`, `router.salt` or `router.shadow`.
    """

    share: float
    salt: str
    shadow_percent: int = 0
    stable_version: int = 0
    canary_version: int = 0
    hedge_after_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or (self.share > 0 and self.canary_weight == 0):
            raise Permanent(
                "router.share",
                f"share {self.share!r} is neither 0 nor between {1 / TOTAL_WEIGHT:g} and 1",
                share=self.share,
            )
        if not _SALT_FORM.fullmatch(self.salt):
            raise Permanent(
                "router.salt", f"salt {self.salt!r} does not match {_SALT_FORM.pattern}"
            )
        if self.shadow_percent not in range(101):
            raise Permanent("router.shadow", f"{self.shadow_percent!r} is no percentage")

    @property
    def versions(self) -> str:
        return f"{self.stable_version}:{self.canary_version}"

    @property
    def canary_weight(self) -> int:
        """Of `TOTAL_WEIGHT`."""
        return round(self.share * TOTAL_WEIGHT)


@dataclass(frozen=True)
class DeclaredRoutes:
    """What a routes file declares: its version and each model's split."""

    version: str
    models: dict[str, ModelRouting]


def routes_path(settings: Settings) -> Path:
    """The file that Envoy watches."""
    return settings.run_dir / "router" / "routes.json"


def route_configuration(
    models: Mapping[str, ModelRouting],
    *,
    capture_percent: int = 100,
    max_duration_s: float = 60.0,
) -> dict[str, Any]:
    """The RouteConfiguration for `models`, as JSON.

    Args:
        models: by name; may be empty (everything goes to stable).
        capture_percent: share of the predict calls that are captured while nobody changed the
            runtime key.
        max_duration_s: longest call; a client's shorter grpc-timeout wins.

    Raises:
        Permanent: `router.model`, for a name that is no model's.
    """
    alone = next(iter(models)) if len(models) == 1 else None
    builder = _Builder(capture_percent, max_duration_s)
    routes: list[dict[str, Any]] = []
    for name, routing in sorted(models.items()):
        if not NAME_FORM.fullmatch(name):
            raise Permanent("router.model", f"{name!r} is not a model's name", model=name)
        header = {"name": "x-perennial-model", "string_match": {"exact": name}}
        routes += builder.grpc(name, routing, [header])
        if name == alone:
            absent = {"name": "x-perennial-model", "present_match": True, "invert_match": True}
            routes += builder.grpc(name, routing, [absent])
        routes += builder.rest(name, routing)
    routes += builder.rest_of_all()
    return {
        "@type": f"{_TYPE}config.route.v3.RouteConfiguration",
        "name": ROUTE_CONFIG,
        # Without it a route to an unknown cluster is accepted, and every call on it fails.
        "validate_clusters": True,
        "virtual_hosts": [
            {
                "name": "models",
                "domains": ["*"],
                "routes": routes,
                "include_attempt_count_in_response": True,
            }
        ],
        "response_headers_to_add": [
            {
                "header": {
                    "key": "x-perennial-arm",
                    "value": "%UPSTREAM_METADATA(perennial:arm)%",
                },
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
        "metadata": {
            "filter_metadata": {
                "perennial": {"models": {name: asdict(routing) for name, routing in models.items()}}
            }
        },
    }


def write_routes(
    path: Path,
    models: Mapping[str, ModelRouting],
    *,
    capture_percent: int = 100,
) -> str:
    """Replaces the routes that Envoy watches, atomically; returns the new version.

    Writing what is already declared makes a new version too. `wait_applied` says when it is in
    force: some milliseconds later.
    """
    version = str(time.time_ns())
    resource = route_configuration(models, capture_percent=capture_percent)
    content = {"version_info": version, "resources": [resource]}
    write_atomic(path, json.dumps(content, indent=1).encode())
    return version


def read_routes(path: Path) -> DeclaredRoutes:
    """What the routes file declares.

    Raises:
        Permanent: `router.routes`, when the file is missing or not one of ours.
    """
    try:
        content = json.loads(path.read_text())
        declared = content["resources"][0]["metadata"]["filter_metadata"]["perennial"]["models"]
        models = {
            name: ModelRouting(
                float(entry["share"]),
                entry["salt"],
                *(int(entry.get(field, 0)) for field in _COUNTS),
            )
            for name, entry in declared.items()
        }
        return DeclaredRoutes(content["version_info"], models)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Permanent(
            "router.routes",
            f"{path} declares no routes: {error}",
            hint="write them with serving.router.routes.write_routes",
        ) from error


def wait_applied(admin_url: str, version: str, deadline_s: float) -> None:
    """Waits until Envoy routes by `version`, or by a later one.

    Raises:
        Retryable: `router.rejected`, when Envoy refused the file (the old routes are in force);
            `router.unreachable`, when Envoy did not answer or did not take it before the deadline.
    """
    deadline = time.monotonic() + deadline_s
    problem, refused_before, refused = "no answer", None, 0
    with httpx.Client(base_url=admin_url, timeout=max(deadline_s, 0.1), trust_env=False) as client:
        while True:
            try:
                in_force, refused = _state(client)
            except (httpx.HTTPError, ValueError) as error:
                problem = str(error) or type(error).__name__
            else:
                if in_force >= int(version):
                    return
                refused_before = refused if refused_before is None else refused_before
                problem = f"routes {in_force or 'none'} are in force"
            late = time.monotonic() >= deadline
            # Envoy counts its refusals, it doesn't name them. One that was counted before the first
            # look is ours if the version has not come into force by the deadline.
            if refused_before is not None and refused > (0 if late else refused_before):
                raise Retryable(
                    "router.rejected",
                    f"Envoy at {admin_url} refused routes {version}: {problem}",
                    hint="its log says why; the routes before it stay in force",
                    version=version,
                )
            if late:
                raise Retryable(
                    "router.unreachable",
                    f"Envoy at {admin_url} did not take routes {version} within "
                    f"{deadline_s:g} s: {problem}",
                    hint="is the router running, and does it watch this file?",
                    version=version,
                )
            time.sleep(0.01)


def _state(client: httpx.Client) -> tuple[int, int]:
    """(version in force or 0, how many files were refused since Envoy started)."""
    prefix = f"http.router.rds.{ROUTE_CONFIG}."
    reply = client.get("/stats", params={"filter": f"^{re.escape(prefix)}"})
    reply.raise_for_status()
    stats = dict(
        line.removeprefix(prefix).split(": ", 1)
        for line in reply.text.splitlines()
        if line.startswith(prefix)
    )
    refused = int(stats.get("update_rejected", 0)) + int(stats.get("update_failure", 0))
    return int(stats.get("version_text", "").strip('"') or 0), refused


def shadow_routes(max_duration_s: float = 5.0) -> dict[str, Any]:
    """Where copies go: to the canary, whatever version or label the path names."""
    timeout = {"timeout": f"{max_duration_s:g}s"}
    rewrite = {
        "pattern": {"regex": r"^(/v1/models/[^/:?]+)(/versions/\d+|/labels/[^/:?]+)?(:.*)$"},
        "substitution": r"\1\3",
    }
    rest = {"cluster": "canary_shadow_rest", "regex_rewrite": rewrite, **timeout}
    routes = [
        {
            "name": "shadow",
            "match": {"prefix": _SERVICE},
            "route": {"cluster": "canary_shadow", **timeout},
        },
        {"name": "shadow", "match": {"prefix": "/v1/models/"}, "route": rest},
    ]
    return {
        "name": "shadow",
        "virtual_hosts": [{"name": "models", "domains": ["*"], "routes": routes}],
    }


def _mirror(cluster: str, percent: int) -> dict[str, Any]:
    # The random number is the capture's own: of 10 % captured and 5 % mirrored calls, all mirrored
    # ones are among the captured ones.
    fraction = {"default_value": {"numerator": percent, "denominator": "HUNDRED"}}
    return {
        "cluster": cluster,
        "runtime_fraction": fraction,
        "disable_shadow_host_suffix_append": True,
    }


@dataclass(frozen=True)
class _Builder:
    capture_percent: int
    max_duration_s: float

    def grpc(
        self, model: str, routing: ModelRouting, headers: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        captured = {"path": f"{_SERVICE}Predict"}
        rest = {"prefix": _SERVICE}
        return self._of_model(model, routing, headers, captured, rest, "", _RETRY_GRPC)

    def rest(self, model: str, routing: ModelRouting) -> list[dict[str, Any]]:
        base = rf"/v1/models/{model}(/versions/\d+|/labels/[^/:]+)?"
        post = [{"name": ":method", "string_match": {"exact": "POST"}}]
        captured = {"safe_regex": {"regex": f"{base}:predict"}}
        rest = {"safe_regex": {"regex": f"{base}:(predict|classify|regress)"}}
        return self._of_model(model, routing, post, captured, rest, "_rest", _RETRY_REST)

    def rest_of_all(self) -> list[dict[str, Any]]:
        """What belongs to no experiment: gRPC for no declared model, status over REST."""
        grpc = self._route("default", "", {"cluster": "stable"})
        return [
            *self._twins(grpc, [], {"path": f"{_SERVICE}Predict"}, {"prefix": _SERVICE}),
            {
                **self._route("default", "", {"cluster": "stable_rest"}),
                "match": {"prefix": "/v1/models/"},
                "typed_per_filter_config": _NO_CAPTURE,
            },
        ]

    def _of_model(
        self,
        model: str,
        routing: ModelRouting,
        headers: list[dict[str, Any]],
        captured: dict[str, Any],
        rest: dict[str, Any],
        suffix: str,
        retry: dict[str, Any],
    ) -> list[dict[str, Any]]:
        routes = []
        for arm in ("canary", "stable"):
            forced = {"name": "x-perennial-arm", "string_match": {"exact": arm}}
            route = self._route("forced", model, {"cluster": f"{arm}{suffix}"}, routing)
            routes += self._twins(route, [*headers, forced], captured, rest)
        rewrite = {"pattern": {"regex": "^(.*)$"}, "substitution": f"{routing.salt}:\\1"}
        split: dict[str, Any] = {
            "weighted_clusters": {
                "use_hash_policy": True,
                "clusters": [
                    {"name": f"stable{suffix}", "weight": TOTAL_WEIGHT - routing.canary_weight},
                    {"name": f"canary_or_stable{suffix}", "weight": routing.canary_weight},
                ],
            },
            # Without a key the request id decides: a call that is sent again meets the same arm,
            # which doesn't depend on the random number that the capture is sampled with.
            "hash_policy": [
                {
                    "header": {"header_name": "x-routing-key", "regex_rewrite": rewrite},
                    "terminal": True,
                },
                {"header": {"header_name": "x-request-id", "regex_rewrite": rewrite}},
            ],
            "retry_policy": retry,
        }
        if routing.share and routing.hedge_after_ms:
            limit = {"per_try_timeout": f"{routing.hedge_after_ms / 1e3:g}s"}
            split["retry_policy"] = {**retry, **limit}
            split["hedge_policy"] = {"hedge_on_per_try_timeout": True}
        route = self._route("split", model, split, routing)
        sampled, unsampled = self._twins(route, headers, captured, rest)
        if routing.shadow_percent:
            # Only the captured twin: every copy has the row of a live call to be joined to.
            mirror = _mirror(f"shadow{suffix}", routing.shadow_percent)
            sampled["route"] = {**sampled["route"], "request_mirror_policies": [mirror]}
            # The copy meets another route, which knows no model: it brings the versions along.
            sampled["request_headers_to_add"] = [
                {
                    "header": {"key": VERSIONS_HEADER, "value": routing.versions},
                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                }
            ]
        return [*routes, sampled, unsampled]

    def _route(
        self, name: str, model: str, action: dict[str, Any], routing: ModelRouting | None = None
    ) -> dict[str, Any]:
        longest = f"{self.max_duration_s:g}s"
        # gRPC: the client's grpc-timeout, up to ours. REST has no such header and ignores it.
        limits = {"timeout": longest, "max_stream_duration": {"grpc_timeout_header_max": longest}}
        told = {"model": model}
        if routing is not None:
            told["versions"] = routing.versions
        return {
            "name": name,
            "route": {**limits, **action},
            "metadata": {"filter_metadata": {"perennial": told}},
        }

    def _twins(
        self,
        route: dict[str, Any],
        headers: list[dict[str, Any]],
        captured: dict[str, Any],
        rest: dict[str, Any],
    ) -> list[dict[str, Any]]:
        sampled = {
            "runtime_key": CAPTURE_KEY,
            "default_value": {"numerator": self.capture_percent, "denominator": "HUNDRED"},
        }
        return [
            {**route, "match": {**captured, "headers": headers, "runtime_fraction": sampled}},
            {
                **route,
                "match": {**rest, "headers": headers},
                "typed_per_filter_config": _NO_CAPTURE,
            },
        ]
