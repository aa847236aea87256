"""Benchmarks on this machine; every row records device, versions and commit. Not run by the tests."""
