"""Benchmarks of this machine; every row carries device, versions and commit. Never run by the tests."""
