"""When acceptance must not be believed: the target it was measured with is broken.

A target counts as broken when text that the unquantised target wrote surprises it so much more that perplexity is up by
half: KL of ln 1.5 = 0.405 nats per token, for on such text the ratio of perplexities estimates exp(KL). Quantisation
that anybody uses stays far below: FP8 of the bundled model has 0.005 nats, and Llama 3 8B at 2 bits (llama.cpp's q2_K,
ratio 1.56, ggerganov/llama.cpp#6936), which few would serve, lies just above. Without a reference there is no KL, and a
target is compared with the best one of the same study over the same text. What is not a finite number is broken too.

Works on rows or dicts with the same fields; knows nothing of how they were made or where they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mtplab.study.fields import field_of
from mtplab.study.number_table import Cell, on_one_line
from mtplab.study.numbers import NATS, plus_minus, rounded
from mtplab.study.words import cache_words, weights_words

__all__ = [
    "COLUMNS",
    "CRITERION",
    "MARK",
    "NOT_FINITE",
    "faults",
    "kl_words",
    "quality_cells",
    "quality_notes",
    "quality_numbers",
    "sentences",
]

COLUMNS = ("KL, nats", "top-1", "perplexity")
#: what a row says of a target whose probabilities are no numbers
NOT_FINITE = "the target's probabilities on this text are not finite numbers"
BROKEN = 1.5  # times the perplexity of the unquantised target
MARK = "⚠"
CRITERION = (
    f"{MARK} a broken target: its perplexity on the same text is {BROKEN:g} times the unquantised target's or more (KL "
    f"of ln {BROKEN:g} = {math.log(BROKEN):.3f} {NATS})"
)


def faults(rows: Iterable[Any]) -> list[str | None]:
    """For each row why its target is broken, in a few words; None where it is not, or where nobody knows."""
    found = list(rows)
    best: dict[tuple[Any, Any], float] = {}
    for row in found:
        perplexity = field_of(row, "perplexity")
        if perplexity is not None and field_of(row, "kl") is None:
            text = (field_of(row, "checkpoint"), field_of(row, "quality_text"))
            best[text] = min(perplexity, best.get(text, math.inf))
    return [_fault(row, best.get((field_of(row, "checkpoint"), field_of(row, "quality_text")))) for row in found]


def _fault(row: Any, best: float | None) -> str | None:
    kl, top1, perplexity = (field_of(row, name) for name in ("kl", "top1_agreement", "perplexity"))
    if kl is not None:
        if kl < math.log(BROKEN):
            return None
        said = f"KL of {rounded(kl)[0]} {NATS} from the unquantised target, top-1 agreement {top1_words(row)}"
        reference = field_of(row, "reference_perplexity")
        return said + (f", perplexity {perplexity / reference:.2g} times as high" if perplexity and reference else "")
    if perplexity is not None:
        if best is None or perplexity < BROKEN * best:
            return None
        return f"perplexity {perplexity / best:.2g} times that of the best target here, on the same text"
    return "no finite probabilities" if NOT_FINITE in (field_of(row, "quality_note") or "") else None


def sentences(rows: Iterable[Any], most: int = 3) -> list[str]:
    """A sentence for each broken target: what is wrong with it, and what acceptance length hides that."""
    found = [row for row in rows if field_of(row, "error") is None]
    why = faults(found)
    several = len({field_of(row, "checkpoint") for row in found}) > 1
    sound = [row for row, fault in zip(found, why, strict=True) if fault is None and _measured(row)]
    broken: dict[tuple[Any, ...], tuple[Any, str]] = {}
    for row, fault in zip(found, why, strict=True):
        if fault is not None:
            key = (_named(row, several), fault)
            if key not in broken or _rank(row) > _rank(broken[key][0]):
                broken[key] = (row, fault)
    told = [_sentence(row, fault, sound, several) for row, fault in list(broken.values())[:most]]
    if len(broken) > most:
        told.append(f"{MARK} and {len(broken) - most} more broken targets.")
    return told


def _sentence(row: Any, fault: str, sound: list[Any], several: bool) -> str:
    length, depth = field_of(row, "acceptance_length"), field_of(row, "depth")
    said = f"{MARK} {_named(row, several)}: the target is broken ({fault})."
    if length is None or not depth:
        return said
    shared = ("depth", "temperature", "prompt_set")
    like = [r for r in sound if all(field_of(r, key) == field_of(row, key) for key in shared)]
    best = max(like, key=lambda r: field_of(r, "acceptance_length"), default=None)
    beside = "" if best is None else f" ({field_of(best, 'acceptance_length'):.2f} with {_named(best, several)})"
    return (
        f"{said} Its acceptance length at depth {depth}, {length:.2f}{beside}, says how easily it is guessed, and "
        "nothing of whether it is right."
    )


def quality_notes(rows: Iterable[Any], columns: bool = True) -> list[str]:
    """What to know beside the numbers: broken targets, the criterion, and with `columns` of quality the text that they
    are over and why numbers are missing."""
    found = [row for row in rows if field_of(row, "error") is None]
    told = sentences(found)
    if told:
        told.append(CRITERION)
    if not columns:
        return told
    told += dict.fromkeys(note for row in found if (note := field_of(row, "quality_note")))
    texts = dict.fromkeys(text for row in found if (text := field_of(row, "quality_text")))
    kinds = {"own": "what the unquantised target writes at temperature 1 from the prompts", "prompts": "the prompts"}
    words = list(dict.fromkeys(kinds.get(text.partition(":")[0], text) for text in texts))
    if words:
        several = "; lines over different texts do not compare" if len(texts) > 1 else ""
        over = f"{' or '.join(words)}{several}"
        told.append(
            f"KL (from the unquantised target, {NATS}), top-1 and perplexity (× the unquantised target's) "
            f"are over {over}"
        )
    return told


def quality_cells(rows: Iterable[Any]) -> list[tuple[str, ...]] | None:
    """For each row the cells under `COLUMNS`, marked where its target is broken; None where no row was judged."""
    found = quality_numbers(rows)
    return None if found is None else [tuple(map(on_one_line, cells)) for cells in found]


def quality_numbers(rows: Iterable[Any]) -> list[tuple[Cell, Cell, Cell]] | None:
    """The same, intervals and ratios below their numbers."""
    found = list(rows)
    if all(field_of(row, "perplexity") is None and field_of(row, "quality_note") is None for row in found):
        return None
    cells = []
    for row, fault in zip(found, faults(found), strict=True):
        kl = field_of(row, "kl")
        number, error = ("–", None) if kl is None else rounded(kl, field_of(row, "kl_error"))
        number = number if fault is None else f"{MARK} {number}"
        cells.append(((number, f"±{error}") if error else number, top1_words(row), _perplexity_cell(row)))
    return cells


def kl_words(row: Any) -> str:
    """Nats per token, with its ±: `0.00467 ± 0.00022`."""
    kl = field_of(row, "kl")
    return "–" if kl is None else plus_minus(kl, field_of(row, "kl_error"))


def top1_words(row: Any) -> str:
    """`94.4 %`."""
    share = field_of(row, "top1_agreement")
    return "–" if share is None else f"{100 * share:.1f} %"


def _perplexity_cell(row: Any) -> Cell:
    """24.9 and ×1.006: the perplexity, and its ratio to the reference's."""
    mine, theirs = field_of(row, "perplexity"), field_of(row, "reference_perplexity")
    if mine is None:
        return "–"
    return (rounded(mine)[0], f"×{mine / theirs:.3f}") if theirs else rounded(mine)[0]


def _named(row: Any, several: bool) -> str:
    origin = f"{field_of(row, 'checkpoint')}: " if several else ""
    words = weights_words(str(field_of(row, "exclude_label")), field_of(row, "model_format"))
    return f"{origin}{words} · {cache_words(field_of(row, 'quant_policy') or 'none')} cache"


def _rank(row: Any) -> tuple[float, float]:
    return -(field_of(row, "temperature") or 0.0), field_of(row, "depth")


def _measured(row: Any) -> bool:
    return field_of(row, "perplexity") is not None and field_of(row, "acceptance_length") is not None
