"""What a search for exclusions found, in sentences, and what would settle what it leaves open.

Reads an `ExclusionSearch`; measures and chooses nothing, and names no option of a command.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mtplab.study.numbers import NATS, plus_minus

if TYPE_CHECKING:
    from mtplab.study.exclusion_meter import Change, Measured
    from mtplab.study.exclusion_search import Better, ExclusionSearch

__all__ = ["open_budgets", "sentences"]


def sentences(found: ExclusionSearch) -> list[str]:
    """How much was measured, the recommended set and what it costs, what is open, other prompts, the published list."""
    said = [f"{len(found.points)} sets measured."]
    if found.recommended is None or found.loss is None:
        said.append(f"None keeps KL at {found.kl_budget:g} {NATS} and the loss of acceptance at {_budget(found)}.")
    else:
        first = "Smallest that keeps the budgets" if found.sure else "Smallest that is not shown to break a budget"
        said.append(
            f"{first}: {', '.join(g.name for g in found.groups) or 'nothing'} in BF16, "
            f"{found.recommended.nbytes:,} bytes, KL {_kl(found.recommended.mean_kl)} {NATS} "
            f"(budget {found.kl_budget:g}), loss of acceptance {_per_cent(found.loss)} (budget {_budget(found)})."
        )
        said += open_budgets(found)
        again = found.confirmed
        if again is not None and again.loss is not None and again.kl is not None:
            said.append(f"On {again.prompts} other prompts: KL {_kl(again.kl)}, loss {_per_cent(again.loss)}.")
    return [*said, *_about_published(found)]


def open_budgets(found: ExclusionSearch) -> list[str]:
    """A sentence for each budget that chance leaves open; for acceptance with the number of prompts that would tell,
    and the budget from which on these do."""
    if found.recommended is None or found.loss is None:
        return []
    kl, loss = found.recommended.mean_kl, found.loss
    said = []
    if kl.upper > found.kl_budget:
        said.append("Whether KL keeps its budget cannot be told from these texts: more or longer ones would.")
    if loss.upper > found.al_budget:
        told = _what_would_tell(found, loss)
        said.append(f"Whether the loss of acceptance keeps its budget cannot be told from {told}.")
    return said


def _what_would_tell(found: ExclusionSearch, loss: Change) -> str:
    count = len(found.recommended.rounds) if found.recommended is not None else 0
    text = f"{count} prompts" if count != 1 else "1 prompt"
    if not loss.error:
        return f"{text}, which show no interval"
    text += f": from a budget of {_round_up(100 * loss.upper):g} % on they tell"
    if not found.al_budget:
        return f"{text}, and no number of prompts shows a loss to be none"
    # the interval shrinks with the root of their number
    needed = _round_up(count * (loss.error / found.al_budget) ** 2)
    return f"{text}, and a loss of {_budget(found)} shows over about {needed:,} prompts as long"


def _about_published(found: ExclusionSearch) -> list[str]:
    kl = _kl(found.published.mean_kl)
    name = f"the published list ({found.published.nbytes:,} bytes, KL {kl})"
    best = found.better_than_published
    if best is None:
        return [f"None of them dominates {name} in bytes, KL and acceptance."]
    shown = not (best.kl.within_chance and best.length.within_chance)
    verb = "dominates" if shown else "is smaller, with no loss shown, than"
    said = [f"One set {verb} {name}: {_against(best)}, with {_names(found, best.measured)} in BF16."]
    if found.confirmed is not None and found.confirmed.better is not None:
        verdict = "this holds too" if found.confirmed.better.dominates else "this does not hold"
        said.append(f"On {found.confirmed.prompts} other prompts {verdict}: {_against(found.confirmed.better)}.")
    else:
        said.append("It was chosen on these prompts among many sets; others would tell whether it is one.")
    return said


def _names(found: ExclusionSearch, point: Measured) -> str:
    """What a set keeps, group by group where it keeps whole ones."""
    left = set(point.excluded)
    words = []
    for row in found.sensitivity.rows:
        if left >= set(row.group.modules):
            words.append(row.group.name)
            left -= set(row.group.modules)
    return ", ".join([*words, *sorted(left)]) or "nothing"


def _against(better: Better) -> str:
    chance = {True: "within chance", False: "beyond chance"}
    size = f"{better.nbytes:+,} bytes".replace("-", "−")
    return (
        f"{size}, KL {plus_minus(*better.kl, sign=True)} ({chance[better.kl.within_chance]}), "
        f"acceptance length {plus_minus(*better.length, sign=True)} ({chance[better.length.within_chance]})"
    )


def _kl(change: Change) -> str:
    return plus_minus(*change)


def _per_cent(change: Change) -> str:
    return f"{plus_minus(100 * change.value, None if change.error is None else 100 * change.error)} %"


def _budget(found: ExclusionSearch) -> str:
    return f"{100 * found.al_budget:g} %"


def _round_up(value: float) -> float | int:
    """To two digits, upwards."""
    if value <= 0:
        return 0
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    up = math.ceil(value / step - 1e-9) * step
    return round(up) if step >= 1 else float(f"{up:.6g}")
