"""Time that passes when a test says so: a clock for threads,
and an event loop that waits for nothing.
"""

import asyncio
import selectors
import threading
import time


class Clock:
    """In the place of a module's `time`: who sleeps wakes when `advance` has brought the clock far
    enough.
    """

    monotonic = staticmethod(time.monotonic)

    def __init__(self, now: float = 1_000.0):
        self.now = now
        self._moved = threading.Condition()
        self.asleep = threading.Semaphore(0)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._moved:
            end = self.now + seconds
            self.asleep.release()
            self._moved.wait_for(lambda: self.now >= end)

    def advance(self, seconds: float) -> None:
        with self._moved:
            self.now += seconds
            self._moved.notify_all()


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting so long, it lets so much time have passed."""

    now = 0.0

    def select(self, timeout: float | None = None):
        if timeout:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which the next moment that somebody waits for comes at once;
    `jump` lets time pass beside it.
    """

    def __init__(self):
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now

    def jump(self, seconds: float) -> None:
        self._selector_clock.now += seconds


def run_jumping(coroutine):
    """The result of a coroutine for which no time passes."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)
