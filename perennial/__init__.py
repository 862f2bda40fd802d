"""The spine of Perennial: specification, ledger, episode, store, records, settings, errors.

This package imports none of the other rooms (`monitoring`, `training`, `serving`, `dags`); only
`perennial.cli` and `perennial.local` put rooms together, and they import them where they are used.
"""

__version__ = "0.1.0"
