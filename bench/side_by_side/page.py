"""Where the last run is shown: each part a section of a Markdown page."""

import os
from pathlib import Path

TITLES = {
    "engines": "Tokens per second, one row",
    "batches": "Tokens per second, several rows",
    "steps": "What a step of ours costs",
    "serve": "Servers under load",
}


def show(page: Path, name: str, conditions: str, table: str, picture: Path) -> None:
    """Put a part's section where it stood, or at the end of the page; what stands around it stays."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    path = os.path.relpath(picture, page.parent)
    section = f"{start}\n### {TITLES[name]}\n\n![{TITLES[name]}]({path})\n\n{table}\n{conditions}\n{end}\n"
    whole = page.read_text() if page.is_file() else ""
    before, found, rest = whole.partition(start)
    if not found:
        page.write_text(f"{whole}\n{section}" if whole else section)
        return
    page.write_text(before + section + rest.partition(f"{end}\n")[2])
