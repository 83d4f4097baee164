"""What Quarto built, checked as a visitor meets it.

Links and their anchors, alternative texts; then each page in headless Chromium, as wide as a desk
and as a phone: no request to another host, no error on the console, nothing wider than the page;
the weight of the home page. A fault is one line: the page, what was found, what is allowed.
"""

import os
import re
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tools.check_docs import MAIN, TOO_WIDE, WIDTHS, chromium_on_path

HOME_LIMIT = 1_000_000  # bytes of the home page with all that it asks for


class Built(HTMLParser):
    """A page of the built site: its ids, links and pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.bare: list[str] = []  # pictures without alternative text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "img" and not (given.get("alt") or "").strip():
            if given.get("aria-hidden") != "true" and given.get("role") != "presentation":
                self.bare.append((given.get("src") or "")[:60])


def built_pages(site: Path) -> dict[str, Built]:
    """Every page of the site by its path; the libraries that Quarto ships are none."""
    read = {}
    for file in sorted(site.rglob("*.html")):
        path = file.relative_to(site).as_posix()
        if not path.startswith("site_libs/"):
            read[path] = Built(file.read_text(encoding="utf-8"))
    return read


def static_faults(site: Path, base: str = "/") -> Iterator[str]:
    """A fault for each link that leads nowhere and each picture without alternative text.

    `base` is the path of the site on its host, where links that begin with a slash lead.
    """
    read = built_pages(site)
    for path, page in read.items():
        for source in page.bare:
            yield f"{path}: picture {source!r} without alternative text"
        for link in dict.fromkeys(page.links):
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            target = unquote(target.partition("?")[0])
            full = path
            if target:
                full = os.path.normpath(Path(path).parent / target).replace(os.sep, "/")
                full = target.removeprefix(base) if target.startswith("/") else full
                full = os.path.normpath(full) if full else "."
                full = f"{full}/index.html".removeprefix("./") if (site / full).is_dir() else full
            if full not in read:
                if not (site / full).is_file():
                    yield f"{path}: link to {link!r}: no such page or file"
            elif anchor and not anchor.startswith(":~:") and unquote(anchor) not in read[full].ids:
                yield f"{path}: link to {link!r}: no such place on {full}"


def is_redirect(text: str) -> bool:
    """Whether a page only sends on to another."""
    return 'http-equiv="refresh"' in text


def home_faults(site: Path) -> Iterator[str]:
    """A fault for a home page that only sends on: Quarto makes one where it built none."""
    home = site / "index.html"
    if not home.is_file() or is_redirect(home.read_text(encoding="utf-8")):
        yield "index.html: found no home page, or one that only sends on; allowed: index.ipynb's"


def markdown_faults(site: Path) -> Iterator[str]:
    """A fault for each page that offers its Markdown (`copy_page.html`) and has none beside it."""
    for path in built_pages(site):
        text = (site / path).read_text(encoding="utf-8")
        offers = 'link.className = "copy-page"' in text and path != "404.html"
        if offers and not (site / path).with_suffix(".md").is_file():
            yield f"{path}: found no Markdown beside it; allowed: {Path(path).with_suffix('.md')}"


WANTED = {
    "evaluate my own model": "tutorials/evaluate_your_model.html",
    "evaluate my model": "tutorials/evaluate_your_model.html",
    "judge": "evaluation/exam.html",
    "cost": "faq.html#what-does-a-run-cost",
    "resume": "faq.html#how-do-i-resume-a-run-that-was-stopped",
    "my memory system": "tutorials/benchmark_from_logs.html",
    "SCS": "faq.html#how-do-i-read-scs",
    "Bound": "faq.html#what-is-bound",
    "GPU": "faq.html#does-it-run-on-my-gpu",
    "cite": "faq.html#how-do-i-cite-it",
    "how much does it cost": "faq.html#what-does-a-run-cost",
    "pricing": "faq.html#what-does-a-run-cost",
    "is it expensive": "faq.html#what-does-a-run-cost",
    "gdpr": "faq.html#is-my-data-private",
    "is it safe to send customer data": "faq.html#is-my-data-private",
    "crashed": "faq.html#how-do-i-resume-a-run-that-was-stopped",
    "continue after a crash": "faq.html#how-do-i-resume-a-run-that-was-stopped",
    "my run was interrupted": "faq.html#how-do-i-resume-a-run-that-was-stopped",
    "apple silicon": "faq.html#does-it-run-on-my-gpu",
    "does it work on a mac": "faq.html#does-it-run-on-my-gpu",
    "mem0": "faq.html#how-do-i-add-my-memory-system",
    "langchain": "faq.html#how-do-i-add-my-memory-system",
    "evaluate my own chatbot": "tutorials/evaluate_your_model.html",
    "best judge": "faq.html#which-judge-should-i-use",
    "what is a good score": "faq.html#how-do-i-read-scs",
    "what does scs mean": "faq.html#how-do-i-read-scs",
    "how to cite this": "faq.html#how-do-i-cite-it",
    "connection refused": (
        "faq.html#no-connection-to-check-that-the-address-is-right"
    ),
    "commercial use": "faq.html#what-is-the-license",
    "qwertzuiop": "faq.html",
}  # what people type, and what must come first


FOUND = """() => [...document.querySelectorAll('a.search-result-link')]
  .map(link => link.getAttribute('href'))"""
PATIENCE = 20_000  # milliseconds for a search, on a machine that is busy with other work


def search(tab, home: str, query: str) -> list[str]:
    """What the search of the site shows for a query, as a visitor types it, the first hit first."""
    from playwright.sync_api import TimeoutError as TooLate

    tab.goto(f"{home}index.html")
    tab.click(".aa-DetachedSearchButton")
    tab.locator(".aa-Input").press_sequentially(query, delay=10)
    try:
        tab.wait_for_selector(f'a.search-result-link[href*="?q={query}"]', timeout=PATIENCE)
    except TooLate:
        return []
    return [re.sub(r"\?q=[^#]*", "", link).removeprefix("./") for link in tab.evaluate(FOUND)]


def search_faults(tab, home: str) -> list[str]:
    """A fault for each search of `WANTED` that finds another page first."""
    tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
    faults = []
    for query, wanted in WANTED.items():
        hits = search(tab, home, query)
        if hits[:1] != [wanted]:
            faults.append(f"search for {query!r}: found {hits[:3]} first; allowed: {wanted}")
    return faults + landing_faults(tab, home)


LANDING = """() => {
  const place = document.querySelector(decodeURIComponent(location.hash));
  const heading = place.querySelector("h2, h3") || place;
  const header = document.querySelector("#quarto-header").getBoundingClientRect();
  const box = heading.getBoundingClientRect();
  return [box.top, header.bottom, header.height].map(Math.round);
}"""


LANDING_ROOM = 50  # pixels below the place of the header within which a link's heading has to stand


def landing_faults(tab, home: str) -> list[str]:
    """A fault where a click on what a search found, or on a link to a question of the same page,
    leads to a heading that does not stand just below the header, at a desk or on a phone.
    """
    faults = []
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        search(tab, home, "cost")
        tab.click("a.search-result-link")
        faults += heading_faults(tab, f"search result at {width} px")
        tab.goto(f"{home}faq.html")
        tab.click('#quarto-document-content a[href="#how-long-does-it-take"]')
        faults += heading_faults(tab, f"link to a question at {width} px")
    return faults


def heading_faults(tab, link: str) -> list[str]:
    """A fault if the heading that the address names, after a click on `link`, stands elsewhere."""
    tab.wait_for_timeout(1500)  # the page scrolls, then the header comes or goes
    heading_top, header_bottom, header_height = tab.evaluate(LANDING)
    lowest = header_height + LANDING_ROOM
    if header_bottom <= heading_top <= lowest:
        return []
    return [
        f"{link}: found its heading at {heading_top} px; "
        f"allowed: {header_bottom} (below the header) to {lowest}"
    ]


class Quiet(SimpleHTTPRequestHandler):
    """A file server that says nothing, and has a folder below `base`, as the published host does:
    the page for missing addresses names everything from there.
    """

    def __init__(self, *arguments: object, base: str = "/", **options: object) -> None:
        self.base = base
        super().__init__(*arguments, **options)

    def translate_path(self, path: str) -> str:
        is_inside = path.startswith(self.base)
        return super().translate_path(path.removeprefix(self.base) if is_inside else "/no/file")

    def log_message(self, *_: object) -> None:
        pass


LONG_PAGE = 20_000  # pixels of height above which a page is named


def browser_faults(site: Path, pictures: Path | None = None, base: str = "/") -> list[str]:
    """What Chromium finds on the pages, served from this machine below `base`; with `pictures`,
    saves there how the main pages look, in both widths, light and dark. Names the longest pages.
    """
    from playwright.sync_api import sync_playwright

    chromium = chromium_on_path()
    if chromium is None:
        return [
            "browser: found no Chromium on the path; allowed: `apt-get install chromium`, or "
            "`--no-browser`"
        ]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site), base=base))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}{base}"
    heights: dict[str, int] = {}
    faults: list[str] = []
    heard: list[str] = []  # from the page that is open
    weights: list[int] = []  # of what the page that is open asked for

    def on_request(asked) -> None:
        if not asked.url.startswith((home, "data:", "blob:")):
            heard.append(f"asks for {asked.url}")

    def on_response(answer) -> None:
        weights.append(int(answer.headers.get("content-length", 0)))

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium)
        tab = browser.new_page()
        tab.on("console", lambda said: heard.append(said.text) if said.type == "error" else None)
        tab.on("pageerror", lambda error: heard.append(str(error)))
        tab.on("request", on_request)
        tab.on("response", on_response)
        for path in built_pages(site):
            if is_redirect((site / path).read_text(encoding="utf-8")):
                continue
            heard.clear()
            weights.clear()
            for width in WIDTHS:
                tab.set_viewport_size({"width": width, "height": 900})
                if width == WIDTHS[0]:
                    tab.goto(home + path, wait_until="load")
                    heights[path] = tab.evaluate("document.body.scrollHeight")
                wide = tab.evaluate(TOO_WIDE)
                faults += [f"{path}: at {width} px wider than the page: {each}" for each in wide]
                if pictures and path in MAIN_PAGES:
                    save_pictures(tab, pictures / f"{path.replace('/', '-')}-{width}")
            faults += [f"{path}: {message}" for message in dict.fromkeys(heard)]
            if path == "index.html" and sum(weights) > HOME_LIMIT:
                faults.append(f"{path}: weighs {sum(weights):,} bytes; allowed: {HOME_LIMIT:,}")
        if (site / "search.json").is_file():
            faults += search_faults(tab, home)
        browser.close()
    server.shutdown()
    for path in sorted(heights, key=heights.get, reverse=True):
        if heights[path] > LONG_PAGE:
            print(f"{path} is {heights[path]:,} px long")
    return faults


MAIN_PAGES = {re.sub(r"(^|/)[0-9]+[a-z]?_", r"\1", name) + ".html" for name in MAIN}


def save_pictures(tab, name: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.screenshot(path=f"{name}-{scheme}.png")
    tab.emulate_media(color_scheme="light")


def site_faults(
    site: Path, *, base: str = "/", browser: bool = True, pictures: Path | None = None
) -> list[str]:
    """Every fault of a built site that stands below `base` on its host."""
    faults = [*static_faults(site, base), *markdown_faults(site), *home_faults(site)]
    if browser:
        faults += browser_faults(site, pictures, base)
    return faults
