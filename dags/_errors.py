"""Perennial's errors as Airflow's: the one place where they are mapped.

| error | Airflow |
|---|---|
| Retryable, and a Conflict on a lease | the task fails and is retried |
| Conflict | the task is skipped: somebody else decided |
| Permanent, NeedsHuman | the task fails for good |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from perennial.errors import Conflict, NeedsHuman, Permanent, Retryable


@contextmanager
def airflow_errors() -> Iterator[None]:
    try:
        yield
    except Conflict as error:
        if error.code == "lease.held":
            raise AirflowException(str(error)) from error
        raise AirflowSkipException(str(error)) from error
    except (Permanent, NeedsHuman) as error:
        raise AirflowFailException(str(error)) from error
    except Retryable as error:
        raise AirflowException(str(error)) from error
