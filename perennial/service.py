"""The frame of a long-running process: logging, SIGTERM and SIGINT, errors as exit codes."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

from perennial.errors import PerennialError
from perennial.settings import Settings

logger = logging.getLogger(__name__)


def run_service(serve: Callable[[Settings, threading.Event], None]) -> int:
    """Runs `serve` with the environment's settings; returns the process' exit code.

    Args:
        serve: returns soon after the event is set, which SIGTERM and SIGINT do.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve(Settings.from_environment(), stop)
    except PerennialError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0
