"""Long text without a blank widens no page: measured in Chromium, as wide as a desk and a phone."""

import json
import shutil

import pytest

from memcalib.products.annotation.labels import LabelItem, item_html
from memcalib.products.dataset.pilot_page import row_html
from memcalib.commands.exam import Exam, ExamRun
from memcalib.products.dataset.pilot import PilotItem
from memcalib.evaluation.run import evaluate
from memcalib.io.records import write_jsonl
from memcalib.judge import judgment_for
from memcalib.problem import Example, Level, card_html, sample_records
from memcalib.report.comparison import compare_runs, write_comparison
from memcalib.report.evaluation_report import write_evaluation_report
from memcalib.report.footprint_report import write_footprint_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
LONG = "x" * 8000  # some 58,000 pixels in one line
WIDEST = 2.5  # of a table inside its own scrolling frame, in widths of a desk


def hostile(example: Example) -> Example:
    """The record with long unbroken text in each of its free fields."""
    row = json.loads(example.to_json())
    row["domain"] = f"{row['domain']}{LONG}"
    row["question"] = f"{row['question']} {LONG}"
    first = row["memories"][0]
    first["text"] = f"{first['text']} {LONG}"
    first["usage_rubric"]["correct_use"] = LONG
    first["usage_rubric"]["observable_checks"] = [LONG, LONG]
    block = row["memory_blocks"][0]
    for name in ("memory_text", "atomic_concat_text"):
        block[name] = f"{block[name]} {LONG}"
    return Example.model_validate(row)


EXAMPLES = [hostile(example) for example in sample_records()[:3]]


def judge(example, response):
    levels = dict.fromkeys(example.levels, Level.CONTROL)
    judgment = judgment_for(example, levels, judge=f"judge-{LONG}")
    for atom in judgment.atoms:
        atom.reason = f"</td></table><script>window.ran = 1</script> {LONG}"
        atom.quote = LONG
    return judgment


def answered(folder, name: str):
    """The folder of a run whose answers and judgments are long, with its report."""

    def model(messages):
        return f"# {LONG}\n{LONG}"

    model.__name__ = f"model_{name}"
    evaluate(EXAMPLES, model=model, judge=judge, sampling={"seeds": (1, 2)}, out=folder / name)
    write_jsonl(folder / name / "examples.jsonl", EXAMPLES)
    facts = {"notes": [LONG], "versions": {LONG: LONG}, "command": LONG}
    (folder / name / "manifest.json").write_text(json.dumps(facts))
    write_evaluation_report(folder / name, title=f"Title {LONG}")
    return folder / name


def footprints(folder) -> str:
    """The page of a log whose texts are long."""
    rows = []
    for number in range(3):
        memory = {"id": f"m{number}-{LONG}", "text": f"They sail. {LONG}", "source": LONG}
        row = {"id": f"q{number}", "user_id": LONG, "query": LONG, "answer": f"They sail. {LONG}"}
        rows.append({**row, "memories": [memory]})
    evaluate(rows, judge=judge, out=folder, log={"consent": "given in a test"})
    return write_footprint_report(folder).read_text(encoding="utf-8")


def exam(folder) -> str:
    """The page of an exam whose judge names, quotes and gives reasons at length."""
    run = ExamRun(
        Exam(judge=f"{__name__}:judge", answers=6, pairs=2, rank_pairs=2, real=2, probes=0), folder
    )
    assert run.run()["verdict"] != "passed"
    return (folder / "exam.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """HTML by name."""
    folder = tmp_path_factory.mktemp("long")
    runs = [answered(folder, name) for name in ("one", "two")]
    write_comparison(compare_runs(runs), folder / "compared")
    atom = EXAMPLES[0].atoms[0]
    label_item = LabelItem(
        item="1",
        example_id="e",
        atom_id=atom.atom_id,
        question=LONG,
        memory=[(1, LONG)],
        block=1,
        response=LONG,
        atom=LONG,
        rubric={"correct_use": LONG},
    )
    page = '<!doctype html><meta charset="utf-8"><body>'
    return {
        "report": (runs[0] / "report.html").read_text(encoding="utf-8"),
        "footprints": footprints(folder / "log"),
        "comparison": next((folder / "compared").glob("*.html")).read_text(encoding="utf-8"),
        "exam": exam(folder / "exam"),
        "card": page + card_html(EXAMPLES[0]),
        "pilot": page + row_html(PilotItem(example=EXAMPLES[0], checks={"length": [LONG]})),
        "label": page + item_html(label_item),
    }


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


MEASURE = """() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const frames = [...document.querySelectorAll(".scroll, nav, figure")];
  return {page: document.documentElement.scrollWidth,
          frame: Math.max(0, ...frames.map(frame => frame.scrollWidth))};
}"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "name", ["report", "footprints", "comparison", "exam", "card", "pilot", "label"]
)
def test_long_text_widens_no_page(pages, browser, tmp_path, name, width):
    file = tmp_path / "page.html"
    file.write_text(pages[name], encoding="utf-8")
    shown = LONG[:500] if name == "exam" else LONG  # an exam cuts what a judge writes
    assert shown in pages[name], "the page shows the long text"
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.goto(file.as_uri())
    measured = tab.evaluate(MEASURE)
    tab.close()
    assert measured["page"] <= width, measured
    assert measured["frame"] <= WIDEST * 1280, measured


def test_what_a_judge_writes_runs_nothing_and_is_cut_in_an_exam(pages, browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(pages["exam"], encoding="utf-8")
    assert f"/script&gt; {LONG[:500]}" in pages["exam"]
    assert f"/script&gt; {LONG}" not in pages["exam"], "a reason of 8,000 characters is cut"
    tab = browser.new_page()
    tab.goto(file.as_uri())
    assert tab.evaluate("window.ran") is None
    assert "<script>window.ran" in tab.text_content("body"), "the reason is shown as text"
    tab.close()
