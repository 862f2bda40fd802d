"""The supervisor's end of the process that holds the workers (`training.worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.process import child_environment


class Pool:
    """The process that holds the workers, and the pipes to it.

    Args:
        folder: holds `plan.json`; the output of all workers goes to its `train.log`.

    Attributes:
        dead: nobody is left to obey or to tell.
    """

    def __init__(self, folder: Path) -> None:
        self.log_path = folder / "train.log"
        self.dead = False
        self._plan = folder / "plan.json"
        self._pending = b""

    def __enter__(self) -> Pool:
        self._read, write = os.pipe()
        try:
            with self.log_path.open("ab") as output:
                arguments = [str(self._plan), str(write), str(os.getpid())]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "training.worker", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write,),
                    env=child_environment(),
                )
        except BaseException:
            os.close(self._read)
            raise
        finally:
            os.close(write)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        # Closing stdin tells the pool to kill its workers and leave.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        os.close(self._read)

    @property
    def _stdin(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    def command(self, content: dict[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(content).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            self.dead = True

    def events(self, *, timeout_s: float) -> Iterator[dict[str, Any]]:
        """What arrived within the time; sets `dead` when nobody is left to send."""
        if not self._selector.select(timeout_s):
            return
        chunk = os.read(self._read, 65536)
        if not chunk:
            self.dead = True
            return
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)
