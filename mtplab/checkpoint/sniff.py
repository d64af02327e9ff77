"""What a file is that was to be a safetensors file and is not, from its first bytes.

Knows nothing of safetensors itself.
"""

from __future__ import annotations

__all__ = ["SNIFF_BYTES", "foreign_kind"]

SNIFF_BYTES = 512

_AGAIN = "Download it again; a page like that usually means a missing login or a moved file."
_CONVERT = "mtplab reads no pickles, since loading one runs code. Convert it to safetensors first."

_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the data", "Run `git lfs pull` in the folder."),
    (b"PK\x03\x04", "a zip archive, as torch.save writes (a pickle)", _CONVERT),
    (b"GGUF", "a GGUF file", "mtplab reads safetensors; take the checkpoint the GGUF was made from."),
    (b"\x93NUMPY", "a NumPy array", "Expected safetensors."),
    (b"\x89HDF", "an HDF5 file", "Expected safetensors."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first."),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive", "Unpack it first."),
)


def foreign_kind(head: bytes, json_too: bool = True) -> tuple[str, str] | None:
    """(what the file is, what to do) by its first bytes, or None where nothing known is recognised.

    `json_too`: JSON is foreign as well.
    """
    for start, what, remedy in _STARTS:
        if head.startswith(start):
            return what, remedy
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<error")):
        return "an HTML or XML page", _AGAIN
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5 and head[2:3] in b"c}](\x95\x8a\x8c":
        return "a Python pickle", _CONVERT
    if json_too and text.startswith((b'{"', b"{ ", b"{\n", b"{\r")):
        return (
            "JSON text",
            "Is this an error reply, or an index, saved under the shard's name? Download it again.",
        )
    return None
