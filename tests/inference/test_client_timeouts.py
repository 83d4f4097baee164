"""Many calls at once: what arrived in time is read however busy the process was,
and long replies may take long.
"""

import asyncio
import gc
import itertools

import pytest
from fake_clock import run_jumping
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.client import ALIVE, FailureStreak, receive_within, run_async, run_many


def test_what_arrived_while_the_process_was_busy_is_read():
    async def reply(buffer):
        arrived = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, arrived.set_result, "here")
        received = await arrived
        for _ in range(5):  # a reply passes several hands before it is complete
            await asyncio.sleep(0)
        return received

    async def main():
        pending = asyncio.ensure_future(receive_within(0.05, reply))
        for _ in range(3):
            await asyncio.sleep(0)
        asyncio.get_running_loop().jump(0.1)  # the process works on something else, past the limit
        return await pending

    assert run_jumping(main()) == "here"


@pytest.mark.parametrize(
    "size, is_kept", [(ALIVE, True), (ALIVE - 1, False), (1, False), (0, False)]
)
def test_only_a_body_that_grows_may_take_longer(size, is_kept):
    async def stream(buffer):
        for _ in range(6):
            await asyncio.sleep(0.03)
            buffer += bytes(size // 3 if size == ALIVE - 1 else size)
        return "all of it"

    async def main():
        return await receive_within(0.05, stream)

    if is_kept:
        assert run_jumping(main()) == "all of it"
    else:
        with pytest.raises(TimeoutError):
            run_jumping(main())


def test_work_is_cancelled_with_the_wait_and_after_it():
    ended = []

    async def endless(buffer):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    async def given_up():
        with pytest.raises(TimeoutError):
            await receive_within(0.01, endless)
        assert ended == [True]

    async def called_off():
        task = asyncio.ensure_future(receive_within(60, endless))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True, True]

    run_jumping(given_up())
    run_jumping(called_off())


def test_errors_of_the_work_pass_through():
    async def broken(buffer):
        raise ValueError("no good")

    async def main():
        await receive_within(1, broken)

    with pytest.raises(ValueError, match="no good"):
        run_async(main())


@pytest.mark.parametrize("moment", ["at the same moment", "while it is called off"])
def test_failures_of_calls_that_were_called_off_are_not_complained_about(moment):
    unseen = []

    async def broken(number):
        try:
            for _ in range(number if moment == "at the same moment" or not number else 10**6):
                await asyncio.sleep(0)
        finally:
            raise ValueError("no such model")

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: unseen.append(context)
        )
        with pytest.raises(ValueError, match="no such model"):
            async for _ in run_many(
                range(40), lambda n: receive_within(5, lambda buffer: broken(n)), concurrency=40
            ):
                pass
        gc.collect()

    run_async(main())
    assert unseen == []


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=12), st.integers(1, 5))
def test_a_run_stops_when_its_last_results_all_failed_alike(reasons, count):
    watch = FailureStreak(count)
    for n, reason in enumerate(reasons, 1):
        runs = [(key, len(list(group))) for key, group in itertools.groupby(reasons[:n])]
        assert watch.add(reason) == (reason is not None and runs[-1][1] == count)
