"""What all tests of benchmarks share: poisoned memory and one thread."""

from fixtures import one_thread, poison  # noqa: F401 - fixtures of every test here
