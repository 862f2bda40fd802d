"""Runs the router, and replaces it without a failed call.

    python -m serving.router

SIGHUP reads the files of the settings again (keys, tokens, the folder of certificates) and takes
over from the running Envoy: the new one gets its sockets, the old one finishes its calls and ends.
What Envoy refuses is not taken over. SIGTERM drains and exits with 0. When Envoy dies this ends
too, with another code, so that whoever started it starts it again; when this is killed, Envoy ends.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Final

import httpx

from perennial.errors import PerennialError, Retryable
from perennial.service import run_service
from perennial.settings import Settings
from perennial.store import write_atomic
from serving.router import envoy

log = logging.getLogger(__name__)

_TURN_S: Final = 0.1


@dataclass
class _Envoy:
    """One running Envoy of this installation."""

    epoch: int
    process: subprocess.Popen[bytes]

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


def run(settings: Settings, stop: threading.Event) -> None:
    """Runs until `stop` is set, then drains.

    Raises:
        Permanent: from `envoy.write_bootstrap`; `router.refused`.
        Retryable: `router.died`.
    """
    again = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: again.set())
    envoy.write_bootstrap(settings)
    envoy.validate(settings)
    envoy.remove_shared_memory(settings)
    running = [_start(settings, 0)]
    try:
        while not stop.wait(_TURN_S):
            # A third Envoy would end the first one before its clients have left: one at a time.
            if again.is_set() and len(running) == 1:
                again.clear()
                running += _taking_over(settings, running[-1].epoch + 1)
            for ended in [one for one in running if not one.is_running]:
                running.remove(ended)
                log.info("Envoy of epoch %d ended: %s", ended.epoch, ended.process.returncode)
            if not running:
                raise Retryable("router.died", "Envoy died; its own log says why")
        _drain(settings)
    finally:
        _end(running)
        envoy.remove_shared_memory(settings)


def _start(settings: Settings, epoch: int) -> _Envoy:
    command = envoy.command(settings, epoch=epoch)
    return _Envoy(epoch, subprocess.Popen(command, stdin=subprocess.DEVNULL))


def _taking_over(settings: Settings, epoch: int) -> list[_Envoy]:
    """A new Envoy on the settings' files as they are now; none when they can't be used."""
    path = envoy.bootstrap_path(settings)
    before = path.read_bytes()
    try:
        envoy.write_bootstrap(settings)
        envoy.validate(settings)
    except PerennialError as error:
        write_atomic(path, before)
        log.error("the running router goes on: %s", error)
        return []
    log.info("epoch %d takes over", epoch)
    return [_start(settings, epoch)]


def _drain(settings: Settings) -> None:
    """Tells clients to go and lets their calls end, until no connection is open or time is up."""
    deadline = time.monotonic() + settings.router_drain_s + envoy.GOODBYE_S
    try:
        envoy.drain(settings)
        while envoy.connections(settings) and time.monotonic() < deadline:
            time.sleep(_TURN_S)
    except (PerennialError, httpx.HTTPError) as error:
        log.warning("not drained: %s", error)


def _end(running: list[_Envoy]) -> None:
    for one in running:
        one.process.terminate()
    for one in running:
        try:
            one.process.wait(3)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


if __name__ == "__main__":
    sys.exit(run_service(run))
