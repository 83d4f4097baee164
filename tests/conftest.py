"""Settings shared by all tests: fixed seeds, no network, one thread."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell starts jobs in the background so; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import logging
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("core", settings.get_profile("ci"), max_examples=8)  # `make test-core`
settings.load_profile("ci")


FIRST = "tests/test_trl_surface.py"  # what we rely on, before everything that relies on it
LONG_FIRST = (
    "tests/commands/",
    "tests/trainer/",
    "tests/test_notebooks.py",
    "tests/test_training.py",
    "tests/products/micro/",
)


LONG = frozenset((Path(__file__).parent / "long.txt").read_text(encoding="utf-8").split("\n")) - {
    ""
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Cases of long.txt, each over one or two seconds when it was written down, are slow tests.

    The surface of the base libraries comes first of all. What takes longest begins first: with two
    workers neither waits at the end for a long file of the other one.
    """
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.slow)

    def rank(item):
        if item.nodeid.startswith(FIRST):
            return -1
        return next(
            (k for k, prefix in enumerate(LONG_FIRST) if item.nodeid.startswith(prefix)),
            len(LONG_FIRST),
        )

    items.sort(key=rank)


@pytest.fixture(autouse=True)
def _heard():
    """Pages and libraries that run as tests may quiet logging for the whole process;
    what a test logs can be read again.
    """
    logging.disable(logging.NOTSET)
    logging.root.setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "memcalib" and isinstance(logger, logging.Logger):
            logger.disabled = False
            logger.propagate = True
            logger.setLevel(logging.NOTSET)
    yield
    logging.disable(logging.NOTSET)
