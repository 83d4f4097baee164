"""The folder of a run: bound to its settings, locked by one process, assembled and described;
and files that are whole.
"""

import json
import os
import subprocess
import sys

import pytest

from memcalib.io.records import Record, replacing, write_jsonl, write_whole
from memcalib.io.runs import RunFolder, file_hash, git_state, holds_rows

SETTINGS = {"model": "tiny", "train": {"steps": 3, "trl": {}, "seeds": (1, 2)}}
CHANGED = {"model": "tiny", "train": {"steps": 4, "trl": {"warmup": 2}, "seeds": [1, 2]}}


def refused(path, settings, defaults=None, **options) -> str:
    """The message with which the folder refuses these settings."""
    with pytest.raises(ValueError, match="contains a run with other settings") as error:
        RunFolder(path, settings, defaults, **options)
    return str(error.value)


def test_a_folder_takes_its_own_settings_and_names_each_that_differs(tmp_path):
    run = RunFolder(tmp_path / "run", SETTINGS)
    before = run.file("parameters.json").read_bytes()
    assert json.loads(before) == json.loads(json.dumps(SETTINGS)) == run.stored()
    assert RunFolder(tmp_path / "run", SETTINGS).differences() == []
    message = refused(tmp_path / "run", CHANGED)
    for needle in (
        str(tmp_path / "run"),
        "train.steps: 3 there, 4 now",
        "train.trl.warmup: nothing there, 2 now",
        "train.trl: {} there",
    ):
        assert needle in message
    assert "model" not in message and "seeds" not in message
    assert "train.steps: 3 there, nothing now" in refused(
        tmp_path / "run", {"model": "tiny", "train": {"trl": {}, "seeds": [1, 2]}}
    )
    assert run.file("parameters.json").read_bytes() == before


@pytest.mark.parametrize(
    ("value", "default", "fits"),
    [(0.0, 0.0, True), (0.5, 0.0, False), (None, None, True), (0.0, None, False)],
)
def test_a_setting_younger_than_the_folder_had_its_default(tmp_path, value, default, fits):
    RunFolder(tmp_path, SETTINGS)
    now = {"model": "tiny", "train": {**SETTINGS["train"], "noise": value}}
    defaults = {"train": {"noise": default, "steps": 100}}
    if fits:
        assert RunFolder(tmp_path, now, defaults).stored() == json.loads(json.dumps(SETTINGS)), (
            "the folder stays as it was"
        )
    else:
        assert f"train.noise: nothing there, {value} now" in refused(tmp_path, now, defaults)
    if value is not None:
        assert "noise" in refused(tmp_path, now), "no default is known"


def test_settings_that_decide_nothing_may_change(tmp_path):
    RunFolder(tmp_path, {**SETTINGS, "log_every": 5, "retired": 1})

    def is_decisive(name):
        return name not in ("log_every", "retired")

    reopened = RunFolder(tmp_path, {**SETTINGS, "log_every": 1}, decisive=is_decisive)
    assert reopened.stored()["log_every"] == 5
    message = refused(tmp_path, {**CHANGED, "log_every": 1}, decisive=is_decisive)
    assert "log_every" not in message


def test_settings_under_which_nothing_was_made_are_replaced(tmp_path):
    RunFolder(tmp_path, SETTINGS)
    calls = []
    refused(tmp_path, CHANGED, replaceable=calls.append)
    assert calls == [json.loads(json.dumps(SETTINGS))]
    assert RunFolder(tmp_path, CHANGED, replaceable=lambda stored: True).stored() == CHANGED
    RunFolder(tmp_path, CHANGED, replaceable=lambda stored: 1 / 0)


@pytest.mark.parametrize("content", ["[1, 2]", "{", "null", "\udcff"])
def test_a_file_of_anything_else_is_not_written_over(tmp_path, content):
    file = tmp_path / "parameters.json"
    content_bytes = content.encode("utf-8", "surrogateescape")
    file.write_bytes(content_bytes)
    with pytest.raises(ValueError, match="does not contain the settings of a run"):
        RunFolder(tmp_path, SETTINGS, replaceable=lambda stored: True)
    assert file.read_bytes() == content_bytes


