"""Starts processes in order, keeps them alive, and stops them: the one-machine stack's engine.

Each process leads a session of its own, so that its children end with it. A process that dies is
started again after a growing pause; `stop` asks, waits, and then insists.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perennial.errors import NeedsHuman, Retryable

log = logging.getLogger(__name__)

GRACE_S = 8.0
MAX_PAUSE_S = 30.0


@dataclass(frozen=True)
class Program:
    """What to run.

    Attributes:
        ready: polled until it returns True; raising counts as not yet.
        stop_rank: programs with a higher rank are stopped first.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ready: Callable[[], bool]
    ready_s: float = 60.0
    stop_rank: int = 0


@dataclass
class _Running:
    program: Program
    process: subprocess.Popen[bytes]
    started: float
    restarts: int = 0
    due: float | None = field(default=None)


class Supervisor:
    """Runs programs; one thread watches them.

    Args:
        run_dir: where `<name>.log` and `<name>.pid` are written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._running: dict[str, _Running] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        run_dir.mkdir(parents=True, exist_ok=True)

    def start(self, program: Program) -> None:
        """Starts a program; does not wait until it is ready."""
        with self._lock:
            self._running[program.name] = _Running(program, self._spawn(program), time.monotonic())
        if not self._watcher.is_alive() and not self._stopping.is_set():
            self._watcher.start()

    def wait_ready(self, name: str) -> None:
        """Waits until a program's `ready` holds.

        Raises:
            NeedsHuman: `stack.not_ready`, with the end of its log, when it died repeatedly or its
                `ready_s` passed.
        """
        program = self._running[name].program
        deadline = time.monotonic() + program.ready_s
        while time.monotonic() < deadline and not self._stopping.is_set():
            if self._running[name].restarts >= 3:
                break
            if is_ready(program):
                return
            time.sleep(0.1)
        path = self._log(name)
        tail = path.read_text(errors="replace").strip().splitlines()[-5:] if path.exists() else []
        raise NeedsHuman(
            "stack.not_ready",
            f"{name} did not become ready: " + " | ".join(tail),
            hint=f"read {path}",
        )

    def process_id(self, name: str) -> int:
        return self._running[name].process.pid

    def restarts(self) -> dict[str, int]:
        """How often each program was started again."""
        return {name: running.restarts for name, running in self._running.items()}

    def stop(self) -> None:
        """Stops all programs, highest rank first; returns when none is left."""
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        ranks = sorted({r.program.stop_rank for r in self._running.values()}, reverse=True)
        for rank in ranks:
            group = [r for r in self._running.values() if r.program.stop_rank == rank]
            for running in group:
                _signal(running.process, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            for running in group:
                try:
                    running.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("%s did not stop in %s s", running.program.name, GRACE_S)
                _kill_group(running.process)
                self._pid(running.program.name).unlink(missing_ok=True)
        self._running.clear()

    def _spawn(self, program: Program) -> subprocess.Popen[bytes]:
        with self._log(program.name).open("ab") as output:
            process = subprocess.Popen(
                list(program.command),
                env=dict(program.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pid(program.name).write_text(f"{process.pid}\n")
        return process

    def _watch(self) -> None:
        while not self._stopping.wait(0.25):
            with self._lock:
                for running in list(self._running.values()):
                    self._revive(running)

    def _revive(self, running: _Running) -> None:
        now = time.monotonic()
        if running.due is None:
            status = running.process.poll()
            if status is None:
                return
            if now - running.started > 60:
                running.restarts = 0
            pause_s = min(MAX_PAUSE_S, 0.5 * 2**running.restarts)
            log.warning(
                "%s ended with %s; starting it again in %.1f s",
                running.program.name,
                status,
                pause_s,
            )
            _kill_group(running.process)
            running.due = now + pause_s
        elif now >= running.due:
            running.process = self._spawn(running.program)
            running.started = now
            running.restarts += 1
            running.due = None

    def _log(self, name: str) -> Path:
        return self._run_dir / f"{name}.log"

    def _pid(self, name: str) -> Path:
        return self._run_dir / f"{name}.pid"


def is_ready(program: Program) -> bool:
    try:
        return program.ready()
    except Exception:  # noqa: BLE001 - a probe of something that may not be there yet
        return False


def port_answers(host: str, port: int) -> Callable[[], bool]:
    """Ready when something accepts connections there."""

    def answers() -> bool:
        with socket.create_connection((host, port), timeout=1):
            return True

    return answers


def url_answers(url: str) -> Callable[[], bool]:
    """Ready when a GET answers with 200."""

    def answers() -> bool:
        import httpx

        return httpx.get(url, timeout=2).status_code == 200

    return answers


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Makes sure that every port is free and named once.

    Args:
        ports: setting's variable -> port.

    Raises:
        NeedsHuman: `port.busy` or `port.twice`, naming the port and the setting that changes it.
    """
    seen: dict[int, str] = {}
    for variable, port in ports.items():
        if port in seen:
            raise NeedsHuman(
                "port.twice",
                f"{variable} and {seen[port]} both say {port}",
                hint=f"set {variable} to another port",
            )
        seen[port] = variable
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise NeedsHuman(
                    "port.busy",
                    f"port {port} on {host} is taken ({error.strerror})",
                    hint=f"stop what uses it, or set {variable} to a free port; "
                    "`make down` stops a stack that is still running",
                    variable=variable,
                    port=port,
                ) from error


def stop_process(process_id: int, *, timeout_s: float) -> None:
    """Asks a process that we started to end, and waits for it.

    Raises:
        Retryable: `stack.still_running` after `timeout_s`.
    """
    try:
        os.kill(process_id, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{process_id}").exists():
            return
        time.sleep(0.1)
    raise Retryable(
        "stack.still_running",
        f"process {process_id} has not ended after {timeout_s:g} s",
        hint="run the command again; the logs are in the run folder",
    )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    if process.poll() is None:
        process.wait()
