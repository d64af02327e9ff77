"""A speculative run, token by token: which tokens the draft guessed and which the target gave.

Reads tokens and round records; runs nothing and knows no model beyond a function that turns ids into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mtplab.report.palette import BLUE, GREEN
from mtplab.report.text import escape

__all__ = ["RoundsView"]


class RoundsView:
    """The first tokens of one prompt's output: accepted drafts marked, rounds set apart.

    Args:
        generation: has `.tokens` (one list of ids per prompt) and `.rounds` (records with `prompt`,
            `accepted`, `emitted`, in order).
        decode: ids -> text.
        prompt: the prompt's text, shown before the output.
        index: which prompt of the run.
        limit: how many tokens to show.
    """

    def __init__(
        self,
        generation: Any,
        decode: Callable[[Sequence[int]], str],
        prompt: str = "",
        index: int = 0,
        limit: int = 60,
    ):
        self.prompt = prompt
        self.ids = list(generation.tokens[index])[:limit]
        self.kinds: list[str] = ["target"] * min(1, len(self.ids))  # the prompt's own pass gives the first token
        self.starts: list[int] = []
        for record in generation.rounds:
            if record.prompt != index or len(self.kinds) >= limit:
                continue
            self.starts.append(len(self.kinds))
            self.kinds += ["draft"] * record.accepted + ["target"] * (record.emitted - record.accepted)
        self.kinds = self.kinds[: len(self.ids)]
        self.pieces = _pieces(self.ids, decode)

    def _repr_html_(self) -> str:
        marks = {
            "draft": f"border-bottom:3px solid {GREEN}",
            "target": f"border-bottom:3px dotted {BLUE}",
        }
        spans = []
        for at, (kind, piece) in enumerate(zip(self.kinds, self.pieces, strict=True)):
            bar = '<span aria-hidden="true" style="opacity:.55">│</span>' if at in self.starts else ""
            title = "accepted draft" if kind == "draft" else "given by the target"
            # bdi: a piece written from right to left must not turn its neighbours around
            spans.append(
                f'{bar}<bdi title="{title}" style="{marks[kind]}">{escape(piece).replace(chr(10), "↵" + chr(10))}</bdi>'
            )
        return (
            "<div style=\"font:14px/2 ui-monospace,'DejaVu Sans Mono',monospace;white-space:pre-wrap\">"
            f'<bdi style="opacity:.65">{escape(self.prompt)}</bdi>{"".join(spans)} …</div>'
            f'<p style="font-size:14px"><span style="{marks["draft"]}">underlined</span>: a draft that the target '
            f'accepted ({self.kinds.count("draft")} of {len(self.kinds)} tokens shown); <span style="'
            f'{marks["target"]}">dotted</span>: the token the target gives itself in each round; '
            "│ starts a round.</p>"
        )

    def __repr__(self) -> str:
        return f"RoundsView({len(self.ids)} tokens, {self.kinds.count('draft')} of them accepted drafts)"


def _pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text each token adds; a character split over two tokens shows with the one that completes it."""
    pieces, before = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end]).rstrip("\ufffd")
        pieces.append(text[len(before) :] if text.startswith(before) else "")
        before = text if text.startswith(before) else before
    return pieces