def test_nothing_is_written_before_bind(tmp_path):
    run = RunFolder(tmp_path / "run", SETTINGS, private=True, bind=False)
    assert not run.path.exists() and not run.bound
    assert run.bind() is run and run.bound and run.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: found a file; allowed: a folder"):
        RunFolder(tmp_path / "file", SETTINGS, bind=False)


RIVAL = """
import sys
from memcalib.io.runs import RunFolder
with RunFolder(sys.argv[1], {}, bind=False).lock("training"):
    print("in", flush=True)
    sys.stdin.readline()
"""


def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path):
    rival = subprocess.Popen(
        [sys.executable, "-c", RIVAL, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rival.stdout.readline() == b"in\n"
    run = RunFolder(tmp_path, {}, bind=False)
    with (
        pytest.raises(ValueError, match="another process is counting in this folder"),
        run.lock("counting"),
    ):
        pass
    rival.kill()
    rival.communicate()
    with run.lock(), pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "other", {}).lock():
        raise ZeroDivisionError
    with run.lock():
        assert list(tmp_path.iterdir()) == [tmp_path / "other"], "the lock leaves no file"


def test_parts_are_joined_in_the_order_of_asking(tmp_path):
    run = RunFolder(tmp_path, SETTINGS)
    for name in ("b", "a", "none", "b"):
        folder = run.part(name)
        if name != "none":
            (folder / "rows.jsonl").write_bytes(name.encode() + b"\n")
    assert run.assemble("rows.jsonl").read_bytes() == b"b\na\n" and run.order == ["b", "a", "none"]
    assert run.assemble("other.jsonl").read_bytes() == b""


def test_the_manifest_is_found_again(tmp_path):
    run = RunFolder(tmp_path, SETTINGS)
    assert run.earlier() == {}
    write_whole(run.file("rows.jsonl"), "{}\n")
    written = run.write_manifest(["rows.jsonl", "none.jsonl"], [3], "dice", cost=None)
    earlier = run.earlier()
    assert earlier == json.loads(written.read_text())
    assert list(earlier["data_sha256"]) == ["rows.jsonl"]
    assert earlier["config"] == run.settings
    assert earlier["seeds"] == [3]
    assert earlier["judge"] == "dice"
    assert earlier["cost"] is None
    assert earlier["wall_seconds"] >= 0
    run.write_manifest(config={"other": 1})
    assert run.earlier()["config"] == {"other": 1}
    for damage in ("", "[]", '{"config"'):
        written.write_text(damage)
        assert run.earlier() == {}


class Tea(Record):
    leaves: str


def test_a_piece_is_finished_when_all_its_rows_are_whole(tmp_path):
    file = write_jsonl(tmp_path / "teas.jsonl", [Tea(leaves="sencha"), Tea(leaves="assam")])
    assert [holds_rows(file, Tea, count) for count in (1, 2, 3)] == [False, True, False]
    whole = file.read_bytes()
    for damage in (whole[:-5], b"", whole + b"{}\n"):
        file.write_bytes(damage)
        assert not holds_rows(file, Tea, damage.count(b"\n"))
    assert not holds_rows(tmp_path / "none.jsonl", Tea, 0)


@pytest.mark.parametrize("content", ["naïve\r\n\u2028", b"\xff\x00"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, content):
    path = tmp_path / "new" / "table.md"
    assert write_whole(path, content) == path
    whole = path.read_bytes()
    assert whole == (content.encode() if isinstance(content, str) else content)
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert path.read_bytes() == whole and os.listdir(path.parent) == ["table.md"]
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_bytes() == whole


def test_half_a_character_is_refused_or_escaped(tmp_path):
    path = write_whole(tmp_path / "page.html", "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["page.html"]
    assert write_whole(path, "é\ud800", "backslashreplace").read_bytes() == "é\\ud800".encode()


def test_a_full_disk_keeps_the_old_file(tmp_path):
    path = write_whole(tmp_path / "rows.jsonl", "old\n")
    (tmp_path / "rows.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new\n" * 10_000)
    assert path.read_text() == "old\n"


def test_a_module_that_is_in_no_commit_makes_a_checkout_dirty(tmp_path):
    def git(*words):
        return subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "notes.txt").write_text("no code")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "table.csv").write_text("1")
    git("add", "__init__.py", "runs")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "runs" / "table.csv").write_text("2")
    assert git_state(tmp_path)["dirty"] is False, "made anew by the code of the commit"
    (tmp_path / "new.py").write_text("")
    assert git_state(tmp_path)["dirty"] is True


