"""The one-machine stack: PostgreSQL, two pools, router, recorder, labels, Prometheus, Airflow.

`Stack(settings).start()` brings all of it up on loopback and keeps it up; `stop()` takes it down.
`python -m perennial.local.stack` does so until it is told to end; `perennial up` runs that in the
background and `perennial down` ends it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from perennial.errors import Conflict, PerennialError
from perennial.ledger import Ledger
from perennial.local import airflow
from perennial.local.postgres import database_url, running_postgres
from perennial.local.supervisor import (
    Program,
    Supervisor,
    check_ports,
    port_answers,
    url_answers,
)
from perennial.settings import ReplicaAddress, Settings
from perennial.spec import ModelSpec, load_specs
from perennial.store import write_atomic

log = logging.getLogger(__name__)

PORT_SETTINGS = tuple(name for name in Settings.model_fields if name.endswith("_port"))

Report = Callable[[str], None]


class Stack:
    """Everything the loop needs, on one machine.

    Args:
        report: called with one line per thing that became ready.
    """

    def __init__(self, settings: Settings, report: Report = log.info) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings.run_dir)
        self._report = report
        self._resources = ExitStack()
        self._begun = time.monotonic()
        self._announced = False

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts everything and waits until all of it is ready; stops it again when it cannot.

        Raises:
            NeedsHuman: `port.busy`, `prometheus.missing`, `stack.not_ready`, `postgres.start`.
            Conflict: `stack.running`: another stack owns the same PERENNIAL_HOME.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        from perennial.local.prometheus import find_prometheus

        settings = self.settings
        self._resources.enter_context(_only_one(settings.run_dir / "stack.lock"))
        check_ports(
            settings.bind,
            {f"PERENNIAL_{n.upper()}": getattr(settings, n) for n in PORT_SETTINGS},
        )
        prometheus = find_prometheus(settings)
        specs = load_specs(settings.models_dir, settings.profile)
        self._say(f"models under care: {', '.join(specs)}")
        self._resources.enter_context(running_postgres(settings))
        ledger = Ledger(database_url(settings, "perennial"))
        try:
            ledger.migrate()
        finally:
            ledger.close()
        self._say("PostgreSQL")
        self._write_files(specs)
        with ThreadPoolExecutor(1) as side:
            migrating = side.submit(airflow.prepare, settings)
            early = [*self._serving(), *self._monitoring(prometheus)]
            for program in early:
                self.supervisor.start(program)
            migrating.result()
        components = airflow.programs(settings)
        for program in components:
            self.supervisor.start(program)
        for program in [*early, *components]:
            self.supervisor.wait_ready(program.name)
            self._say(program.name)
        self._announced = True
        write_atomic(
            settings.run_dir / "stack.json",
            json.dumps({"pid": os.getpid(), "urls": self.urls()}, indent=1).encode(),
        )

    def stop(self) -> None:
        """Stops everything, in order. Safe to call twice."""
        if self._announced:
            (self.settings.run_dir / "stack.json").unlink(missing_ok=True)
        self.supervisor.stop()
        self._resources.close()

    def urls(self) -> dict[str, str]:
        """What people and clients open."""
        settings = self.settings
        host = settings.bind
        return {
            "Airflow": f"http://{host}:{settings.airflow_port}",
            "Prometheus": f"http://{host}:{settings.prometheus_port}",
            "Predictions (gRPC and REST)": f"{settings.router_bind or host}:{settings.router_port}",
            "Labels (gRPC)": f"{host}:{settings.labels_port}",
            "Labels (REST)": f"http://{host}:{settings.labels_rest_port}",
            "Envoy admin": f"http://{settings.router_admin_host}:{settings.router_admin_port}",
        }

    def _say(self, name: str) -> None:
        self._report(f"{time.monotonic() - self._begun:5.1f} s  {name}")

    def _write_files(self, specs: dict[str, ModelSpec]) -> None:
        from monitoring.rules import write as write_rules
        from serving.reconcile import Serving
        from serving.router.envoy import write_bootstrap
        from serving.topology import MONITORING_PATH, config_file, serving_dir

        folder = serving_dir(self.settings)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(
            folder / "monitoring.config",
            f'prometheus_config {{ enable: true path: "{MONITORING_PATH}" }}\n'.encode(),
        )
        for pool in ("stable", "canary"):
            if not (path := config_file(self.settings, pool)).exists():
                write_atomic(path, b"model_config_list {}\n")
        write_bootstrap(self.settings)
        write_rules(self.settings, specs)
        ledger = Ledger(database_url(self.settings, "perennial"))
        try:
            Serving(self.settings, ledger).write_routes(tuple(specs))
        finally:
            ledger.close()

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **self.settings.as_environment(),
            "PYTHONPATH": str(airflow.REPOSITORY),
            "PYTHONUNBUFFERED": "1",
        }

    def _module(self, name: str, module: str, ready: Callable[[], bool]) -> Program:
        return Program(
            name=name,
            command=[sys.executable, "-m", module],
            environment=self._environment(),
            ready=ready,
            stop_rank=5,
        )

    def _serving(self) -> list[Program]:
        from serving.router.envoy import admin_url

        settings = self.settings
        host = settings.bind
        return [
            *self._pool("stable"),
            *self._pool("canary"),
            Program(
                name="envoy",
                command=[sys.executable, "-m", "serving.router"],
                environment=self._environment(),
                ready=url_answers(f"{admin_url(settings)}/ready"),
                stop_rank=6,
            ),
            self._module(
                "recorder",
                "serving.recorder",
                url_answers(f"http://{host}:{settings.recorder_metrics_port}/metrics"),
            ),
            self._module("labels", "serving.labels", port_answers(host, settings.labels_port)),
        ]

    def _pool(self, name: str) -> list[Program]:
        """The pool's replicas that belong on this machine."""
        here = [r for r in self.settings.replicas(name) if r.host == self.settings.reachable]
        return [
            self._replica(name if number == 1 else f"{name}-{number}", name, address)
            for number, address in enumerate(here, 1)
        ]

    def _replica(self, name: str, pool: str, address: ReplicaAddress) -> Program:
        from serving.topology import config_file, serving_dir

        settings = self.settings
        given = shlex.split(settings.tfs_command)
        command = given or [sys.executable, "-m", "serving.embedded"]
        flags = [
            f"--port={address.port}",
            f"--rest_api_port={address.rest_port}",
            f"--model_config_file={config_file(settings, pool)}",
            f"--monitoring_config_file={serving_dir(settings) / 'monitoring.config'}",
            "--enable_grpc_healthcheck_service=true",
            "--file_system_poll_wait_seconds=1",
            # A label in the start-up file would else end a restarted server.
            "--allow_version_labels_for_unavailable_models=true",
        ]
        if not given:
            flags.append(f"--bind_address={settings.bind}")
        return Program(
            name=f"pool-{name}",
            command=[*command, *flags],
            environment={**self._environment(), "TF_CPP_MIN_LOG_LEVEL": "1"},
            ready=port_answers(address.host, address.port),
            ready_s=120,
            stop_rank=4,
        )

    def _monitoring(self, prometheus: Path) -> list[Program]:
        from monitoring.rules import config_path

        settings = self.settings
        host = settings.bind
        return [
            self._module(
                "exporter",
                "monitoring.exporter",
                url_answers(f"http://{host}:{settings.exporter_port}/metrics"),
            ),
            Program(
                name="prometheus",
                command=[
                    str(prometheus),
                    f"--config.file={config_path(settings)}",
                    f"--storage.tsdb.path={settings.home / 'prometheus' / 'data'}",
                    f"--web.listen-address={host}:{settings.prometheus_port}",
                    "--storage.tsdb.retention.time=15d",
                    "--web.enable-lifecycle",
                    "--log.level=warn",
                ],
                environment=self._environment(),
                ready=url_answers(f"http://{host}:{settings.prometheus_port}/-/ready"),
                stop_rank=3,
            ),
        ]


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file while the block runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                "stack.running",
                f"a stack already runs in {path.parent.parent}",
                hint="`make down` stops it; or set PERENNIAL_HOME to another folder",
            ) from error
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM interrupts the block like Ctrl-C does; both are ignored once it was left."""

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    yield


def main() -> int:
    """Runs the stack until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    stack = Stack(Settings.from_environment(), report=lambda line: print(line, flush=True))
    try:
        with interruptible():
            stack.start()
            while True:
                signal.pause()
    except KeyboardInterrupt:
        print("stopping", flush=True)
    except PerennialError as error:
        print(error, flush=True)
        return error.exit_code
    finally:
        stack.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
