"""Benchmarks: ratios inside one run, beside a peer or a limit: `make bench`, `make bench-ROOM`."""
