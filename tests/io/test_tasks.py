"""Work in several processes: order, failures, what is said on the way,
and the end of all workers.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from memcalib.io.tasks import LOG_SECONDS, Task, TaskProgress, TasksFailed, run_in_turn, run_tasks


@pytest.fixture(autouse=True)
def main_module_as_in_a_program(monkeypatch):
    """A page that ran in this process may leave a `__main__` without `__spec__`,
    which new processes ask for.
    """
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)


def ended_names(lines: list[str]) -> list[str]:
    return [line.split("] ")[1].split(":")[0] for line in lines if line.startswith("[")]


def test_a_task_that_fails_takes_along_those_that_need_it_and_no_others():
    lines = []
    tasks = [
        Task("breaks", int, ("x",)),
        Task("needs what breaks", int, ("1",), frozenset({"breaks"})),
        Task("needs that", int, ("1",), frozenset({"needs what breaks"})),
        Task("stands alone", int, ("2",)),
    ]
    errors = run_tasks(tasks, 2, lines.append)
    assert errors == {
        "breaks": "invalid literal for int() with base 10: 'x'",
        "needs what breaks": "needs breaks, which failed",
        "needs that": "needs needs what breaks, which failed",
    }
    assert sorted(ended_names(lines)) == ["breaks", "stands alone"]
    assert any("breaks: failed: invalid literal" in line for line in lines)


def test_a_worker_that_is_killed_ends_the_run_and_names_what_was_running():
    with pytest.raises(
        RuntimeError, match="one of dies.*its process ended without an error message"
    ):
        run_tasks([Task("dies", os._exit, (9,))], 1, lambda line: None)


def test_in_turn_an_error_is_the_tasks_own_and_what_stood_before_it_is_done():
    lines = []
    tasks = [Task("first", int, ("1",)), Task("second", int, ("x",)), Task("third", int, ("3",))]
    with pytest.raises(ValueError, match="invalid literal"):
        run_in_turn(tasks, lines.append)
    assert ended_names(lines) == ["first"]


def test_failed_tasks_keep_their_errors_and_the_advice_comes_last():
    error = TasksFailed({"a": "disk full", "b": "needs a, which failed"}, "continue with: x")
    lines = ["a: disk full", "b: needs a, which failed", "continue with: x"]
    assert str(error).splitlines() == lines
    assert error.errors["a"] == "disk full"


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_says_every_half_minute_how_far_each_running_task_is(capsys):
    clock = Clock()
    lines = []
    share = {"training": 0.0}
    training = Task("training", int, seconds=100.0, progress=lambda: share["training"])
    other = Task("other", int, seconds=100.0)
    with TaskProgress([training, other], lines.append, clock) as progress:
        assert not progress.on_terminal
        progress.begin(training)
        progress.update([training])
        assert lines == []
        clock.now += LOG_SECONDS
        share["training"] = 0.3
        progress.update([training])
        progress.update([training])
        clock.now += LOG_SECONDS
        share["training"] = 7.0  # a task that says too much is done, and no more
        progress.update([training])
    assert lines == [
        "running: training 30%; 0.5 min so far, about 2.8 min left",
        "running: training 100%; 1.0 min so far, about 1.0 min left",
    ]
    assert capsys.readouterr().err == ""


def test_the_rest_is_not_estimated_from_a_few_short_jobs():
    """Two seconds of work that took a minute would promise fifty hours for the rest."""
    clock = Clock()
    lines = []
    tasks = [Task("copy", int, seconds=2.0), Task("half", int, seconds=49.0)]
    tasks.append(Task("training", int, seconds=49.0))
    with TaskProgress(tasks, lines.append, clock) as progress:
        progress.begin(tasks[0])
        clock.now += 60.0
        progress.end(tasks[0], "done")
        progress.begin(tasks[1])
        clock.now += 60.0
        progress.end(tasks[1], "done")
    assert lines == [
        "[1/3] copy: done; 1.0 min so far",
        "[2/3] half: done; 2.0 min so far, about 1.9 min left",
    ]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_command_ends_its_workers_end(tmp_path, number):
    """Ctrl-C reaches the command alone here; a killed one cannot tell its workers anything."""
    (tmp_path / "slow_work.py").write_text(
        textwrap.dedent("""
            import os, time
            from pathlib import Path

            def work(folder, name):
                (Path(folder) / name).write_text(str(os.getpid()))
                time.sleep(600)
        """)
    )
    program = textwrap.dedent(f"""
        from slow_work import work
        from memcalib.io.tasks import Task, run_tasks

        if __name__ == "__main__":
            run_tasks([Task(name, work, ({str(tmp_path)!r}, name)) for name in ("a", "b")], 2)
    """)
    script = tmp_path / "run_them.py"
    script.write_text(program)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    notes = [tmp_path / "a", tmp_path / "b"]
    deadline = time.monotonic() + 120
    while not all(note.is_file() and note.read_text() for note in notes):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    workers = [int(note.read_text()) for note in notes]
    command.send_signal(number)
    assert command.wait(30) != 0
    deadline = time.monotonic() + 30
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
