"""An opened checkpoint in a few lines, as text and as HTML: what is there, how it is stored, what is wrong with it.

Reads headers only, and decides nothing: which module is what is the plan's. Every name is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from mtplab.checkpoint.text_table import aligned, as_bytes, counted, folder_name, html_table, printable

if TYPE_CHECKING:
    from mtplab.checkpoint.checkpoint import Checkpoint

__all__ = ["as_html", "as_text"]

_COLUMNS = ("stored as", "tensors", "bytes")
_RIGHT = {"tensors", "bytes"}
_PROBLEMS = 5


def _rows(ckpt: Checkpoint) -> list[tuple[str, str, str]]:
    """One row per dtype, the most bytes first."""
    found: dict[str, list[int]] = {}
    for info in ckpt.tensors.values():
        found.setdefault(info.dtype, []).append(info.nbytes)
    by_size = sorted(found.items(), key=lambda item: -sum(item[1]))
    return [(printable(dtype), f"{len(sizes):,}", f"{sum(sizes):,}") for dtype, sizes in by_size]


def _sentences(ckpt: Checkpoint) -> list[str]:
    kind = ckpt.config.get("model_type")
    size = as_bytes(sum(info.nbytes for info in ckpt.tensors.values()))
    model = printable(kind) if isinstance(kind, str) and kind else "no model_type"
    said = [f"{model}: {counted(len(ckpt.tensors), 'tensor')} in {counted(len(ckpt.files.shards), 'file')}, {size}"]
    if ckpt.quantization is not None:
        given = ckpt.quantization
        entries = len(given.exclusions)
        kept = f"{entries:,} {'entry' if entries == 1 else 'entries'} in {printable(given.exclusions_key)}"
        cache = f", KV cache {printable(given.kv_cache)}" if given.kv_cache else ""
        said.append(f"quantised: {printable(given.method)}, {kept}{cache}")
    elif ckpt.refused is not None:
        said.append(f"quantised in a way that is not read: {printable(ckpt.refused, 600)}")
    else:
        said.append("not quantised")
    problems: Sequence = ckpt.problems
    said += [f"{problem.severity}: {printable(problem.message, 600)}" for problem in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        said.append(f"{len(problems) - _PROBLEMS:,} problems more: see .problems, or .audit()")
    return said


def as_text(ckpt: Checkpoint) -> str:
    """The path, one line per fact, one per dtype, one per problem (the first five)."""
    first, second, *problems = _sentences(ckpt)
    table = aligned(_COLUMNS, _rows(ckpt), _RIGHT)
    return "\n".join([printable(ckpt.path), first, second, *table, *problems])


def as_html(ckpt: Checkpoint) -> str:
    """The same as HTML, every cell escaped: names come from a file nobody vouches for."""
    first, second, *problems = _sentences(ckpt)
    words = [f"{first}; {second}.", *problems]
    # a page may be published, and where the folder lies on this machine is nobody's business; a caption would be
    # broken to the table's width
    path, table = escape(printable(folder_name(ckpt.path))), html_table(_COLUMNS, _rows(ckpt), _RIGHT)
    said = "".join(f"<p>{escape(text)}</p>" for text in words)
    return f'<div class="mtplab-checkpoint"><p><strong>{path}</strong></p>{table}{said}</div>'
