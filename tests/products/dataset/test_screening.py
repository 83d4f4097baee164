"""Screening: each rule finds its own kind of defect, clean rows pass, odd text never breaks it."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.dataset import screening as sc
from memcalib.products.dataset import sources as s
from memcalib.io.records import DataError

CONFIG = sc.load_screen()

PARTS = {
    "health": (
        [
            "I am a {n} year old {who} and have had {what} for {m} weeks.",
            "My {who} is {n} and takes {m} mg of a blood pressure tablet every day.",
            "Since last month my {who}, aged {n}, wakes up with {what} each morning.",
        ],
        [
            "We cannot get an appointment before June. Is it safe to wait?",
            "The blood test was normal, but I smoke. What should I look out for?",
            "She is allergic to penicillin. Which medicine could she take instead?",
        ],
        [
            "{What} that lasts this long should be looked at, but it is rarely an emergency.",
            (
                "Keep a diary of when it comes and goes, how strong it is, "
                "and what makes it better or worse."
            ),
            "If there is fever, weight loss or trouble breathing, go to a clinic on the same day.",
            "Until then rest, drink enough water, and avoid anything that you know brings it on.",
        ],
        {
            "who": ["mother", "father", "son", "daughter", "wife"],
            "what": ["headache", "a dry cough", "knee pain", "nausea"],
        },
    ),
    "general": (
        [
            "I am planning a {what} for {n} people, and my {who} cannot eat nuts.",
            "My {who} is turning {n} next week and we have a budget of {m} euros.",
            "We moved to a small town {m} months ago, and I promised my {who} a {what}.",
        ],
        [
            "Can you suggest three ideas that do not need a car?",
            "Please write a short invitation in a friendly style.",
            "What would you do first, and what can wait until the weekend?",
        ],
        [
            "A {what} like this works best when you keep it simple and start early.",
            (
                "Make a list of who comes, ask each of them to bring one thing, "
                "and book the room today."
            ),
            "Set aside a third of the money for surprises, because there is always one.",
            "On the day itself, let others help you; they will enjoy it more.",
        ],
        {
            "who": ["sister", "teacher", "neighbour", "friend"],
            "what": ["picnic", "garden party", "book club", "day trip"],
        },
    ),
    "coding": (
        [
            "I use Python 3.{n} on Linux and need to {what} a list of {m} million numbers.",
            (
                "My {who} reads a CSV file with {n} columns, and I have to {what} the rows without "
                "loading it all."
            ),
            (
                "Given an array of {n} integers, {what} it in place; "
                "memory is limited to {m} megabytes."
            ),
        ],
        [
            "I already tried pandas, but it runs out of memory. How can I do this?",
            "Write a function that returns the result and never raises an error.",
            "Which data structure should I use, and why is a plain loop so slow?",
        ],
        [
            "def solve(rows):\n    best = {{}}\n    for key, value in rows:\n"
            "        best[key] = max(value, best.get(key, 0))\n",
            "    return sorted(best.items(), key=lambda item: (-item[1], item[0]))[:{n}]\n\n",
            (
                "Read the file line by line with a generator, so that only one row is in memory at "
                "a time."
            ),
            "Sorting costs n log n here; if you only need the top {m}, a heap is quicker.",
        ],
        {
            "who": ["script", "service", "notebook"],
            "what": ["sort", "deduplicate", "rotate", "filter"],
        },
    ),
}


def clean(domain: str, seed: int) -> s.SourceRow:
    """An invented row of a domain that screening lets through."""
    rng = random.Random(f"{domain}{seed}")
    statements, questions, advice, slots = PARTS[domain]
    fill = {name: rng.choice(options) for name, options in slots.items()}
    fill["n"] = rng.randint(4, 90)
    fill["m"] = rng.randint(2, 9)
    fill["What"] = fill.get("what", "").capitalize()
    answer = advice if domain == "coding" else rng.sample(advice, 3)
    return s.SourceRow(
        id=f"{domain}:{seed}",
        source="clean",
        domain=domain,
        question=f"{rng.choice(statements)} {rng.choice(questions)}".format(**fill),
        answer=" ".join(answer).format(**fill),
    )


def with_text(row, **changes):
    return row.model_copy(update=changes)


def in_one_field(row, rng, texts):
    """A row whose question or answer is one of these texts."""
    name = rng.choice(["question", "answer"])
    return with_text(row, **{name: rng.choice(texts)})


def finding(rule_name, row, config=None):
    """What a rule says of a row."""
    return sc.RULES[rule_name](sc.RowView(row, config or CONFIG))


OTHER_LANGUAGES = [
    (
        "Ich habe seit drei Wochen Kopfschmerzen und nehme jeden Morgen eine Tablette. "
        "Was soll ich jetzt tun, bitte?"
    ),
    (
        "J'ai mal à la tête depuis trois semaines et je prends un comprimé tous les matins. "
        "Que dois-je faire maintenant ?"
    ),
    (
        "Me duele la cabeza desde hace tres semanas y tomo una pastilla todas las mañanas. "
        "¿Qué debo hacer ahora?"
    ),
    (
        "Ho mal di testa da tre settimane e prendo una compressa ogni mattina. "
        "Che cosa devo fare adesso, per favore?"
    ),
    (
        "Estou com dor de cabeça há três semanas e tomo um comprimido todas as manhãs. "
        "O que devo fazer agora?"
    ),
    (
        "Ik heb al drie weken hoofdpijn en neem elke ochtend een tablet. "
        "Wat moet ik nu het beste doen, alstublieft?"
    ),
    (
        "Jag har haft huvudvärk i tre veckor och tar en tablett varje morgon. "
        "Vad ska jag göra nu, snälla?"
    ),
    (
        "Boli mnie głowa od trzech tygodni i biorę tabletkę każdego ranka. "
        "Co powinienem teraz zrobić, proszę?"
    ),
    (
        "Üç haftadır başım ağrıyor ve her sabah bir tablet alıyorum. "
        "Şimdi ne yapmam gerekiyor, lütfen söyleyin?"
    ),
    (
        "Kepala saya sakit selama tiga minggu dan saya minum tablet setiap pagi. "
        "Apa yang harus saya lakukan sekarang?"
    ),
]
OTHER_SCRIPTS = [
    "У меня три недели болит голова, и я принимаю таблетку каждое утро. Что мне делать?",
    "我头痛已经三个星期了，每天早上吃一片药，医生说要再等两个星期，可是我很担心，请问现在应该怎么办才好呢？谢谢大家的帮助。",
    "أعاني من صداع منذ ثلاثة أسابيع وأتناول قرصا كل صباح. ماذا علي أن أفعل الآن؟",
    "मुझे तीन हफ्ते से सिरदर्द है और मैं हर सुबह एक गोली लेता हूं। अब मुझे क्या करना चाहिए?",
]
STOCK = (
    "Hello and welcome to our forum! Thank you for your question today. I hope this helps you and "
    "your family. Feel free to ask again at any time. Please take care of yourself, with regards "
    "and best wishes. {} now."
)


def mojibake(text):
    return text.replace("e", "é").encode("utf-8").decode("latin-1")


def without_text(row, rng):
    return in_one_field(row, rng, ["", " \n"])


def with_short_question(row, rng):
    return with_text(row, question=row.question[: rng.randint(5, 39)])


def with_endless_answer(row, rng):
    return with_text(row, answer=row.answer * rng.choice([60, 200]))


def with_endless_context(row, rng):
    return with_text(row, context="line of log\n" * rng.randint(900, 2000))


def with_two_words(row, rng):
    question = f"Pseudohypoparathyroidism{rng.random()}, electroencephalographically?"
    return with_text(row, question=question)


def with_damage(row, rng):
    if rng.random() < 0.5:
        return with_text(row, answer=mojibake(row.answer))
    return with_text(row, answer=row.answer.replace("a", "�"))


def in_another_script(row, rng):
    return with_text(row, question=rng.choice(OTHER_SCRIPTS))


def in_another_language(row, rng):
    return in_one_field(row, rng, OTHER_LANGUAGES)


def with_symbols(row, rng):
    answer = re.sub(" ", lambda _: rng.choice([" ", " *# ", " <> "]), row.answer)
    return with_text(row, answer=answer)


def with_a_held_key(row, rng):
    return with_text(row, question=row.question + rng.choice("!?ha") * rng.randint(13, 40))


def with_circles(row, rng):
    return with_text(row, answer=(row.answer[:70] + " ") * rng.randint(12, 20))


def with_stock_phrases(row, rng):
    return with_text(row, answer=STOCK.format(rng.choice(["Rest", "Drink", "Sleep"])))


def asking_nothing(row, rng):
    question = f"We moved to a small town {rng.randint(2, 9)} months ago. My sister likes it."
    return with_text(row, question=question)


def with_copied_answer(row, rng):
    return with_text(row, question=f"{row.question}\n{row.answer}")


def about_nobody(row, rng):
    openings = ["What is the colour of the sky", "Who was the first to fly"]
    return with_text(row, question=f"{rng.choice(openings)} and why is it so?")


def saying_little(row, rng):
    return with_text(
        row,
        question="Is a cold shower good for a sore knee or not?",
        answer="It depends on the heart, so ask a doctor first, please.",
    )


DEFECTS = {
    "presence": ("health", without_text),
    "question length": ("health", with_short_question),
    "answer length": ("general", with_endless_answer),
    "context length": ("coding", with_endless_context),
    "few words": ("health", with_two_words),
    "damage": ("general", with_damage),
    "letters": ("health", in_another_script),
    "language": ("health", in_another_language),
    "symbols": ("general", with_symbols),
    "run": ("general", with_a_held_key),
    "loop": ("health", with_circles),
    "boilerplate": ("health", with_stock_phrases),
    "intent": ("general", asking_nothing),
    "containment": ("coding", with_copied_answer),
    "signals": ("general", about_nobody),
    "score": ("health", saying_little),
}


@pytest.mark.parametrize("name", list(sc.RULES))
def test_planted_defects_are_found_by_their_own_rule(name):
    domain, spoil = DEFECTS[name]
    rng = random.Random(name)
    caught = 0
    for seed in range(50):
        outcome = sc.screen_row(spoil(clean(domain, seed), rng), CONFIG)
        if isinstance(outcome, s.Dropped) and outcome.rule == name:
            caught += 1
    assert caught >= 48, (name, caught, outcome)


@pytest.mark.parametrize("domain", list(PARTS))
def test_clean_rows_pass(domain):
    passed = s.collect(sc.screen((clean(domain, seed) for seed in range(400)), CONFIG))
    assert len(passed.dropped) <= 4, [str(d) for d in passed.dropped[:3]]
    assert all(60 <= row.metadata["score"] <= 100 for row in passed.kept)


@pytest.mark.parametrize("text", OTHER_LANGUAGES + OTHER_SCRIPTS)
def test_other_languages_do_not_pass_as_question_or_answer(text):
    for name in ("question", "answer"):
        outcome = sc.screen_row(with_text(clean("general", 1), **{name: text}), CONFIG)
        assert isinstance(outcome, s.Dropped)
        assert outcome.rule in ("letters", "language"), outcome


QUESTION = clean("health", 3).question


@pytest.mark.parametrize(
    ("rule_name", "changes", "passes"),
    [
        ("question length", {"question": "a" * 39}, False),
        ("question length", {"question": "a" * 40}, True),
        ("question length", {"question": "a" * 2500}, True),
        ("question length", {"question": "a" * 2501}, False),
        ("few words", {"question": "is " * 7}, False),
        ("few words", {"question": "is " * 8}, True),
        ("run", {"question": QUESTION + "!" * 12}, True),
        ("run", {"question": QUESTION + "!" * 13}, False),
        ("symbols", {"answer": "a" * 820 + ";" * 180}, True),
        ("symbols", {"answer": "a" * 820 + ";" * 181}, False),
    ],
)
def test_thresholds_are_exact(rule_name, changes, passes):
    row = with_text(clean("health", 3), **changes)
    assert (finding(rule_name, row) is None) == passes


def test_domains_have_their_own_limits_and_unknown_ones_are_general():
    code = clean("coding", 5)
    lines = [f"total[{n}] = (rows[{n}] + offset) * {{}};" for n in range(12)]
    noisy = with_text(code, answer="\n".join(lines))
    assert isinstance(sc.screen_row(noisy, CONFIG), s.SourceRow)
    assert sc.screen_row(with_text(noisy, domain="general"), CONFIG).rule in ("language", "symbols")
    law = with_text(clean("general", 2), domain="law")
    assert isinstance(sc.screen_row(law, CONFIG), s.SourceRow)


@pytest.mark.parametrize(
    "changes",
    [
        {"question": "word " * 200_000},
        {"answer": "a!" * 500_000},
        {"context": "x" * 1_000_000},
    ],
)
def test_rows_of_a_megabyte_are_dropped(changes):
    outcome = sc.screen_row(with_text(clean("general", 1), **changes), CONFIG)
    assert outcome.rule.endswith("length")


@pytest.mark.parametrize(
    "answer",
    [
        "a!" * 500_000,
        "!" * 1_000_000,
        "is it so " * 100_000,
        "thank you for your " * 50_000,
        "é" * 500_000,
    ],
)
def test_a_megabyte_of_nonsense_is_dropped_where_length_is_free(answer):
    free_length = sc.load_screen({"limits": {"general": {"answer_chars": [1, 10**7]}}})
    row = with_text(clean("general", 1), answer=answer)
    assert isinstance(sc.screen_row(row, free_length), s.Dropped)


def test_losses_of_the_stage_before_pass_through():
    lost = s.Dropped(source="x", stage="reading", rule="json", line=4)
    without_answer = with_text(clean("health", 2), answer="")
    passed = s.collect(sc.screen([lost, clean("health", 1), without_answer]))
    assert passed.dropped[0] is lost
    assert passed.dropped[1].rule == "presence"
    assert len(passed.kept) == 1
    assert s.attrition(passed).loc[("", "read"), "all"] == 3


def test_nothing_left_says_why():
    rows = [with_text(clean("health", n), answer="") for n in range(5)]
    message = "0 of 5 rows accepted: 5 by presence, for instance health:0"
    with pytest.raises(DataError, match=message):
        s.collect(sc.screen(rows)).require("screening")


def test_changes_from_a_file_and_what_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "limits:\n  law: {words: 20}\n  coding: {score: 10}\nboilerplate: [dear colleague]\n"
    )
    config = sc.load_screen(tmp_path / "mine.yaml")
    assert config.limits["law"].words == 20
    assert config.limits["law"].score == 60
    assert (config.limits["coding"].score, config.limits["coding"].symbols) == (10, 0.45)
    assert config.boilerplate == ("dear colleague",)
    assert config.hash != CONFIG.hash
    refused = [
        ({"limits": {"coding": {"score": "high"}}}, "limits.coding.score"),
        ({"limit": {}}, "limit"),
        (["a"], "mapping"),
    ]
    for changes, word in refused:
        with pytest.raises(ValueError, match=word):
            sc.load_screen(changes)
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match=r"list\.yaml"):
        sc.load_screen(tmp_path / "list.yaml")


def test_every_rule_is_documented_and_every_threshold_is_used():
    assert all(rule.__doc__ for rule in sc.RULES.values())
    code = Path(sc.__file__).read_text(encoding="utf-8").split("class RowView", 1)[1]
    unused = [name for name in sc.Limits.model_fields if f"limits.{name}" not in code]
    assert unused == []


texts = st.text(st.characters(exclude_categories=()), max_size=300)


@given(texts, texts, texts, st.sampled_from(["health", "general", "coding", "law"]))
def test_any_text_gives_a_row_or_a_reason(question, context, answer, domain):
    source = s.plain_source("q", "a", "c", name="x", domain=domain)
    row = s.to_row(source, {"q": question, "a": answer, "c": context})
    outcome = sc.screen_row(row, CONFIG)
    outcome.to_json().encode()
    if isinstance(outcome, s.Dropped):
        assert outcome.rule in sc.RULES
        assert outcome.found
        assert outcome.allowed


@given(st.text("ab!. \nÄ", max_size=60))
def test_symbols_against_a_plain_count(text):
    row = with_text(clean("general", 1), answer=text)
    count = sum(1 for char in text if not char.isalnum() and not char.isspace())
    assert (finding("symbols", row) is not None) == (count > 0.18 * len(text))


@given(st.text("aab!=. ", max_size=60))
def test_runs_against_a_plain_loop(text):
    longest = 0
    run_length = 0
    for n, char in enumerate(text):
        run_length = run_length + 1 if n and char == text[n - 1] else 1
        if char not in " .=":
            longest = max(longest, run_length)
    row = with_text(clean("general", 1), answer=text)
    assert (finding("run", row) is not None) == (longest > 12)


# other languages

GERMAN = {
    "question": "Ich nehme seit Mai jeden Morgen eine Tablette, und meine Knöchel sind abends "
    "trotzdem dick. Darf ich weniger als einen Liter trinken?",
    "answer": "Nein, zu wenig zu trinken kann den Nieren schaden, solange Sie eine solche "
    "Tablette nehmen. Bleiben Sie bei anderthalb Litern am Tag, legen Sie abends die "
    "Beine hoch, und lassen Sie die Blutsalze in zwei Wochen bestimmen.",
}
CHINESE = {
    "question": "我从五月开始每天早上吃一片利尿药，可是到了晚上脚踝还是会肿。"
    "我每天喝不到一升水安全吗？",
    "answer": "不安全。在吃这种药的时候喝水太少会伤害你的肾。每天喝一升半左右的水，晚上把腿抬高，"
    "并且在两周之内检查血液里的盐分。",
}
SPANISH = {
    "question": "Tomo una pastilla cada mañana desde mayo y los tobillos se me hinchan por la "
    "tarde. ¿Puedo beber menos de un litro al día?",
    "answer": "No, beber muy poco puede dañar los riñones mientras toma esa pastilla. Siga con un "
    "litro y medio al día, levante las piernas por la noche y pida un análisis de "
    "sangre dentro de dos semanas.",
}


@pytest.mark.parametrize(
    ("language", "texts", "foreign_texts"),
    [("de", GERMAN, SPANISH), ("zh", CHINESE, SPANISH), ("es", SPANISH, GERMAN)],
)
def test_a_language_that_is_asked_for_passes_and_others_do_not(language, texts, foreign_texts):
    row = s.SourceRow(id="x", source="x", domain="health", **texts)
    foreign = s.SourceRow(id="y", source="x", domain="health", **foreign_texts)
    config = sc.load_screen(languages=[language])
    passed = sc.screen_row(row, config)
    assert isinstance(passed, s.SourceRow)
    assert passed.metadata["score"] > 80
    assert sc.screen_row(foreign, config).rule == "language"
    lost = sc.screen_row(row, sc.load_screen())
    assert lost.rule in ("letters", "language")
    assert "screen.limits.health." in lost.allowed
    assert f"languages: [{language}]" in lost.allowed
    assert sc.text_language(texts["question"]) == language


def test_changes_of_a_user_come_on_top_of_a_language():
    config = sc.load_screen({"limits": {"health": {"english_letters": 0.2}}}, ["de"])
    assert config.limits["health"].english_letters == 0.2
    assert config.limits["coding"].english_letters == 0
    assert sc.load_screen(languages=["en"]).hash == sc.load_screen().hash


def test_scripts_without_spaces_are_cut_into_characters():
    assert sc.words("我喝tea，你呢？") == ["我", "喝", "tea", "你", "呢"]
    assert sc.words("don't can’t ünlü") == ["don't", "can’t", "ünlü"]


def test_every_loss_names_the_setting_or_none():
    row = s.SourceRow(
        id="x", source="x", domain="law", question="hm", answer="x" * 40, file="t.csv", line=9
    )
    lost = sc.screen_row(row, sc.load_screen())
    assert (lost.rule, lost.file, lost.line) == ("question length", "t.csv", 9)
    assert lost.allowed == "20 to 6000 (screen.limits.general.question_chars)"
