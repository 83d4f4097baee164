"""What people type into the search, brought to the page that answers it.

Quarto's search looks for a phrase nearly word by word, in the text of sections. The table of the
start page says what people want and which page helps; its rows, and the phrases below, are written
into the entries of the search that they lead to.
"""

import json
import re
from pathlib import Path

from tools.quarto_pages import front_matter, read_notebook, text_of

NO_CONNECTION = "faq.ipynb#no-connection-to-check-that-the-address-is-right"
PHRASES = {
    "judge": "products/exam/02_exam.ipynb",
    "which judge": "faq.ipynb#which-judge-should-i-use",
    "which judge model": "faq.ipynb#which-judge-should-i-use",
    "best judge, recommended judge": "faq.ipynb#which-judge-should-i-use",
    "cost": "faq.ipynb#what-does-a-run-cost",
    "what does a run cost": "faq.ipynb#what-does-a-run-cost",
    "what does it cost": "faq.ipynb#what-does-a-run-cost",
    "how much does it cost": "faq.ipynb#what-does-a-run-cost",
    "price, pricing, how much money, money": "faq.ipynb#what-does-a-run-cost",
    "how expensive, budget, tokens, dollars": "faq.ipynb#what-does-a-run-cost",
    "how long does it take, duration": "faq.ipynb#how-long-does-it-take",
    "resume": "faq.ipynb#how-do-i-resume-a-run-that-was-stopped",
    "resume run, stopped run, resume a stopped run": (
        "faq.ipynb#how-do-i-resume-a-run-that-was-stopped"
    ),
    "crash, my run crashed": "faq.ipynb#how-do-i-resume-a-run-that-was-stopped",
    "continue an interrupted run, interrupted, restart, exit code": (
        "faq.ipynb#how-do-i-resume-a-run-that-was-stopped"
    ),
    "private data, privacy": "faq.ipynb#is-my-data-private",
    "GDPR, PII, data protection": "faq.ipynb#is-my-data-private",
    "customer data, on-premise, offline": "faq.ipynb#is-my-data-private",
    "what data is sent, does it send telemetry": "faq.ipynb#is-my-data-private",
    "is it safe to send my data, confidential, telemetry": "faq.ipynb#is-my-data-private",
    "my memory system": "tutorials/benchmark_from_logs.ipynb",
    "add my memory system": "faq.ipynb#how-do-i-add-my-memory-system",
    "add my own memory system": "faq.ipynb#how-do-i-add-my-memory-system",
    "custom memory": "faq.ipynb#how-do-i-add-my-memory-system",
    "mem0, Zep, Graphiti": "faq.ipynb#how-do-i-add-my-memory-system",
    "Letta, LangChain, LangGraph, LlamaIndex": "faq.ipynb#how-do-i-add-my-memory-system",
    "evaluate": "tutorials/evaluate_your_model.ipynb",
    "evaluate my own chatbot, my chatbot": "tutorials/evaluate_your_model.ipynb",
    "evaluate my assistant": "tutorials/evaluate_your_model.ipynb",
    "test my model, benchmark my model": "tutorials/evaluate_your_model.ipynb",
    "Ollama, vLLM, SGLang": "faq.ipynb#how-do-i-evaluate-my-model",
    "my own logs": "tutorials/evaluate_your_logs.ipynb",
    "SCS": "faq.ipynb#how-do-i-read-scs",
    "what is SCS": "faq.ipynb#how-do-i-read-scs",
    "what does SCS mean": "faq.ipynb#how-do-i-read-scs",
    "what is a good SCS, good score": "faq.ipynb#how-do-i-read-scs",
    "Bound": "faq.ipynb#what-is-bound",
    "what does Bound mean, difference between Bound and Control": "faq.ipynb#what-is-bound",
    "atom, what is an atom": "faq.ipynb#what-is-bound",
    "GPU": "faq.ipynb#does-it-run-on-my-gpu",
    "Apple silicon, Mac, MPS": "faq.ipynb#does-it-run-on-my-gpu",
    "AMD, ROCm, CUDA, Windows, which GPU do I need, GPU memory": "faq.ipynb#does-it-run-on-my-gpu",
    "multi GPU, multiple GPUs": "tutorials/train.ipynb",
    "cite": "faq.ipynb#how-do-i-cite-it",
    "how to cite, citation, cite this software, BibTeX": "faq.ipynb#how-do-i-cite-it",
    "license, licence": "faq.ipynb#what-is-the-license",
    "commercial use, Apache": "faq.ipynb#what-is-the-license",
    "error": "faq.ipynb#errors",
    "connection refused": NO_CONNECTION,
    "401, unauthorized, API key": "faq.ipynb#no-key-for-set-openai_api_key-in-the-environment",
    "404, not found": (
        "faq.ipynb#check-the-name-of-the-model-and-the-end-of-the-address-usually-v1"
    ),
    "install": "index.ipynb",
    "train, training": "tutorials/train.ipynb",
    "what is logged in a training": "logged_numbers.ipynb",
}  # what people type, commas between ways to say it, and the page that answers

