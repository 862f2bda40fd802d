"""Airflow on one machine: its four components, their environment, and its database."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from perennial.airflow_api import health, password_file
from perennial.errors import NeedsHuman
from perennial.local.postgres import database_url
from perennial.local.supervisor import Program, port_answers
from perennial.settings import Settings

REPOSITORY = Path(__file__).parent.parent.parent


def environment(settings: Settings) -> dict[str, str]:
    """What every Airflow process needs, on top of this process' environment."""
    home = settings.home / "airflow"
    url = f"http://{settings.bind}:{settings.airflow_port}"
    bundle = [
        {
            "name": "perennial",
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(REPOSITORY / "dags"), "refresh_interval": 30},
        }
    ]
    return {
        **os.environ,
        **settings.as_environment(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": "3",
        "AIRFLOW__CORE__DAGS_FOLDER": str(REPOSITORY / "dags"),
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{settings.airflow_user}:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(password_file(settings)),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database_url(settings, "airflow"),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundle),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
        "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
        # What a killed scheduler or worker left running is found within a minute, not in five.
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "10",
        "AIRFLOW__API__HOST": settings.bind,
        "AIRFLOW__API__PORT": str(settings.airflow_port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__SECRET_KEY": _secret(settings, "airflow_secret_key"),
        "AIRFLOW__API_AUTH__JWT_SECRET": _secret(settings, "airflow_jwt_secret"),
        # Above the longest training task: refreshing is known to fail for some.
        "AIRFLOW__EXECUTION_API__JWT_EXPIRATION_TIME": "90000",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(settings.airflow_scheduler_log_port),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(settings.airflow_triggerer_log_port),
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    }


def prepare(settings: Settings) -> None:
    """Writes the password file (once) and migrates Airflow's database.

    Raises:
        NeedsHuman: `airflow.migrate`, with the end of what it printed.
    """
    path = password_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({settings.airflow_user: secrets.token_urlsafe(12)}, file)
    done = subprocess.run(
        [*_airflow(), "db", "migrate"],
        env=environment(settings),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise NeedsHuman("airflow.migrate", f"airflow db migrate failed: {' | '.join(tail)}")


def programs(settings: Settings) -> list[Program]:
    """The four components. Stopped in the order scheduler, triggerer, dag-processor, api-server."""
    env = environment(settings)

    def healthy(component: str) -> bool:
        return health(settings).get(component, {}).get("status") == "healthy"

    def program(name: str, rank: int, ready: str | None) -> Program:
        return Program(
            name=f"airflow-{name}",
            command=[*_airflow(), name],
            environment=env,
            ready=(lambda: healthy(ready))
            if ready
            else port_answers(settings.bind, settings.airflow_port),
            ready_s=240,
            stop_rank=rank,
        )

    return [
        program("api-server", 10, None),
        program("scheduler", 13, "scheduler"),
        program("dag-processor", 11, "dag_processor"),
        program("triggerer", 12, "triggerer"),
    ]


def _airflow() -> list[str]:
    return [sys.executable, "-m", "airflow"]


def _secret(settings: Settings, name: str) -> str:
    """A secret that all components share and a restart keeps; mode 0600."""
    path = settings.home / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path.read_text()
