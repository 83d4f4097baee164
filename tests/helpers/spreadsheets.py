"""Sheets as a spreadsheet program reads them."""

import csv


def sheet_rows(path) -> list[dict[str, str]]:
    """The rows of a CSV sheet by column."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))
