"""What leaves this room in words: without API keys, and where a row keeps it, without addresses and paths.

Servers and programs repeat what they were given: a key that was wrong, where they listen, where their files are. Rows
go to others. Knows no engine; what a path or an address looks like is known for POSIX machines only, and the name of a
machine that no address was given of is not seen.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from mtplab.errors import ConfigError, MtplabError

__all__ = ["Cleaner", "bracketed", "hides", "key_of", "loopback"]

_CUT = "…"
_LEAST = 4  # signs of a secret: less is part of any word or number, and guessed at once
# a:b:c in brackets is an address with a port behind it only
_PLACE = re.compile(
    r"(?:\b[a-z][a-z0-9+.-]*://)?"
    r"(?:(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?(?![\w.]*\d)|\blocalhost:\d{1,5}\b|\[[\da-fA-F:.]*:[\da-fA-F:.]*\]:\d{1,5}\b)"
)
# under which people keep things; what this machine has beside is looked up
_TOPS = (
    "home",
    "root",
    "tmp",
    "var",
    "opt",
    "usr",
    "mnt",
    "media",
    "srv",
    "data",
    "etc",
    "Users",
    "Volumes",
    "private",
)
_HOMES = ("/home", "/Users")
Problem = TypeVar("Problem", bound=MtplabError)


def key_of(variable: str) -> str | None:
    """The API key in an environment variable; None where there is none. Raises ConfigError for one that no header of
    HTTP takes."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable} holds signs that no API key has; expected printable ASCII on one line")
    return key or None


def loopback(address: str) -> bool:
    """Whether a URL is of this very machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def hides(secrets: Iterable[str]) -> Callable[[str], str]:
    """What cuts secrets out of a text, in whatever form JSON, a URL or Python's `repr` may write them."""
    forms = [
        "".join(map(_forms, secret)) for secret in sorted(set(secrets), key=len, reverse=True) if len(secret) >= _LEAST
    ]
    if not forms:
        return str
    pattern = re.compile("|".join(forms))
    return lambda text: pattern.sub(_CUT, text)


def _forms(sign: str) -> str:
    """A pattern of one character as it is and as it may be escaped."""
    units = sign.encode("utf-16-be", "surrogatepass")
    coded = "".join(f"\\\\u(?i:{units[at]:02x}{units[at + 1]:02x})" for at in range(0, len(units), 2))
    percent = "".join(f"%(?i:{byte:02x})" for byte in sign.encode("utf-8", "surrogatepass"))
    plain = {
        json.dumps(sign)[1:-1],
        repr(sign)[1:-1],
        quote(sign, safe=""),
        f"\\{sign}" if sign in "/'\"" else sign,
        sign,
    }
    return f"(?:{'|'.join([coded, percent, *map(re.escape, sorted(plain, key=len, reverse=True))])})"


@dataclass(frozen=True)
class Cleaner:
    """Makes an error fit for a row.

    Args:
        title: the engine's, which stands for its server.
        address: the server's, None where there is none yet.
        secrets: that are cut out.
        paths: of this machine, each of which becomes its last part. Others that are seen to be paths do too.
    """

    title: str
    address: str | None = None
    secrets: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def text(self, text: str) -> str:
        """`text` without them."""
        text = hides(self.secrets)(text)
        if self.address is not None:
            text = self._without_address(text, self.address)
        text = _PLACE.sub(_CUT, text)
        known = {spelling for path in self.paths for spelling in _spellings(path)}
        for path in sorted(known, key=len, reverse=True):
            text = re.sub(rf"{re.escape(path)}(?![\w-])", lambda found: _last(found.group()), text)
        return _paths().sub(lambda found: _last(found.group()), text)

    def error(self, problem: Problem) -> Problem:
        """The same kind of error with its words cleaned."""
        return type(problem)(self.text(str(problem)))

    def _without_address(self, text: str, address: str) -> str:
        found = urlsplit(address)
        # a path of the server's stays, for it says what was asked
        text = re.sub(rf"(?i){re.escape(address)}/", f"{self.title} /", text)
        text = re.sub(rf"(?i){re.escape(address)}(?![\w-])", self.title, text)
        places = [found.netloc]
        if not loopback(address):
            places.append(bracketed(found.hostname or ""))
        for place in filter(None, places):
            text = re.sub(rf"(?i)(?<![\w.-]){re.escape(place)}(?![\w-])", self.title, text)
        return text


def _spellings(path: str) -> set[str]:
    """An absolute path as it may be written; none of a relative one, or of a folder that says nothing."""
    found = {path, os.path.abspath(path), os.path.realpath(path)}
    return {each for each in found if each.startswith("/") and each.rstrip("/").count("/") > 1}


@functools.cache
def _paths() -> re.Pattern[str]:
    try:
        here = os.listdir("/")
    except OSError:
        here = []
    tops = "|".join(map(re.escape, sorted({*_TOPS, *here}, key=len, reverse=True)))
    part = r"[^\s/'\"`,;:()<>|\[\]{}]+"
    home = re.escape(str(Path.home()))
    return re.compile(rf"(?:\bfile://|(?<![\w.{_CUT}/-]))(?:/+(?:{tops})(?:/+{part})+|{home}(?:/+{part})*(?![\w-]))/?")


def _last(path: str) -> str:
    """A path's last part; nothing of somebody's home but that."""
    path = "/" + path.removeprefix("file://").strip("/")
    if path == str(Path.home()) or os.path.dirname(path) in _HOMES:
        return _CUT
    return f"{_CUT}/{os.path.basename(path)}"
