"""`python -m serving.embedded`: parses flags before anything heavy is imported."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version as package_version

import uvloop

from serving.embedded.flags import FlagError, Flags, check, parse, usage
from serving.embedded.status import StatusError

START_FAILED = 255


def main(arguments: list[str]) -> int:
    """Runs the server; returns its exit code."""
    if "--help" in arguments:
        print(usage())
        return 0
    try:
        flags, warnings = parse(arguments)
    except FlagError as error:
        print(f"{error}\n{usage()}", file=sys.stderr)
        return START_FAILED
    if flags.version:
        print(f"Perennial embedded model server: {_version('perennial')} (not TF Serving)")
        print(f"TensorFlow Library: {_version('tensorflow')}")
        return 0
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for warning in warnings:
        logging.getLogger(__name__).warning("%s", warning)
    return _serve(flags)


def _serve(flags: Flags) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        check(flags)
        from serving.embedded.server import serve

        uvloop.run(serve(flags))
    except (StatusError, FlagError) as error:
        print(f"Failed to start server. Error: {error}")
        return START_FAILED
    return 0


def _version(package: str) -> str:
    try:
        return package_version(package)
    except ImportError:
        return "unknown (not installed as a package)"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A load that is still running must not hold up the end, nor TensorFlow's own teardown.
    os._exit(code)