def under(version: str, folder, name: str = "numpy") -> None:
    """Make the last call in a folder one under another version of a library."""
    file = folder / "versions.json"
    history = json.loads(file.read_text())
    history[-1][name] = version
    file.write_text(json.dumps(history))


def test_a_run_that_goes_on_under_other_libraries_says_so_and_keeps_both(tmp_path, caplog):
    RunFolder(tmp_path / "run", {"steps": 2}).write_manifest()
    for version in ("1.0", "1.1"):
        under(version, tmp_path / "run")
        caplog.clear()
        with caplog.at_level("WARNING"):
            again = RunFolder(tmp_path / "run", {"steps": 2})
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"numpy: '{version}' there" in line and "numbers may differ" in line
        again.write_manifest()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert [versions["numpy"] for versions in manifest["versions_before"]] == ["1.0", "1.1"]


def test_a_library_that_decides_what_is_left_is_refused_unless_told_to_go_on(tmp_path, caplog):
    """Also where the earlier call was killed: it has left no manifest."""
    folder = tmp_path / "run"
    RunFolder(folder, {"steps": 2})
    assert not (folder / "manifest.json").exists()
    under("1.0", folder)
    for _ in range(2):
        with pytest.raises(ValueError, match="numpy: '1.0' there.*--resume-anyway"):
            RunFolder(folder, {"steps": 2}, bind=False).bind(["numpy", "torch"])
    assert caplog.records == []
    RunFolder(folder, {"steps": 2}, bind=False).bind(["torch"])
    assert "numpy: '1.0' there" in caplog.text
    under("1.1", folder)
    RunFolder(folder, {"steps": 2}, bind=False).bind(["numpy"], resume_anyway=True)
    RunFolder(folder, {"steps": 2}, bind=False).bind(["numpy"])


def test_a_folder_without_a_file_of_versions_has_those_of_its_manifest(tmp_path):
    folder = tmp_path / "run"
    RunFolder(folder, {"steps": 2}).write_manifest()
    (folder / "versions.json").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["numpy"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="numpy: '1.0' there"):
        RunFolder(folder, {"steps": 2}, bind=False).bind(["numpy"])


@pytest.mark.parametrize("content", ["", "[", "7", '"text"', "[1, null]", "{}", "[" * 9000])
def test_versions_that_cannot_be_read_are_none(tmp_path, content):
    folder = tmp_path / "run"
    RunFolder(folder, {"steps": 2})
    (folder / "versions.json").write_text(content)
    run = RunFolder(folder, {"steps": 2}, bind=False).bind(["numpy"])
    assert len(run.version_history()) == 1 and run.other_versions() == {}


def test_the_same_libraries_are_not_spoken_of(tmp_path, caplog):
    RunFolder(tmp_path / "run", {"steps": 2}).write_manifest()
    with caplog.at_level("WARNING"):
        again = RunFolder(tmp_path / "run", {"steps": 2})
    again.write_manifest()
    assert caplog.records == []
    assert "versions_before" not in json.loads((tmp_path / "run" / "manifest.json").read_text())


def test_the_hash_of_a_folder_follows_names_and_contents(tmp_path):
    folder = tmp_path / "memory"
    (folder / "days").mkdir(parents=True)
    (folder / "days" / "one.md").write_text("- Likes soup.\n")
    first = file_hash(folder)
    assert file_hash(folder) == first
    (folder / "days" / "one.md").rename(folder / "days" / "two.md")
    renamed = file_hash(folder)
    (folder / "days" / "two.md").write_text("- Likes rye.\n")
    assert len({first, renamed, file_hash(folder)}) == 3
