"""Benchmarks: ratios inside one run, beside the peer or the limit. `make bench`, `make bench-<room>`."""
