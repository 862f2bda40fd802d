"""A small client of Airflow's REST API: what the command line needs, no more."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from perennial.errors import NeedsHuman, Permanent, Retryable
from perennial.settings import Settings


def base_url(settings: Settings) -> str:
    return settings.airflow_url or f"http://{settings.bind}:{settings.airflow_port}"


def password_file(settings: Settings) -> Path:
    """Where the local stack keeps Airflow's users; mode 0600."""
    return settings.home / "airflow" / "passwords.json"


def password(settings: Settings) -> str:
    """The CLI user's password: `PERENNIAL_AIRFLOW_PASSWORD`, else the local stack's file.

    Raises:
        NeedsHuman: `airflow.password`.
    """
    if given := os.environ.get("PERENNIAL_AIRFLOW_PASSWORD"):
        return given
    try:
        return str(json.loads(password_file(settings).read_text())[settings.airflow_user])
    except (OSError, ValueError, KeyError) as error:
        raise NeedsHuman(
            "airflow.password",
            f"no password for Airflow's user {settings.airflow_user!r}",
            hint="set PERENNIAL_AIRFLOW_PASSWORD, or start the local stack with `make up`",
        ) from error


def health(settings: Settings) -> dict[str, Any]:
    """Component -> {"status": "healthy", …}. Raises Retryable `airflow.unreachable`."""
    return dict(_send(settings, "GET", "/api/v2/monitor/health"))


class AirflowApi:
    """Authenticated calls. Raises Retryable `airflow.unreachable`, Permanent `airflow.refused`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        answer = _send(
            settings,
            "POST",
            "/auth/token",
            {"username": settings.airflow_user, "password": password(settings)},
        )
        self._token = str(answer["access_token"])

    def trigger(
        self, dag_id: str, *, conf: dict[str, Any], partition_key: str | None = None
    ) -> str:
        """Starts a run; returns its id."""
        body: dict[str, Any] = {"logical_date": None, "conf": conf}
        if partition_key is not None:
            body["partition_key"] = partition_key
        return str(self.send("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        return self.send("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}")

    def dag_ids(self) -> set[str]:
        return {dag["dag_id"] for dag in self.send("GET", "/api/v2/dags?limit=200")["dags"]}

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return _send(self._settings, method, path, body, self._token)


def _send(
    settings: Settings,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    token: str = "",
) -> dict[str, Any]:
    import httpx

    url = base_url(settings) + path
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(method, url, json=body, headers=headers, timeout=30)
    except httpx.HTTPError as error:
        raise Retryable(
            "airflow.unreachable",
            f"Airflow at {base_url(settings)} does not answer: {error}",
            hint="`make up` starts the local one; PERENNIAL_AIRFLOW_URL names another",
        ) from error
    if answer.status_code >= 500:
        raise Retryable("airflow.unreachable", f"{method} {url}: HTTP {answer.status_code}")
    if answer.status_code >= 400:
        raise Permanent("airflow.refused", f"{method} {url}: {answer.text[:300]}")
    return dict(answer.json())
