"""Between pilots settings are mended, and no row is read twice; freezing is taken back; a build goes to a hub."""

import csv
import json
import shutil

import pytest
from command_line import run

from memcalib.commands import build as b
from memcalib.commands.build import BuildRun, Made, NoRowLeft, load_build, screened, settings_of
from memcalib.dataset.pilot import FreezeError, list_batches, read_batch, read_makings
from memcalib.dataset.review import check_drafts
from memcalib.dataset.stages import Drop, load_build_prompt
from memcalib.io.records import write_jsonl
from memcalib.io.decisions import write_csv
from memcalib.practice.mistakes import micro_roles
from memcalib.practice.server import MicroServer
from memcalib.practice.source import source_rows
from memcalib.problem import sample_records

ROLE = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": ""}
ROLES = {"builder": ROLE, "reviewer": ROLE, "reviewer2": ROLE | {"model": "n"}}
COLUMNS = {"path": "faq.csv", "question": "q", "answer": "a", "id": "no", "licence": "cc0-1.0"}
ANSWER = (
    "Ask at the desk by the door, they keep two spares for each flat, and bring your passport, "
    "or somebody who knows you."
)
THINGS = [
    "key",
    "bike",
    "coat",
    "ring",
    "book",
    "lamp",
    "tent",
    "drum",
    "oven",
    "sofa",
    "desk",
    "vase",
    "boat",
    "kite",
    "harp",
    "sled",
    "fork",
    "door",
    "gate",
    "bell",
    "rope",
    "cart",
]


