"""Benchmarks and experiments: `python -m bench` lists them, `python -m bench NAME` runs one (docs/benchmarks.md)."""
