"""A trace in a few lines, as text and as HTML: what was decoded, under which settings, and what each depth would give.

Computes no interval, for that takes a bootstrap: `Trace.acceptance` has them. Every name is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mtplab.checkpoint.text_table import aligned, as_bytes, counted, html_table, printable, scrolling

if TYPE_CHECKING:
    from mtplab.study.trace import Trace

__all__ = ["as_html", "as_text"]

_COLUMNS = ("depth", "tokens per round")
_MORE = "Intervals, positions, domains and contexts: .acceptance()."


def _rows(trace: Trace) -> list[tuple[str, str]]:
    acceptance = trace.acceptance()
    lengths = {depth: acceptance.stats(depth).acceptance_length for depth in acceptance.depths}
    return [(str(depth), "–" if length is None else f"{length:.3f}") for depth, length in lengths.items()]


def _sentences(trace: Trace) -> list[str]:
    prompts, tokens = len(trace.output_lengths), int(trace.output_lengths.sum())
    asked = int(trace.prompt_lengths.sum())
    temperature, drawn = trace.settings["sampling"]["temperature"], trace.settings["spec"]["draft_sampling"]
    how = "greedy" if not temperature else f"temperature {temperature:g}, drafts {printable(drawn)}"
    domains = ", ".join(dict.fromkeys(printable(name) for name in trace.domains if name))
    read = f"{counted(prompts, 'prompt')} ({counted(asked, 'token')})"
    said = [
        f"trace of {read} and {counted(tokens, 'token')} of output, {how}"
        + (f"; domains: {printable(domains, 300)}" if domains else ""),
        f"{counted(len(trace.log_p), 'slot')}, {as_bytes(trace.nbytes)}"
        + (f", {sum(trace.seconds.values()):.1f} s" if trace.seconds else ""),
    ]
    if trace.approximate:
        said.append(
            f"approximate: the output was given, {100 * trace.settings['given']['agreement']:.1f} % of its tokens are "
            "the target's own"
        )
    return said


def as_text(trace: Trace) -> str:
    """What it is, tokens per round by depth, and where there is more."""
    return "\n".join([*_sentences(trace), *aligned(_COLUMNS, _rows(trace), _COLUMNS), _MORE])


def as_html(trace: Trace) -> str:
    """The same as HTML, every cell escaped: domains come from a file of prompts."""
    depths, lengths = zip(*_rows(trace), strict=True)
    table = html_table(("depth", *depths), [("tokens per round", *lengths)], set(depths))
    words = "".join(f"<p>{escape(text)}</p>" for text in (*_sentences(trace), _MORE))
    return f'<div class="mtplab-trace">{words}{scrolling(table, "Tokens per round by depth")}</div>'