def row_of(number: int) -> dict[str, str]:
    thing = THINGS[number % len(THINGS)]
    other = THINGS[(number * 7 + number // 22 + 1) % len(THINGS)]
    asked = f"I have lost my {thing} near the {other} number {number * 37}, and I need it on Friday for my work. "
    asked += "What should I do about it?"
    return {
        "no": str(number),
        "q": asked,
        "a": f"{ANSWER} The {thing} and the {other} have the numbers {number} and {number * 991}.",
    }


@pytest.fixture
def home(tmp_path):
    write_csv(tmp_path / "faq.csv", ["no", "q", "a"], [row_of(number) for number in range(40)])
    write_yaml(tmp_path)
    return tmp_path


def write_yaml(home, **more) -> None:
    (home / "own.yaml").write_text(json.dumps({"sources": [COLUMNS], "rows": 20} | ROLES | more))


class Loop(BuildRun):
    """A build whose stages are made without a model: `lost` are the numbers of rows that the review rejects."""

    lost = frozenset()

    def make(self, rows, place):
        self.run_folder.bind()
        drops = [
            Drop(id=row.id, stage="review", reason="levels")
            for row in rows
            if int(row.id.split(":")[1]) in self.lost
        ]
        if len(drops) == len(rows):
            raise b._none_left("review", drops, self.go_on, place)
        gone = {drop.id for drop in drops}
        if place == self.folder:
            (place / "stages").mkdir(exist_ok=True)
            write_jsonl(place / "stages" / "screening.jsonl", drops)
        return Made(
            [self.start(row) for row in rows if row.id not in gone],
            drops,
            check_drafts([])[2],
            None,
        )

    def examples(self, drafts):
        record = sample_records()[0]
        return [
            record.model_copy(update={"id": d.id, "domain": d.domain, "raw_query": d.question})
            for d in drafts
        ]

    def document(self, examples, rows, passed, made, frozen):
        b.write_card(self.folder, b.CardFacts("Loop", b.count_examples(examples), frozen=frozen))
        return self.folder / "README.md"


def loop(home, lost=(), **more) -> Loop:
    made = Loop(load_build(home / "own.yaml", more), home / "b", command="memcalib build own.yaml")
    made.lost = frozenset(lost)
    return made


def review(own: BuildRun, fails: int = 0, number: int = 0, reviewer: str = "a reader") -> str:
    """Fill in and take in the sheet of a batch, the latest if no number is given; the first rows fail."""
    folder = list_batches(own.pilots)[number - 1]
    with open(folder / "sheet.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for k, row in enumerate(rows):
        bad = {"result": "fail", "stage": "derivation", "issue": "the query says it already"}
        row |= bad if k < fails else {"result": "pass", "stage": "", "issue": ""}
    return own.take_reviews(
        write_csv(folder / f"filled-{fails}.csv", list(rows[0]), rows), reviewer
    )


def frozen(home):
    """A build whose first pilot batch was read, passed and frozen."""
    own = loop(home)
    own.pilot(5)
    review(own)
    own.freeze()
    return own


def read_ids(own: BuildRun) -> list[list[str]]:
    return [[item.id for item in read_batch(path).items] for path in list_batches(own.pilots)]


# mending


def test_a_mended_prompt_and_threshold_make_a_fresh_batch_in_the_same_folder(home):
    first = loop(home)
    first.pilot(5)
    assert "40.0 %" in review(first, 3)
    (home / "derivation-3.md").write_text(load_build_prompt("derivation-2") + " Be brief.")
    write_yaml(
        home,
        prompts={"derivation": "derivation-3.md"},
        lint={"alike": 0.7},
        reviewer=ROLE | {"model": "another"},
    )
    second = loop(home)
    said = second.pilot(5)
    one, two = read_ids(second)
    assert len(two) == 5 and not {*one} & {*two}
    assert (
        "derivation: prompt: then derivation-2, now derivation-3" in said
        and "lint: alike: then 0.8, now 0.7" in said
    )
    log = (home / "b" / "pilots" / "log.md").read_text()
    assert (
        "review-1: model: then m, now another" in log
        and "| 1 | 10 |" in log
        and "| 2 | 10 |" in log
    )
    (kept,) = (home / "b" / "pilots" / "prompts").iterdir()
    assert kept.name.startswith("derivation-3-") and kept.read_text().endswith("Be brief.\n")
    with pytest.raises(FreezeError, match="5 left of 5"):
        second.freeze()
    review(second)
    assert (
        second.freeze().is_file()
        and "Frozen for batch 2." in (home / "b" / "pilots" / "log.md").read_text()
    )
    with pytest.raises(
        FreezeError, match="derivation: prompt: frozen derivation-3, now derivation-2"
    ):
        loop(home, prompts={}, lint={}).run()


def test_a_row_that_was_read_is_not_read_again_under_another_id(home):
    first = loop(home)
    first.pilot(19)
    write_yaml(home, sources=[{name: column for name, column in COLUMNS.items() if name != "id"}])
    second = loop(home)
    second.lost = frozenset()
    second.make = lambda rows, place: Made(
        [second.start(row) for row in rows], [], check_drafts([])[2], None
    )
    second.pilot(19)
    asked = [
        {item.example.raw_query for item in read_batch(path).items}
        for path in list_batches(second.pilots)
    ]
    assert len(asked[0]) == len(asked[1]) == 19 and not asked[0] & asked[1]


def test_a_full_build_ties_the_folder_to_its_settings(home):
    own = frozen(home)
    assert loop(home, near={"threshold": 0.95}).settings() != own.settings(), (
        "until then another threshold is taken"
    )
    own.run()
    with pytest.raises(ValueError, match="holds a run of other settings.*near.threshold"):
        loop(home, near={"threshold": 0.95})


def test_rows_to_start_from_may_not_change_between_pilot_and_full_build(home):
    own = loop(home)
    own.pilot(5)
    review(own)
    shutil.copy(home / "faq.csv", home / "other.csv")
    write_yaml(home, sources=[COLUMNS | {"path": "other.csv"}])
    with pytest.raises(FreezeError, match="changed since the latest batch: sources"):
        loop(home).freeze()
    write_yaml(home)
    own.freeze()
    write_yaml(home, sources=[COLUMNS | {"path": "other.csv"}])
    with pytest.raises(ValueError, match="holds a run of other settings"):
        loop(home)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"derivatoin": "derivation-2"}, "found the stage 'derivatoin'; allowed are screening"),
        ({"derivation": "derivation-9"}, "prompts.derivation: .*no such prompt"),
    ],
)
def test_prompts_that_cannot_be_are_refused_with_the_file(home, prompts, said):
    write_yaml(home, prompts=prompts)
    with pytest.raises(ValueError, match=f"own.yaml: .*{said}"):
        load_build(home / "own.yaml")


def test_a_prompt_is_asked_with_and_names_itself(home):
    (home / "mine.md").write_text("Do it my way.")
    write_yaml(home, prompts={"review": "mine.md"})
    build = load_build(home / "own.yaml")
    stages = {stage.name: stage for stage, _ in b.calls_of(build)}
    draft = b.Draft(id="x", domain="general", question="Why?", query="Why?")
    for name in ("review-1", "review-2"):
        system, user = stages[name].messages(draft)
        assert system["content"].startswith("Do it my way.") and '"faithful"' in system["content"]
        assert user == b.REVIEWED["reviewer"].messages(draft)[1]
    changed = b.check_frozen(
        settings_of(build), settings_of(load_build(home / "own.yaml", {"prompts": {}}))
    )
    assert [change.name for change in changed] == [
        f"review-{k}: prompt{end}" for k in (1, 2) for end in ("", " text")
    ]


