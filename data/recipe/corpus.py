"""The three corpora: where they come from, how they are cut into documents, and what is held out.

Texts are fetched by Debian package name (`apt-get download`, unpacked with `dpkg-deb`, nothing is installed) and from
the running Python's own standard library. Nothing is stored in the repository: the held-out split is a rule.

    python data/recipe/corpus.py --work WORK      # WORK/corpora/*, WORK/corpus.jsonl, sizes on stdout

This module does not know about tokens, the network or training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

KJV_TEXT, KJV_READER, DOCS = "bible-kjv-text", "bible-kjv", "python3.11-doc"
HELD_EVERY = 24  # every 24th chapter, source file and documentation page is held out
DOC_SECTIONS = ("tutorial", "library", "howto", "reference", "faq", "using", "extending")
STDLIB_PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http", "importlib", "json",
    "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib", "venv", "wsgiref", "xml", "xmlrpc",
    "zoneinfo",
)  # fmt: skip
CORPORA = ("scripture", "python", "docs")


@dataclass(frozen=True)
class Document:
    """One chapter, one source file or one documentation page. `source` names it by package and file."""

    corpus: str
    source: str
    text: str
    held_out: bool


def fetch(folder: Path) -> Path:
    """Download the Debian packages into `folder` (if absent) and unpack them under `folder/root`."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in (KJV_TEXT, KJV_READER, DOCS):
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        for deb in folder.glob(f"{package}_*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(deb), str(folder / "root")], check=True)
    return folder / "root"


def scripture(root: Path) -> Iterator[tuple[str, str]]:
    """(source, text) per chapter of the King James Version, one verse a line.

    The package's reader only decompresses the text here; neither it nor the text is shipped.
    """
    command = [str(root / "usr/bin/bible"), "-f", "-p", str(root / "usr/lib"), "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in printed.splitlines():
        found = re.match(r"(\d?\s?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if found:
            book, chapter, verse, words = found.groups()
            chapters.setdefault((book, chapter), []).append(f"{verse} {words}")
    for (book, chapter), verses in chapters.items():
        yield f"{KJV_TEXT}:{book} {chapter}", f"{book} {chapter}\n" + "\n".join(verses) + "\n"


def standard_library() -> Iterator[tuple[str, str]]:
    """(source, text) per .py file of the running Python's standard library: top level and STDLIB_PACKAGES, no tests."""
    root = Path(os.__file__).parent
    files = sorted(root.glob("*.py"))
    for package in STDLIB_PACKAGES:
        files += sorted((root / package).rglob("*.py"))
    for file in files:
        name = file.relative_to(root)
        if {"test", "tests"} & set(name.parts):
            continue
        text = file.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 200 and text.isascii():
            yield f"cpython:Lib/{name.as_posix()}", text


def documentation(root: Path) -> Iterator[tuple[str, str]]:
    """(source, text) per reStructuredText page of the Python documentation."""
    sources = root / "usr/share/doc/python3.11/html/_sources"
    for section in DOC_SECTIONS:
        for file in sorted((sources / section).rglob("*.rst.txt")):
            text = file.read_text(encoding="utf-8")
            if len(text) > 200:
                yield f"{DOCS}:{file.relative_to(sources).as_posix()}", text


def documents(folder: Path) -> list[Document]:
    """Every document of the three corpora in a fixed order, with the held-out rule applied to each corpus."""
    root = fetch(folder)
    out = []
    for corpus, pairs in zip(CORPORA, (scripture(root), standard_library(), documentation(root)), strict=True):
        for i, (source, text) in enumerate(pairs):
            out.append(Document(corpus, source, text, held_out=i % HELD_EVERY == HELD_EVERY // 3))
    return out


def load(work: Path) -> list[Document]:
    """Documents from WORK/corpus.jsonl, made on first use."""
    path = work / "corpus.jsonl"
    if not path.exists():
        made = documents(work / "corpora")
        path.write_text("".join(json.dumps(asdict(d)) + "\n" for d in made))
    return [Document(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder outside the repository")
    args = parser.parse_args()
    docs = load(args.work)
    for corpus in CORPORA:
        for held in (False, True):
            part = [d for d in docs if d.corpus == corpus and d.held_out == held]
            size = sum(len(d.text) for d in part)
            print(f"{corpus:10} {'held out' if held else 'train':8} {len(part):5} documents {size / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()
