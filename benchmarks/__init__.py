"""Benchmarks, run from a checkout: `python -m benchmarks NAME`.  README.md says how we measure."""
