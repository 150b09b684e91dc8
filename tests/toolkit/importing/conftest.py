"""Fixtures of the tests of imported sets."""

from import_cases import run, task  # noqa: F401
