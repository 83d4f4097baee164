"""Whether reports are readable on a phone and on a laptop, seen in headless Chromium.

On a phone (390 px) no word of letters is split between two lines; on a laptop (1,280 px) no column
of a table lies beyond the edge of its frame; on both nothing is wider than the page.
`python -m tools.check_reports PAGE.html ...` prints a line for each fault and exits 1 with any.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.check_docs import TOO_WIDE, chromium_on_path

PHONE = 390
LAPTOP = 1280
SPLIT_WORDS = r"""() => {
  const faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!parent || parent.closest('code, pre, svg, .said, script, style')) continue;
    if (!parent.checkVisibility()) continue;
    for (const word of node.textContent.matchAll(/[A-Za-z]{4,24}/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const visible = [...range.getClientRects()].filter(r => r.width > 0);
      const lines = new Set(visible.map(r => Math.round(r.top)));
      if (lines.size > 1) faults.push(word[0]);
    }
  }
  return [...new Set(faults)];
}"""
HIDDEN_COLUMNS = r"""() => [...document.querySelectorAll('.scroll')]
  .filter(frame => frame.checkVisibility() && frame.scrollWidth > frame.clientWidth + 1)
  .map(frame => `${frame.getAttribute('aria-label') || frame.textContent.trim().slice(0, 40)}: `
    + `${frame.scrollWidth} px in a frame of ${frame.clientWidth}`)"""


def report_faults(pages: Iterable[Path], pictures: Path | None = None) -> Iterator[str]:
    """A line for each fault of these pages. Raises `FileNotFoundError` without Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = chromium_on_path()
    if chromium is None:
        raise FileNotFoundError(
            "found no Chromium on the path; allowed: `apt-get install chromium`"
        )
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for page in pages:
            for width in (PHONE, LAPTOP):
                tab = browser.new_page(viewport={"width": width, "height": 900})
                tab.goto(page.resolve().as_uri())
                tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                for fault in tab.evaluate(TOO_WIDE):
                    yield f"{page.name} at {width} px: {fault}"
                if width == PHONE:
                    for word in tab.evaluate(SPLIT_WORDS):
                        yield f"{page.name} at {width} px: the word {word!r} is split"
                else:
                    for frame in tab.evaluate(HIDDEN_COLUMNS):
                        yield f"{page.name} at {width} px: columns beyond the edge, {frame}"
                if pictures:
                    pictures.mkdir(parents=True, exist_ok=True)
                    tab.screenshot(path=pictures / f"{page.stem}-{width}.png", full_page=True)
                tab.close()
        browser.close()


if __name__ == "__main__":
    found = list(report_faults(map(Path, sys.argv[1:])))
    print("\n".join([*found, f"{len(found)} faults"]))
    raise SystemExit(1 if found else 0)
