"""The section of CHANGELOG.md about one version: `python tools/release_notes.py 0.1.0`."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def release_notes(version: str, changelog: str) -> str:
    """What a changelog says of a version; raises `ValueError` for one that it does not have."""
    parts = re.split(r"^## +", changelog, flags=re.M)[1:]
    sections = {
        section.split()[0]: section.partition("\n")[2].strip()
        for section in parts
        if re.match(r"\d", section)
    }
    if version not in sections:
        raise ValueError(
            f"CHANGELOG.md: found no version {version!r}; allowed: {', '.join(sections)}"
        )
    return sections[version]


if __name__ == "__main__":
    try:
        print(release_notes(sys.argv[1], CHANGELOG.read_text(encoding="utf-8")))
    except ValueError as error:
        sys.exit(str(error))
