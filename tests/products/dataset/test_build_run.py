"""Between pilots settings are changed, and no row is read twice; freezing is taken back;
a build goes to a hub.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest
from build_files import fill_in, role_settings
from command_line import run

from memcalib.commands.build import load_build
from memcalib.products.dataset.build import REVIEWS, build_identity
from memcalib.products.dataset.build_run import BuildRun
from memcalib.products.dataset.card import CardFacts, count_examples, write_card
from memcalib.products.dataset.pilot import (
    FreezeError,
    PilotIssue,
    ReviewBook,
    check_frozen,
    list_batches,
    next_draw,
    read_batch,
    read_pilots,
)
from memcalib.products.dataset.pipeline import Made, NoRowLeft, Pipeline, screened
from memcalib.products.dataset.review import check_drafts
from memcalib.products.dataset.sources import SourceRow
from memcalib.products.dataset.stages import Draft, Drop, load_build_prompt
from memcalib.io.decisions import write_csv
from memcalib.io.records import write_jsonl
from memcalib.products.micro.practice.mistakes import micro_roles
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.practice.source import micro_source_rows
from memcalib.problem import sample_records

ROLE = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": ""}
REVIEWER2 = {**ROLE, "model": "n"}
ROLES = {"builder": ROLE, "reviewer": ROLE, "reviewer2": REVIEWER2}
TABLE = {"path": "faq.csv", "question": "q", "answer": "a", "id": "no", "licence": "cc0-1.0"}
ANSWER = (
    "Ask at the desk by the door, they keep two spares for each flat, and bring your passport, "
    "or somebody who knows you."
)
THINGS = (
    "key bike coat ring book lamp tent drum oven sofa desk vase boat kite harp sled fork door gate "
    "bell rope cart"
)


def row_of(number: int) -> dict[str, str]:
    objects = THINGS.split()
    first_object = objects[number % len(objects)]
    other = objects[(number * 7 + number // 22 + 1) % len(objects)]
    question = (
        f"I have lost my {first_object} near the {other} number {number * 37}, and I need it on "
        "Friday for my work. What should I do about it?"
    )
    answer = (
        f"{ANSWER} The {first_object} and the {other} have the numbers {number} and {number * 991}."
    )
    return {"no": str(number), "q": question, "a": answer}


@pytest.fixture
def home(tmp_path):
    write_table(tmp_path, range(40))
    write_yaml(tmp_path)
    return tmp_path


def number_of(row) -> int:
    """The number of a row from its id, such as faq:7."""
    return int(row.id.split(":")[1])


def write_table(home, numbers) -> None:
    write_csv(home / "faq.csv", ["no", "q", "a"], [row_of(number) for number in numbers])


def write_yaml(home, **settings) -> None:
    description = {"sources": [TABLE], "rows": 20, **ROLES, **settings}
    (home / "own.yaml").write_text(json.dumps(description))


class StubPipeline(Pipeline):
    """A pipeline without a model: its review rejects the rows of the numbers in `rejected`."""

    rejected = frozenset()

    def make(self, rows, folder):
        drops = []
        for row in rows:
            if self.rejected and number_of(row) in self.rejected:
                drops.append(Drop(id=row.id, stage="review", reason="levels"))
        if len(drops) == len(rows):
            raise self._no_row_left("review", "builder", drops, folder)
        dropped_ids = {drop.id for drop in drops}
        if folder == self.folder:
            (folder / "stages").mkdir(exist_ok=True)
            write_jsonl(folder / "stages" / "screening.jsonl", drops)
        drafts = [Draft.start(row) for row in rows if row.id not in dropped_ids]
        _, _, findings = check_drafts([])
        return Made(drafts, drops, findings, None)

    def examples(self, drafts):
        record = sample_records()[0]
        examples = []
        for draft in drafts:
            fields = {"id": draft.id, "domain": draft.domain, "raw_query": draft.question}
            examples.append(record.model_copy(update=fields))
        return examples


class StubRun(BuildRun):
    """A build whose stages are made without a model, and whose card says little."""

    pipeline_class = StubPipeline

    def document(self, examples, rows, passed, built, frozen):
        return write_card(self.folder, CardFacts("Loop", count_examples(examples), frozen=frozen))


def stub_run(home, rejected=(), **options) -> StubRun:
    build = load_build(home / "own.yaml", options)
    run = StubRun(build, home / "b", command="memcalib build own.yaml")
    run.pipeline.rejected = frozenset(rejected)
    return run


def review(run: BuildRun, fails: int = 0, number: int = 0, reviewer: str = "a reader") -> str:
    """Fill in and take in the sheet of a batch, the latest if no number is given;
    the first rows fail.
    """
    folder = list_batches(run.pilots)[number - 1]
    return run.take_reviews(fill_in(folder / "sheet.csv", fails), reviewer)


def frozen_run(home):
    """A build whose first pilot batch was read, passed and frozen."""
    run = stub_run(home)
    run.pilot(5)
    review(run)
    run.freeze()
    return run


def read_ids(run: BuildRun) -> list[set[str]]:
    """The ids of the rows of each batch."""
    return [{item.id for item in read_batch(path).items} for path in list_batches(run.pilots)]


def log_text(home) -> str:
    return (home / "b" / "pilots" / "log.md").read_text()


# changing settings


def test_a_changed_prompt_and_threshold_make_a_fresh_batch_in_the_same_folder(home):
    first = stub_run(home)
    first.pilot(5)
    assert "40.0 %" in review(first, 3)
    (home / "derivation-3.md").write_text(load_build_prompt("derivation-2") + " Be brief.")
    prompts = {"derivation": "derivation-3.md"}
    reviewer = {**ROLE, "model": "another"}
    write_yaml(home, prompts=prompts, lint={"alike": 0.7}, reviewer=reviewer)
    second = stub_run(home)
    text = second.pilot(5)
    first_ids, second_ids = read_ids(second)
    assert len(second_ids) == 5 and not first_ids & second_ids
    assert "derivation: prompt: then derivation-2, now derivation-3" in text
    assert "lint: alike: then 0.8, now 0.7" in text
    log = log_text(home)
    for words in ("review-1: model: then m, now another", "| 1 | 10 |", "| 2 | 10 |"):
        assert words in log
    [prompt] = (home / "b" / "pilots" / "prompts").iterdir()
    assert prompt.name.startswith("derivation-3-") and prompt.read_text().endswith("Be brief.\n")
    with pytest.raises(FreezeError, match="5 left of 5"):
        second.freeze()
    review(second)
    assert second.freeze().is_file() and "Frozen for batch 2." in log_text(home)
    changed = "derivation: prompt: frozen derivation-3, now derivation-2"
    with pytest.raises(FreezeError, match=changed):
        stub_run(home, prompts={}, lint={}).run()


def test_a_row_that_was_read_is_not_read_again_under_another_id(home):
    stub_run(home).pilot(19)
    write_yaml(home, sources=[{name: TABLE[name] for name in TABLE if name != "id"}])
    second = stub_run(home)
    second.pilot(19)
    questions = []
    for path in list_batches(second.pilots):
        questions.append({item.example.raw_query for item in read_batch(path).items})
    assert len(questions[0]) == len(questions[1]) == 19 and not questions[0] & questions[1]


def test_a_full_build_ties_the_folder_to_its_settings(home):
    run = frozen_run(home)
    other = stub_run(home, near={"threshold": 0.95})
    assert other.pipeline.settings() != run.pipeline.settings(), (
        "until then another threshold is taken"
    )
    run.run()
    with pytest.raises(ValueError, match="contains a run with other settings.*near.threshold"):
        stub_run(home, near={"threshold": 0.95})


def test_rows_to_start_from_may_not_change_between_pilot_and_full_build(home):
    run = stub_run(home)
    run.pilot(5)
    review(run)
    shutil.copy(home / "faq.csv", home / "other.csv")
    other_source = [{**TABLE, "path": "other.csv"}]
    write_yaml(home, sources=other_source)
    with pytest.raises(FreezeError, match="changed since the latest batch: sources"):
        stub_run(home).freeze()
    write_yaml(home)
    run.freeze()
    write_yaml(home, sources=other_source)
    with pytest.raises(ValueError, match="contains a run with other settings"):
        stub_run(home)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"derivatoin": "derivation-2"}, "found the stage 'derivatoin'; allowed: screening"),
        ({"derivation": "derivation-9"}, "prompts.derivation: .*no such prompt"),
    ],
)
def test_prompts_that_cannot_be_are_refused_with_the_file(home, prompts, message):
    write_yaml(home, prompts=prompts)
    with pytest.raises(ValueError, match=f"own.yaml: .*{message}"):
        load_build(home / "own.yaml")


def test_a_prompt_is_asked_with_and_names_itself(home):
    (home / "mine.md").write_text("Do it my way.")
    write_yaml(home, prompts={"review": "mine.md"})
    own_prompt = Pipeline(load_build(home / "own.yaml"), home / "b")
    stages = {stage.name: stage for stage, _ in own_prompt.steps}
    draft = Draft(id="x", domain="general", question="Why?", query="Why?")
    for name in ("review-1", "review-2"):
        system, user = stages[name].messages(draft)
        assert system["content"].startswith("Do it my way.") and '"faithful"' in system["content"]
        assert user == REVIEWS["reviewer"].messages(draft)[1]
    shipped_prompt = Pipeline(load_build(home / "own.yaml", {"prompts": {}}), home / "b")
    changes = check_frozen(own_prompt.settings(), shipped_prompt.settings())
    assert [change.name for change in changes] == [
        "review-1: prompt",
        "review-1: prompt text",
        "review-2: prompt",
        "review-2: prompt text",
    ]


# losses


def test_a_pilot_whose_rows_are_all_rejected_draws_others_and_says_why(home):
    run = stub_run(home)
    run.pilot(3)
    [draw] = read_pilots(run.pilots).draws
    shutil.rmtree(home / "b")
    rejected = {int(name.split(":")[1]) for name in draw.ids}
    text = stub_run(home, rejected).pilot(3)
    for words in ("batch 1: 3 examples", "6 of ", "6 by 'review: levels'", "in 2 draws"):
        assert words in text
    first, second = read_pilots(run.pilots).draws
    assert set(first.lost) == set(first.ids) and set(first.ids).isdisjoint(second.ids)
    assert (first.batch, second.batch) == (1, 1)


def test_when_nothing_passes_the_next_pilot_does_not_draw_the_same_rows(home):
    run = stub_run(home, range(40))
    message = (
        "stage review: found every row lost .*18 of 18 rows lost in 3 draws: 18 by 'review: levels'"
    )
    with pytest.raises(NoRowLeft, match=message) as error:
        run.pilot(3)
    assert "continue with: memcalib build own.yaml --pilot 3" in str(error.value)
    assert list_batches(run.pilots) == []
    log = log_text(home)
    assert "18 by review: levels" not in log and log.count("6 by review: levels") == 3
    drawn_ids = set()
    for draw in read_pilots(run.pilots).draws:
        drawn_ids.update(draw.ids)
    assert len(drawn_ids) == 18
    later = stub_run(home)
    later.pilot(3)
    assert drawn_ids.isdisjoint(read_ids(later)[0])


def test_with_other_settings_lost_rows_may_be_drawn_again(home):
    run = stub_run(home, range(40))
    with pytest.raises(NoRowLeft):
        run.pilot(3)
    pool = run.pool().kept
    settings = run.pipeline.settings()
    _, rows_of_same = next_draw(run.pilots, settings, 20, pool)
    write_yaml(home, reviewer={**ROLE, "model": "milder"})
    _, rows_of_other = next_draw(run.pilots, stub_run(home).pipeline.settings(), 20, pool)
    assert len(rows_of_same) == 40 - 18 and len(rows_of_other) == 40


def test_an_interrupted_draw_goes_on_with_its_rows(home):
    run = stub_run(home)
    ids = []

    def stopped(rows, folder):
        ids.append([row.id for row in rows])
        raise KeyboardInterrupt

    run.pipeline.make = stopped
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run.pilot(4)
    assert ids[0] == ids[1] and len(read_pilots(run.pilots).draws) == 1
    later = stub_run(home)
    later.pilot(4)
    assert read_ids(later)[0] <= set(ids[0])


def test_losses_of_reading_name_file_line_and_setting(home):
    (home / "faq.csv").write_text((home / "faq.csv").read_text() + "77,Now?,No.\n78,only one\n")
    text = stub_run(home).pilot(2)
    lines = (home / "b" / "losses.jsonl").read_text().splitlines()
    losses = [json.loads(line) for line in lines]
    assert [(row["rule"], row["file"], row["line"]) for row in losses] == [
        ("question length", "faq.csv", 42),
        ("csv", "faq.csv", 43),
    ]
    assert "screen.limits.general.question_chars" in losses[0]["allowed"]
    assert "not accepted: 2 source rows" in text


def test_a_changed_file_is_read_again_until_a_full_build_begins(home):
    run = stub_run(home)
    assert len(run.pool().kept) == 40
    write_table(home, range(30))
    assert len(stub_run(home).pool().kept) == 30
    run.pilot(3)
    review(run)
    run.freeze()
    run.run()
    write_table(home, range(20))
    assert len(stub_run(home).pool().kept) == 30


def test_rows_that_a_build_began_with_are_kept_whatever_became_of_their_file(home):
    build = load_build(home / "own.yaml")
    pool = screened(build, home / "b").kept
    write_table(home, range(10))
    assert screened(build, home / "b", keep=True).kept == pool
    assert len(screened(build, home / "b").kept) == 10


def test_paths_start_at_the_description(home, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert len(screened(load_build(home / "own.yaml"), home / "b").kept) == 40
    monkeypatch.chdir(home)
    (home / "sub").mkdir()
    copy = shutil.copy(home / "own.yaml", home / "sub" / "own.yaml")
    in_current_folder = load_build(copy)  # the file of the source is there only
    assert in_current_folder.sources[0].file == Path("faq.csv")
    assert build_identity(load_build("own.yaml")) == build_identity(in_current_folder)


def test_a_language_relaxes_what_is_english_only(home):
    write_yaml(home, languages="de")
    build = load_build(home / "own.yaml")
    assert build.languages == ("de",)
    settings = Pipeline(build, home / "b").settings()
    assert settings["screen: limits.general.signals"] == "0"
    rules = {drop.rule for drop in screened(build, home / "b").dropped}
    assert rules == {"language"}, "the rows are English"


@pytest.mark.parametrize("step", [["--freeze"], ["--hub", "x"]])
def test_a_refused_step_leaves_nothing_behind(capsys, home, monkeypatch, step):
    monkeypatch.chdir(home)
    code, _, err = run(capsys, "build", home / "own.yaml", "--out", home / "b", *step)
    assert code == 1 and not (home / "b").exists() and not (home / "x").exists(), err


def fail_in_book(run: BuildRun, reviewer: str) -> None:
    """Fail six rows of the first batch as in JupyterLab, where no command is called."""
    batch = read_batch(list_batches(run.pilots)[0])
    with ReviewBook(batch.reviews, batch.items, reviewer) as book:
        for item in batch.items[:6]:
            book.put(item.id, False, [PilotIssue(stage="rubrics", text="wrong")])


# freezing


@pytest.mark.parametrize("by", ["sheet", "book"])
def test_a_batch_that_fails_after_freezing_takes_it_back(home, by):
    run = stub_run(home)
    run.pilot(10)
    review(run)
    run.freeze()
    run.run()
    card = home / "b" / "README.md"
    assert "10 of 10 rows passed" in card.read_text()
    if by == "sheet":
        text = review(run, 6, reviewer="a second reader")
        for words in ("40.0 %", "is no longer frozen", "--pilot 50"):
            assert words in text
    else:
        fail_in_book(run, "a second reader")
    with pytest.raises(FreezeError, match="4 passed, 6 failed"):
        stub_run(home).run()
    assert not (home / "b" / "frozen.json").exists()
    assert "6 failed" in (home / "b" / "withdrawn-batch-01.json").read_text()
    assert "10 of 10" not in card.read_text()
    assert "6 failed" in card.read_text().partition("## How to load")[0]
    with pytest.raises(FreezeError, match="4 passed, 6 failed"):
        stub_run(home).lay_out(home / "hub")
    with pytest.raises(FreezeError, match="40.0 %"):
        stub_run(home).freeze()


def test_after_a_withdrawal_a_changed_pipeline_starts_over_in_the_folder(home):
    run = frozen_run(home)
    run.run()
    review(run, 3, reviewer="a second reader")
    write_yaml(home, near={"threshold": 0.9})
    changed = stub_run(home)
    changed.pilot(5)
    review(changed)
    changed.freeze()
    before = (home / "b" / "examples.jsonl").read_bytes()
    changed.run()
    assert (home / "b" / "withdrawn-batch-01" / "examples.jsonl").read_bytes() == before
    card = (home / "b" / "README.md").read_text()
    assert "after pilot batch 2, in which 5 of 5 rows passed" in card


def test_a_sheet_of_an_earlier_batch_goes_to_that_batch(home):
    frozen_run(home)
    write_yaml(home, near={"threshold": 0.9})
    stub_run(home).pilot(5)
    write_yaml(home)
    text = review(stub_run(home), 3, number=1, reviewer="a second reader")
    assert text.startswith("batch 1: 5 reviews read")
    assert not (home / "b" / "frozen.json").exists()


def test_a_later_batch_of_other_settings_leaves_a_frozen_pipeline_alone(home):
    frozen_run(home)
    write_yaml(home, near={"threshold": 0.9})
    other = stub_run(home)
    other.pilot(5)
    review(other, 5)
    write_yaml(home)
    assert stub_run(home).run().is_file()


# tables


def test_ids_and_domains_can_be_named_in_a_description(home):
    rows = []
    for number in range(9):
        rows.append({**row_of(number), "area": "health" if number < 3 else ""})
    write_csv(home / "faq.csv", ["no", "q", "a", "area"], rows)
    write_yaml(home, sources=[{**TABLE, "domain_column": "area", "domain": "law"}])
    pool = screened(load_build(home / "own.yaml"), home / "b").kept
    expected = {f"faq:{n}": "health" if n < 3 else "law" for n in range(9)}
    assert {row.id: row.domain for row in pool} == expected


def test_words_for_the_card_do_not_make_another_build(home):
    identity = build_identity(load_build(home / "own.yaml"))
    write_yaml(home, sources=[{**TABLE, "origin": "a shop", "consent": "given"}])
    assert build_identity(load_build(home / "own.yaml")) == identity


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({"id": False}, {}, "sources.0.id: found False; YAML reads no, yes, on and off"),
        ({"question": "q|usr"}, {}, "unknown reader 'usr'; allowed: user, reply"),
        (
            {},
            {"screen": {"limits": {"general": {"word": 3}}}},
            "limits.general.word: found 3, which is not a setting; perhaps you meant words",
        ),
        ({}, {"lint": {"alik": 3}}, "lint.alik: unknown option; perhaps you meant alike"),
        ({}, {"languages": []}, "languages: found"),
    ],
)
def test_what_a_table_cannot_be_is_said_before_a_row_is_read(home, columns, settings, message):
    write_yaml(home, sources=[{**TABLE, **columns}], **settings)
    with pytest.raises(ValueError, match="own.yaml: ") as error:
        load_build(home / "own.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"), [("gone.csv", "gone.csv: no such file"), ("t.xlsx", "saved as CSV")]
)
def test_files_that_cannot_be_read(home, name, message):
    (home / "t.xlsx").write_bytes(b"PK")
    write_yaml(home, sources=[{**TABLE, "path": name}])
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        stub_run(home).pilot(3)


def test_rows_in_another_language_are_told_how_they_pass(home):
    question = (
        "Ich nehme seit Mai jeden Morgen eine Tablette, und meine Knöchel sind abends dick. "
        "Darf ich weniger trinken?"
    )
    answer = (
        "Nein, zu wenig zu trinken kann den Nieren schaden, "
        "solange Sie eine solche Tablette nehmen."
    )
    write_csv(home / "faq.csv", ["no", "q", "a"], [{"no": "1", "q": question, "a": answer}])
    with pytest.raises(NoRowLeft, match=r"function_words; .*languages: \[de\]"):
        stub_run(home).pilot(1)
    write_yaml(home, languages=["de"])
    assert "batch 1: 1 example" in stub_run(home).pilot(1)


GERMAN_COLUMNS = {
    "id": "nr",
    "question": "frage",
    "answer": "antwort",
    "domain": "thema",
    "context": "kontext",
}


def write_micro_table(path) -> None:
    """Rows of the micro-world as a table of somebody's own,
    with semicolons and other names of columns.
    """
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(GERMAN_COLUMNS.values()), delimiter=";")
        writer.writeheader()
        for row in micro_source_rows(150, 3):
            if isinstance(row, SourceRow):
                line = {column: getattr(row, name) for name, column in GERMAN_COLUMNS.items()}
                line["nr"] = row.id.split(":")[1]
                writer.writerow(line)


@pytest.mark.slow
def test_the_whole_way_with_a_table_of_ones_own(capsys, tmp_path):
    write_micro_table(tmp_path / "faq.csv")
    source = {
        "path": "faq.csv",
        "question": "frage",
        "answer": "antwort",
        "context": "kontext",
        "id": "nr",
        "domain_column": "thema",
        "licence": "cc0-1.0",
        "origin": "our help desk",
        "consent": "terms of 2024",
    }
    description = {"sources": [source], "rows": 25, "splits": {"train": 0.7, "test": 0.3}}
    file = tmp_path / "own.yaml"

    def call(*arguments):
        paths = ["--out", tmp_path / "b", "--cache", tmp_path / "c.sqlite"]
        return run(capsys, "build", file, *paths, *arguments)

    with MicroServer([], roles=micro_roles()) as server:
        models = {"reviewer": "micro-reviewer-never"}
        description.update(role_settings(server.base_url, **models))
        file.write_text(json.dumps(description))
        code, _, err = call("--pilot", 3)
        assert code == 1 and "in 3 draws" in err and "--set reviewer.model=NAME" in err
        description["reviewer"]["model"] = "micro-reviewer"
        file.write_text(json.dumps(description))
        code, out, err = call("--pilot", 3)
        assert code == 0, err
        assert "review-1: model: then micro-reviewer-never, now micro-reviewer" in out
        review(BuildRun(load_build(file), tmp_path / "b"))
        assert call("--freeze")[0] == 0
        code, out, err = call()
        assert code == 0 and "Card:" in out, err
        code, out, err = call("--hub", tmp_path / "hub")
        assert code == 0 and "hf upload" in out, err
    card = (tmp_path / "hub" / "README.md").read_text()
    for words in (
        "3 of 3 rows passed",
        "| faq |",
        "our help desk | terms of 2024",
        "Approved by both",
    ):
        assert words in card
    assert (tmp_path / "hub" / "test.jsonl").stat().st_size