# losses


def test_a_pilot_whose_rows_are_all_rejected_draws_others_and_says_why(home):
    own = loop(home)
    own.pilot(3)
    bad = {int(name.split(":")[1]) for name in read_makings(own.pilots)[0].ids}
    shutil.rmtree(home / "b")
    own = loop(home, bad)
    said = own.pilot(3)
    assert (
        "batch 1: 3 examples" in said
        and "6 of " in said
        and "6 by 'review: levels'" in said
        and "in 2 draws" in said
    )
    first, second = read_makings(own.pilots)
    assert (
        {*first.lost} == {*first.ids}
        and not {*first.ids} & {*second.ids}
        and (first.batch, second.batch) == (1, 1)
    )


def test_when_nothing_passes_the_next_pilot_does_not_draw_the_same_rows(home):
    own = loop(home, range(40))
    with pytest.raises(
        NoRowLeft,
        match="stage review: found every row lost .*18 of 18 rows lost in 3 draws: 18 by 'review: levels'",
    ) as error:
        own.pilot(3)
    assert (
        "go on with: memcalib build own.yaml --pilot 3" in str(error.value)
        and list_batches(own.pilots) == []
    )
    assert (
        "18 by review: levels" not in (log := (home / "b" / "pilots" / "log.md").read_text())
        and log.count("6 by review: levels") == 3
    )
    drawn = [name for making in read_makings(own.pilots) for name in making.ids]
    assert len(set(drawn)) == 18
    again = loop(home)
    again.pilot(3)
    assert not {*read_ids(again)[0]} & {*drawn}
    write_yaml(home, reviewer=ROLE | {"model": "milder"})
    other = loop(home)
    assert set(drawn) & {row.id for row in other.unread(other.pool().kept)}, (
        "with another reviewer those rows were never read"
    )


def test_an_interrupted_draw_goes_on_with_its_rows(home):
    own = loop(home)
    ids = []

    def stopped(rows, place):
        ids.append([row.id for row in rows])
        raise KeyboardInterrupt

    own.make = stopped
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            own.pilot(4)
    assert ids[0] == ids[1] and len(read_makings(own.pilots)) == 1
    again = loop(home)
    again.pilot(4)
    assert {*read_ids(again)[0]} <= {*ids[0]}


def test_losses_of_reading_name_file_line_and_setting(home):
    (home / "faq.csv").write_text((home / "faq.csv").read_text() + "77,Now?,No.\n78,only one\n")
    own = loop(home)
    said = own.pilot(2)
    lost = [json.loads(line) for line in (home / "b" / "losses.jsonl").read_text().splitlines()]
    assert [(row["rule"], row["file"], row["line"]) for row in lost] == [
        ("question length", "faq.csv", 42),
        ("csv", "faq.csv", 43),
    ]
    assert (
        "screen.limits.general.question_chars" in lost[0]["allowed"]
        and "not let in: 2 source rows" in said
    )


def test_a_mended_file_is_read_again_until_a_full_build_begins(home):
    own = loop(home)
    assert len(own.pool().kept) == 40
    write_csv(home / "faq.csv", ["no", "q", "a"], [row_of(number) for number in range(30)])
    assert len(loop(home).pool().kept) == 30
    own.pilot(3)
    review(own)
    own.freeze()
    own.run()
    write_csv(home / "faq.csv", ["no", "q", "a"], [row_of(number) for number in range(20)])
    assert len(loop(home).pool().kept) == 30


def test_a_folder_of_before_keeps_its_rows_and_takes_changed_thresholds(home):
    build = load_build(home / "own.yaml")
    kept = screened(build, home / "b").kept
    (home / "b" / "pool.json").unlink()
    write_csv(home / "faq.csv", ["no", "q", "a"], [row_of(number) for number in range(10)])
    assert screened(build, home / "b").kept == kept


