"""The errors a user of mtplab can meet: one family, so that one `except` catches all of them.

This module knows nothing of what the rooms do. A message names what was found, what was expected and what
to do about it; anything else that escapes from mtplab is a bug in mtplab. It quotes what it was given, paths and names
of which may hold anything: here, in one place, that is made fit to be shown.
"""

from __future__ import annotations

import re

__all__ = ["CheckpointError", "ConfigError", "MtplabError", "not_text", "printable"]

# C0 and C1 controls (terminal escapes live there), separators of lines, every sign that can turn the reading direction
# of the text around it, and halves of surrogate pairs, which no terminal and no file takes
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    """`text` on one line, with what a reader would not see, or a terminal would obey, as its escape (`\\x1b`).

    A byte of a name or an argument that is not UTF-8, which Python holds as half a surrogate pair, is shown as that
    byte. Characters in `keep` stay. What has been through this once comes through again as it is.
    """

    def shown(found: re.Match[str]) -> str:
        sign = found.group()
        if sign in keep:
            return sign
        point = ord(sign) - 0xDC00 if "\udc80" <= sign <= "\udcff" else ord(sign)
        named = {"\t": r"\t", "\n": r"\n"}
        return named.get(sign) or (f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}")

    return _UNSEEN.sub(shown, text)


def not_text(text: str) -> str | None:
    """Why no file and no tokenizer takes a string from Python or the command line: the rest of a sentence that begins
    with its name. None where it is text."""
    found = _SURROGATE.search(text)
    if found is None:
        return None
    if "\udc80" <= found.group() <= "\udcff":  # how Python keeps the bytes that it could not decode
        byte = ord(found.group()) - 0xDC00
        return f"is not valid UTF-8: byte 0x{byte:02x} at character {found.start()}; give it in UTF-8"
    return f"holds half a surrogate pair at character {found.start()}, which is no text; leave it out"


class MtplabError(Exception):
    """Base of every error mtplab raises on purpose. Its message is `printable`."""

    def __init__(self, *parts: object):
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))


class CheckpointError(MtplabError):
    """A checkpoint cannot be read, contradicts itself, or is of a kind mtplab does not support."""


class ConfigError(MtplabError, ValueError):
    """A setting given by the user is unknown, out of range, or does not fit the checkpoint."""
