"""A built site without the style rules and icons that none of its pages uses.

Quarto ships the styles of dashboards, slides and forms with every site: half a megabyte for the
light theme, another half for the dark one, and two thousand icons. A rule goes only where one of
its classes or ids is written nowhere in the site's HTML and scripts.
"""

import logging
import re
from pathlib import Path

import tinycss2
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

NAMED = re.compile(r"[.#]([A-Za-z_][\w-]*)")  # a class or an id in a selector
NESTED = ("media", "supports")  # rules that hold rules


class Used:
    """The words of a site's HTML and scripts, any of which may be the name of a class."""

    def __init__(self, site: Path) -> None:
        self.words: set[str] = set()
        for pattern in ("*.html", "*.js"):
            for file in site.rglob(pattern):
                self.words.update(re.findall(r"[\w-]+", file.read_text(encoding="utf-8")))
        # scripts put names together, as in "bs-popover-" + side
        starts = {word for word in self.words if word.endswith("-") and len(word) > 3}
        self.starts = tuple(sorted(starts))

    def has(self, selector: str) -> bool:
        """Whether a selector may meet something. What stands in `:not()` need not be there."""
        required = re.sub(r":not\([^()]*\)", "", selector)
        names = NAMED.findall(required)
        return all(self.has_name(name) for name in names)

    def has_name(self, name: str) -> bool:
        is_icon = name.startswith("bi-") and name.removeprefix("bi-") in self.words
        return is_icon or name in self.words or name.startswith(self.starts)


def used_rules(rules: list, used: Used) -> str:
    """The rules of a style sheet that may meet something."""
    kept = []
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = re.split(r",(?![^()]*\))", tinycss2.serialize(rule.prelude))
            met = [selector for selector in selectors if used.has(selector)]
            if met:
                kept.append(f"{','.join(met)}{{{tinycss2.serialize(rule.content)}}}")
        elif rule.type == "at-rule" and rule.lower_at_keyword in NESTED and rule.content:
            inner = used_rules(parsed(rule.content), used)
            if inner:
                head = f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}"
                kept.append(f"{head}{{{inner}}}")
        else:
            kept.append(rule.serialize())
    return "".join(kept)


def parsed(content: str | list) -> list:
    return tinycss2.parse_rule_list(content, skip_comments=True, skip_whitespace=True)


def trim_icons(file: Path, styles: str) -> None:
    """Keep the icons whose characters the style sheets name."""
    points = {ord(character) for character in styles if "\ue000" <= character <= "\uf8ff"}
    options = Options()
    options.flavor = "woff"
    font = TTFont(file, recalcBBoxes=False)
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=points)
    subsetter.subset(font)
    font.flavor = "woff"
    font.save(file)


def trim(site: Path) -> None:
    """Take out of a built site, in place, what no page uses of the styles and icons."""
    used = Used(site)
    folder = site / "site_libs" / "bootstrap"
    styles = []
    for file in sorted(folder.glob("*.css")):
        kept = used_rules(parsed(file.read_text(encoding="utf-8")), used)
        if not kept.startswith("@charset"):
            kept = f'@charset "UTF-8";{kept}'
        file.write_text(kept, encoding="utf-8")
        styles.append(kept)
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # what Quarto's font has too much
    trim_icons(folder / "bootstrap-icons.woff", "".join(styles))