def test_paths_start_at_the_description(home, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert len(screened(load_build(home / "own.yaml"), home / "b").kept) == 40
    monkeypatch.chdir(home)
    (home / "sub").mkdir()
    shutil.copy(
        home / "own.yaml", home / "sub" / "own.yaml"
    )  # the file is in the current folder only
    assert load_build(home / "sub" / "own.yaml").sources[0].file == b.Path("faq.csv")
    assert b.build_identity(load_build("own.yaml")) == b.build_identity(
        load_build(home / "sub" / "own.yaml")
    )


def test_a_language_relaxes_what_is_english_only(home):
    write_yaml(home, languages="de")
    build = load_build(home / "own.yaml")
    assert build.languages == ("de",)
    assert settings_of(build)["screen: limits.general.signals"] == "0"
    assert {drop.rule for drop in screened(build, home / "b").dropped} == {
        "language"
    }  # the rows are English


# freezing


def test_a_refused_freeze_leaves_nothing_behind(capsys, home):
    for step in ("--freeze", "--hub"):
        code, _, err = run(
            capsys,
            "build",
            home / "own.yaml",
            "--out",
            home / "b",
            step,
            *(["x"] if step == "--hub" else []),
        )
        assert code == 1 and not (home / "b").exists() and not (home / "x").exists(), err


@pytest.mark.parametrize("by", ["sheet", "book"])
def test_a_batch_that_fails_after_freezing_takes_it_back(home, by):
    own = loop(home)
    own.pilot(10)
    review(own)
    own.freeze()
    own.run()
    card = home / "b" / "README.md"
    assert "10 of 10 rows passed" in card.read_text()
    if by == "sheet":
        said = review(own, 6, reviewer="a second reader")
        assert "40.0 %" in said and "is not frozen any more" in said and "--pilot 50" in said
    else:  # as in JupyterLab, where no command is called
        batch = read_batch(list_batches(own.pilots)[0])
        from memcalib.dataset.pilot import PilotIssue, ReviewBook

        with ReviewBook(batch.reviews, batch.items, "a second reader") as book:
            for item in batch.items[:6]:
                book.put(item.id, False, [PilotIssue(stage="rubrics", text="wrong")])
    with pytest.raises(FreezeError, match="4 passed, 6 failed"):
        loop(home).run()
    assert (
        not (home / "b" / "frozen.json").exists()
        and "6 failed" in (home / "b" / "withdrawn-batch-01.json").read_text()
    )
    assert (
        "10 of 10" not in card.read_text()
        and "6 failed" in card.read_text().partition("## How to load")[0]
    )
    with pytest.raises(FreezeError, match="4 passed, 6 failed"):
        loop(home).lay_out(home / "hub")
    with pytest.raises(FreezeError, match="40.0 %"):
        loop(home).freeze()


def test_after_a_withdrawal_a_mended_pipeline_starts_over_in_the_folder(home):
    own = frozen(home)
    own.run()
    review(own, 3, reviewer="a second reader")
    write_yaml(home, near={"threshold": 0.9})
    mended = loop(home)
    mended.pilot(5)
    review(mended)
    mended.freeze()
    before = (home / "b" / "examples.jsonl").read_bytes()
    mended.run()
    assert (home / "b" / "withdrawn-batch-01" / "examples.jsonl").read_bytes() == before
    assert (
        "after pilot batch 2, in which 5 of 5 rows passed" in (home / "b" / "README.md").read_text()
    )


def test_a_sheet_of_an_earlier_batch_goes_to_that_batch(home):
    frozen(home)
    write_yaml(home, near={"threshold": 0.9})
    loop(home).pilot(5)
    write_yaml(home)
    said = review(loop(home), 3, number=1, reviewer="a second reader")
    assert (
        said.startswith("batch 1: 5 reviews taken in") and not (home / "b" / "frozen.json").exists()
    )


def test_a_later_batch_of_other_settings_leaves_a_frozen_pipeline_alone(home):
    frozen(home)
    write_yaml(home, near={"threshold": 0.9})
    other = loop(home)
    other.pilot(5)
    review(other, 5)
    write_yaml(home)
    assert loop(home).run().is_file()


# tables


def test_ids_and_domains_can_be_named_in_a_description(home):
    rows = [row_of(number) | {"area": "health" if number < 3 else ""} for number in range(9)]
    write_csv(home / "faq.csv", ["no", "q", "a", "area"], rows)
    write_yaml(home, sources=[COLUMNS | {"domain_column": "area", "domain": "law"}])
    kept = screened(load_build(home / "own.yaml"), home / "b").kept
    assert {row.id: row.domain for row in kept} == {
        f"faq:{n}": "health" if n < 3 else "law" for n in range(9)
    }


def test_younger_options_do_not_make_an_older_folder_another_build(home):
    write_yaml(home, sources=[{name: column for name, column in COLUMNS.items() if name != "id"}])
    now = b.build_identity(load_build(home / "own.yaml"))["sources"][0]
    assert set(now) == {
        "source",
        "path",
        "limit",
        "question",
        "answer",
        "context",
        "domain",
        "licence",
    }
    write_yaml(home, sources=[COLUMNS | {"origin": "a shop", "consent": "given"}])
    assert "origin" not in b.build_identity(load_build(home / "own.yaml"))["sources"][0]


@pytest.mark.parametrize(
    ("columns", "more", "said"),
    [
        ({"id": False}, {}, "sources.0.id: found False; YAML takes no, yes, on and off"),
        ({"question": "q|usr"}, {}, "unknown reader 'usr'; allowed are user, reply"),
        (
            {},
            {"screen": {"limits": {"general": {"word": 3}}}},
            "limits.general.word: found 3, which is not a setting; meant is perhaps words",
        ),
        ({}, {"lint": {"alik": 3}}, "lint.alik: unknown option; meant is perhaps alike"),
        ({}, {"languages": []}, "languages: found"),
    ],
)
def test_what_a_table_cannot_be_is_said_before_a_row_is_read(home, columns, more, said):
    write_yaml(home, sources=[COLUMNS | columns], **more)
    with pytest.raises(ValueError, match="own.yaml: ") as error:
        load_build(home / "own.yaml")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"), [("gone.csv", "gone.csv: no such file"), ("t.xlsx", "saved as CSV")]
)
def test_files_that_cannot_be_read(home, name, said):
    (home / "t.xlsx").write_bytes(b"PK")
    write_yaml(home, sources=[COLUMNS | {"path": name}])
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        loop(home).pilot(3)