ROW = re.compile(r"^\| (?P<wish>[^|]+?) \| (?P<pages>[^|]+?) \|", re.M)
TARGET = re.compile(r"\[([^\]]+)\]\(([\w./-]+)\.ipynb(#[\w-]+)?\)")


def wishes(start: dict) -> list[tuple[str, str, str]]:
    """(wish, words of the link, path of the page with its anchor) of each row of the table."""
    rows = []
    for cell in start["cells"]:
        if cell["cell_type"] == "markdown":
            for row in ROW.finditer(text_of(cell["source"])):
                link = TARGET.search(row["pages"])
                if link:
                    rows.append((row["wish"], link[1], f"{link[2]}.ipynb{link[3] or ''}"))
    return rows


def add_wishes(start: Path, index: Path) -> None:
    """Give the entries of the search index of a built site the phrases that lead to them, which
    `nbs/search_words.html` reads: `PHRASES`, and the rows of the start page's table. An entry for a
    place that Quarto did not index is added.
    """
    entries = [entry for entry in json.loads(index.read_text(encoding="utf-8")) if wanted(entry)]
    by_address = {entry["href"]: entry for entry in reversed(entries)}
    targets = {}
    for wish, _, target in wishes(read_notebook(start)):
        for phrase in phrases(wish):
            targets[phrase] = target
    targets |= PHRASES
    for phrase, target in targets.items():
        path, _, anchor = target.partition("#")
        if not (start.parent / path).is_file():
            raise FileNotFoundError(f"search phrase {phrase!r}: no page {path!r}")
        head = front_matter(read_notebook(start.parent / path))
        page = Path(path).with_name(head["output-file"]).as_posix()
        address = f"{page}#{anchor}" if anchor else page
        if address not in by_address:
            by_address[address] = {
                "objectID": f"{address}#phrase",
                "href": address,
                "title": head["title"],
                "section": "",
                "text": head.get("description", ""),
                "crumbs": [head["title"]],
            }
            entries.insert(0, by_address[address])
        ways = [way.strip().lower() for way in phrase.split(",")]
        by_address[address].setdefault("phrases", []).extend(ways)
    index.write_text(json.dumps(entries, ensure_ascii=False, indent=2), encoding="utf-8")


def wanted(entry: dict) -> bool:
    """Whether an entry stays in the search: not the changelog, whose words are those of every
    other page, nor the list of questions above the answers.
    """
    page, _, anchor = entry.get("href", "").partition("#")
    is_list = page == "faq.html" and not anchor
    return page != "news.html" and not is_list


def phrases(wish: str) -> list[str]:
    """A wish as people may type it: *evaluate my own model*, and *evaluate my model*."""
    shorter = wish.replace(" my own ", " my ")
    return list(dict.fromkeys([wish, shorter]))
