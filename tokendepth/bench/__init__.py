"""Measurements of a machine that go into results/ with device, versions and commit. Never run by the tests."""