def test_rows_in_another_language_are_told_how_they_pass(home):
    asked = "Ich nehme seit Mai jeden Morgen eine Tablette, und meine Knöchel sind abends dick. Darf ich weniger trinken?"
    said = "Nein, zu wenig zu trinken kann den Nieren schaden, solange Sie eine solche Tablette nehmen."
    write_csv(home / "faq.csv", ["no", "q", "a"], [{"no": "1", "q": asked, "a": said}])
    with pytest.raises(NoRowLeft, match=r"function_words; .*languages: \[de\]"):
        loop(home).pilot(1)
    write_yaml(home, languages=["de"])
    assert "batch 1: 1 examples" in loop(home).pilot(1)


@pytest.mark.slow
def test_the_whole_way_with_a_table_of_ones_own(capsys, tmp_path):
    rows = [row for row in source_rows(150, 3) if hasattr(row, "answer")]
    lines = [
        {
            "nr": row.id.split(":")[1],
            "frage": row.question,
            "antwort": row.answer,
            "thema": row.domain,
            "kontext": row.context,
        }
        for row in rows
    ]
    with open(tmp_path / "faq.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), delimiter=";")
        writer.writeheader()
        writer.writerows(lines)
    columns = {
        "path": "faq.csv",
        "question": "frage",
        "answer": "antwort",
        "context": "kontext",
        "id": "nr",
        "domain_column": "thema",
    }
    said = {"licence": "cc0-1.0", "origin": "our help desk", "consent": "terms of 2024"}
    with MicroServer([], roles=micro_roles()) as server:

        def role(model):
            return {
                "model": model,
                "base_url": server.base_url,
                "key_env": "",
                "thinking": "default",
            }

        roles = {
            "builder": role("micro-builder"),
            "reviewer": role("micro-reviewer-never"),
            "reviewer2": role("micro-reviewer-2"),
        }
        whole = {
            "sources": [columns | said],
            "rows": 25,
            "splits": {"train": 0.7, "test": 0.3},
        } | roles
        (tmp_path / "own.yaml").write_text(json.dumps(whole))

        def call(*more):
            return run(
                capsys,
                "build",
                tmp_path / "own.yaml",
                "--out",
                tmp_path / "b",
                "--cache",
                tmp_path / "c.sqlite",
                *more,
            )

        code, _, err = call("--pilot", 3)
        assert code == 1 and "in 3 draws" in err and "--set reviewer.model=NAME" in err
        (tmp_path / "own.yaml").write_text(json.dumps(whole | {"reviewer": role("micro-reviewer")}))
        code, out, err = call("--pilot", 3)
        assert (
            code == 0 and "review-1: model: then micro-reviewer-never, now micro-reviewer" in out
        ), err
        own = BuildRun(load_build(tmp_path / "own.yaml"), tmp_path / "b")
        review(own)
        assert call("--freeze")[0] == 0
        code, out, err = call()
        assert code == 0 and "Card:" in out, err
        code, out, err = call("--hub", tmp_path / "hub")
        assert code == 0 and "hf upload" in out, err
    card = (tmp_path / "hub" / "README.md").read_text()
    assert (
        "3 of 3 rows passed" in card
        and "| faq |" in card
        and "our help desk | terms of 2024" in card
        and "Approved by both" in card
    )
    assert (tmp_path / "hub" / "test.jsonl").stat().st_size
