"""Rows out of whatever holds some: a results folder, a file of rows, a page that `mtplab report` wrote.

Files may come from anybody. Nothing in them is run; what is read is bounded, and every row is checked before
anything is done with it. Does not know what rows are read for.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtplab.errors import ConfigError, printable
from mtplab.study.row import ResultRow
from mtplab.study.store import is_point_file, read_rows

__all__ = ["MAX_DOCUMENT", "MAX_FILE", "MAX_ROW", "MAX_ROWS", "rows_of_source"]

MAX_FILE = 128_000_000  # bytes of a file of rows, which is read row by row
MAX_DOCUMENT = 16_000_000  # bytes of JSON that is read as one: a point's file, the rows inside a page
MAX_ROW = 4_000_000  # characters
MAX_ROWS = 100_000

_PAGES = (".html", ".htm")
_EXPECTED = "a results folder, a .jsonl or .json file of rows, or a page of mtplab report"
# how the explorer stands in a page (mtplab/report/explorer.py), and how a browser that saves the page writes it
_FRAME, _DOCUMENT = '<iframe class="mtplab-explorer"', "srcdoc="
_ISLAND = '<script id="data" type="application/json">'
_BLANKS = re.compile(r"[ \t\r\n]*")
# of a row's provenance, what others read: its kind
_FACTS: dict[str, type] = {
    "versions": dict,
    "config": dict,
    "commit": str,
    "date": str,
    "python": str,
    "platform": str,
    "cpu": str,
    "device": str,
    "engine": dict,
    "cores": int,
    "threads": int,
}


def rows_of_source(source: str | Path) -> list[ResultRow]:
    """Every row of a results folder, of a file (`rows.jsonl`, `X.rows.json`, what `mtplab sweep --json` printed) or of
    a page of `mtplab report`, each once, in the file's order.

    Raises:
        ConfigError: there is no such thing, it is too large, or something in it is not a row; names the file.
    """
    path = _path(source)
    if path.is_dir():
        return _folder_rows(path)
    text = _text(path)
    try:
        if path.suffix.lower() in _PAGES or text[:200].lstrip().lower().startswith(("<!doctype", "<html")):
            found = list(_page_rows(text, path))
        else:
            found = list(_file_rows(text, path))
    except RecursionError:
        raise ConfigError(f"{path}: brackets nested too deep; expected {_EXPECTED}") from None
    if not found:
        raise ConfigError(f"{path}: holds no rows; expected {_EXPECTED}")
    return found


def _path(source: Any) -> Path:
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ConfigError(f"{source!r:.60}: expected {_EXPECTED}")
    path = Path(source)
    try:
        if path.exists():
            return path
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        raise ConfigError(f"{str(source)[:200]!r}: no file system takes this name; expected {_EXPECTED}") from None
    raise ConfigError(f"{path}: does not exist; expected {_EXPECTED}")


def _folder_rows(path: Path) -> list[ResultRow]:
    points = [each for each in path.iterdir() if is_point_file(each.name)]
    if not points:
        raise ConfigError(f"{path}: a folder without results of a sweep; expected {_EXPECTED}")
    for each in points:
        about = each.stat() if each.exists() else None
        if about is None or not stat.S_ISREG(about.st_mode) or about.st_size > MAX_DOCUMENT:
            raise ConfigError(f"{each}: expected a file of at most {MAX_DOCUMENT} bytes; move it out of the folder")
    rows = read_rows(path)
    for at, row in enumerate(rows, 1):
        _check_facts(row, f"{path}: row {at}")
    if not rows:
        raise ConfigError(f"{path}: none of its {len(points)} points has rows that can be read")
    return rows


def _text(path: Path) -> str:
    # without waiting: a pipe that nobody writes to must not hold us up
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    try:
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{path}: not a regular file (a pipe, socket or device); expected {_EXPECTED}")
            if about.st_size > MAX_FILE:
                raise ConfigError(f"{path}: {about.st_size} bytes; expected rows in at most {MAX_FILE}")
            raw = file.read(about.st_size)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror})") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: byte {problem.start} is not UTF-8 text; expected {_EXPECTED}") from None


# files of rows


def _file_rows(text: str, path: Path) -> Iterator[ResultRow]:
    start = _skip(text, 0)
    opening = text[start : start + 1]
    if opening == "[":
        yield from _array_rows(text, start + 1, path)
    elif opening == "{":
        first, _ = _value(text, start, f"{path}: row 1", MAX_DOCUMENT)
        if "rows" in first and "depth" not in first:  # what `mtplab sweep --json` prints
            yield from _listed(first["rows"], path)
        else:
            yield from _line_rows(text, start, path)
    elif opening:
        raise ConfigError(f"{path}: begins with {text[start : start + 20]!r}; expected {_EXPECTED}")


def _line_rows(text: str, at: int, path: Path) -> Iterator[ResultRow]:
    number = 0
    while at < len(text):
        number += 1
        item, at = _value(text, at, f"{path}: row {number}")
        yield _row(item, path, number)
        at = _skip(text, at)


def _array_rows(text: str, at: int, path: Path) -> Iterator[ResultRow]:
    number = 0
    at = _skip(text, at)
    while text[at : at + 1] != "]":
        number += 1
        item, at = _value(text, at, f"{path}: row {number}")
        yield _row(item, path, number)
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise ConfigError(f"{path}: row {number} is followed by {text[at : at + 20]!r}; is the file cut off?")


def _skip(text: str, at: int) -> int:
    """The next place that is no blank."""
    return _BLANKS.match(text, at).end()


def _value(text: str, at: int, where: str, most: int = MAX_ROW) -> tuple[Any, int]:
    """(the JSON value that begins at `at`, where it ends). Looks no further than it must: a file may be one value of
    any size."""
    window = 1 << 16
    while True:
        whole = at + window >= len(text)
        try:
            value, length = _DECODER.raw_decode(text[at : at + window])
        except _BadNumber as problem:
            raise ConfigError(f"{where}: {problem}") from None
        except ValueError as problem:
            if whole or window >= most:
                what = str(problem).partition(":")[0] if whole else f"longer than {most} characters"
                raise ConfigError(f"{where} is not JSON that can be read ({what}); is the file cut off?") from None
            window = min(most, window * 8)
        else:
            return value, at + length


class _BadNumber(Exception):
    """A number that a row cannot hold."""


def _integer(digits: str) -> int:
    if len(digits) > 18:  # beyond 64 bits no count is one
        raise _BadNumber(f"the number {digits[:20]}… is too large")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _BadNumber(f"the number {digits[:20]} is too large")
    return value


def _constant(name: str) -> float:
    raise _BadNumber(f"holds {name}, which JSON does not have; expected numbers or null")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_real, parse_constant=_constant)


def _listed(items: Any, path: Path) -> Iterator[ResultRow]:
    if not isinstance(items, list):
        raise ConfigError(f"{path}: its rows are a {type(items).__name__}; expected a list")
    for number, item in enumerate(items, 1):
        yield _row(item, path, number)


def _row(item: Any, path: Path, number: int) -> ResultRow:
    where = f"{path}: row {number}"
    if number > MAX_ROWS:
        raise ConfigError(f"{path}: more than {MAX_ROWS} rows")
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is a JSON {type(item).__name__}; expected an object with a row's fields")
    if "source" in item:
        raise ConfigError(f"{where} is of a comparison of several files; give one of the files that were compared")
    try:
        row = ResultRow.from_json(json.dumps(item))
    except ConfigError as problem:
        raise ConfigError(f"{where}: {problem}") from None
    except (ValueError, ArithmeticError, TypeError) as problem:
        raise ConfigError(f"{where}: not a result row ({type(problem).__name__})") from None
    _check_facts(row, where)
    return row


def _check_facts(row: ResultRow, where: str) -> None:
    """What is read of a provenance is what it should be. Raises `ConfigError`."""
    for name, kind in _FACTS.items():
        value = row.provenance.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ConfigError(
                f"{where}: provenance.{name} is {printable(repr(value)[:40])}; expected {kind.__name__} or null"
            )


# pages


def _page_rows(text: str, path: Path) -> Iterator[ResultRow]:
    """Rows of every explorer in a page, each once. The page is searched, not interpreted: no script of it matters."""
    if len(text) > 2 * MAX_DOCUMENT:
        raise ConfigError(f"{path}: {len(text)} characters; expected a page of at most {2 * MAX_DOCUMENT}")
    seen: set[str] = set()
    frames = 0
    at = text.find(_FRAME)
    while at >= 0:
        frames += 1
        document, at = _frame(text, at, path)
        for row in _listed(_island(document, path), path):
            line = row.to_json()
            if line not in seen:
                seen.add(line)
                yield row
        at = text.find(_FRAME, at)
    if not frames:
        raise ConfigError(
            f"{path}: a page without an explorer of mtplab, so without rows; expected {_EXPECTED} that shows one"
        )


def _frame(text: str, at: int, path: Path) -> tuple[str, int]:
    """(the document inside the frame that begins at `at`, where that ends)."""
    start = text.find(_DOCUMENT, at) + len(_DOCUMENT)
    quote = text[start : start + 1]
    end = text.find(quote, start + 1) if start >= len(_DOCUMENT) and quote in ("'", '"') else -1
    if end < 0:
        raise ConfigError(f"{path}: its explorer is cut off; is this all of the page?")
    return html.unescape(text[start + 1 : end]), end


def _island(document: str, path: Path) -> Any:
    """The rows as the explorer has them, what is written once for all put back into each."""
    start = document.find(_ISLAND)
    end = document.find("</script>", start)
    if start < 0 or end < 0:
        raise ConfigError(f"{path}: its explorer holds no rows; was the page written by another version of mtplab?")
    data, _ = _value(document[start + len(_ISLAND) : end], 0, f"{path}: the explorer's data", MAX_DOCUMENT)
    data = data if isinstance(data, dict) else {}
    rows, shared, labels = (data.get(key) for key in ("rows", "provenance", "labels"))
    if not (isinstance(rows, list) and isinstance(shared, dict) and isinstance(labels, list)):
        raise ConfigError(f"{path}: its explorer's data is none that mtplab wrote")
    own = {label for label in labels if isinstance(label, str)}
    return [_restored(row, shared, own) if isinstance(row, dict) else row for row in rows]


def _restored(row: dict[str, Any], shared: dict[str, Any], labels: set[str]) -> dict[str, Any]:
    plain = {key: value for key, value in row.items() if key not in labels}
    if isinstance(plain.get("provenance"), dict):
        plain["provenance"] = _merged(shared, plain["provenance"])
    return plain


def _merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    found = dict(shared)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found
