"""The plugin inside a pytest of its own: scores, failures that say why, and what is missing."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
import memcalib as mc
from memcalib.problem import judgment_for

@pytest.fixture(scope="session")
def memory_data():
    return [
        mc.Example.of(f"What can I bake {n}?", {"Allergic to nuts.": "C"}, {"Plays chess.": "A"})
        for n in range(3)
    ]

@pytest.fixture(scope="session")
def memory_model():
    calls = []

    def model(messages):
        calls.append(messages)
        return "A chess cake without nuts."

    yield model
    assert len(calls) == 3
"""
JUDGE = """

@pytest.fixture(scope="session")
def memory_judge():
    def judge(example, response):
        return judgment_for(example, {"m1_a1": "C", "m2_a1": "B"}, judge="by hand")
    return judge
"""
TESTS = """
def test_score(memory_use):
    assert memory_use.score >= 60

def test_under_use(memory_use, tmp_path):
    assert memory_use.under_use == 0 and memory_use.unscored == 0
    assert (memory_use.save(tmp_path / "run") / "judgments.jsonl").is_file()
"""


@pytest.fixture
def plugin(pytester, monkeypatch):
    monkeypatch.setenv("MEMCALIB_CACHE", str(pytester.path / "calls.sqlite"))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)

    def run(conftest: str, ini: str = "", tests: str = TESTS):
        pytester.makeconftest(conftest)
        pytester.makeini(f"[pytest]\n{ini}")
        pytester.makepyfile(tests)
        return pytester.runpytest(
            "-p", "memcalib.products.integrations.pytest_plugin", "-p", "no:xdist"
        )

    return run


def test_a_failed_assertion_names_the_worst_memories(plugin):
    result = plugin(CONFTEST + JUDGE)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*SCS: 50.0 >= 60*",
            "*3 answers to 3 questions, 0 unscored*",
            "*over-use: 'Plays chess.' should be Ignore but was Bound*",
        ]
    )


def test_a_missing_key_is_named_before_the_model_is_asked(plugin):
    settings = "memcalib_judge = some-judge\nmemcalib_judge_key_env = NO_SUCH_KEY\n"
    refusing = CONFTEST.replace("len(calls) == 3", "calls == []")
    result = plugin(refusing, settings)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*no key for some-judge*set NO_SUCH_KEY*"])
    result = plugin(refusing, f"{settings}memcalib_without_key = skip\n")
    result.assert_outcomes(skipped=2)
    result = plugin(refusing, f"{settings}memcalib_without_key = ignore\n")
    result.stdout.fnmatch_lines(["*memcalib_without_key: found 'ignore'; allowed: fail, skip*"])


@pytest.mark.parametrize(
    ("conftest", "message"),
    [
        ("", "*memory_judge: found no memcalib_judge*"),
        (f"import pytest\nfrom memcalib.problem import judgment_for\n{JUDGE}", "*memory_model: *"),
        (
            CONFTEST.replace('"A chess cake without nuts."', "None") + JUDGE,
            "*all 3 answers failed*",
        ),
    ],
)
def test_what_is_missing_is_said(plugin, conftest, message):
    result = plugin(conftest)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines([message])


def test_a_metric_that_does_not_exist_is_answered_with_the_known_ones(plugin):
    tests = "def test_it(memory_use):\n    memory_use.metric('SCSS')\n"
    result = plugin(CONFTEST + JUDGE, tests=tests)
    result.stdout.fnmatch_lines(["*found 'SCSS'; allowed: SCS, Exact*"])
