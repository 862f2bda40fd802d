"""The evidence engine: from logged traffic to a verdict on a canary, and the report that shows it.

    cells.py      logs → Evidence: what each routing key saw, in which stage, from which arm
    estimator.py  the difference between the arms and its variance
    sequence.py   always-valid bounds: may be looked at as often as one likes
    guardrails.py served errors: an e-process and a tripwire
    health.py     whether the experiment itself is sound
    verdict.py    judge(): all of it together, a pure function
    report.py     report.html, report.json and the tables that re-derive them

docs/release/evidence.md says why each rule is what it is.
"""
