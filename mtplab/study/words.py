"""How settings, prompts and changes are written where people read them. Option values, rows and files keep their own
names.

`none` means two opposite things there: an exclusion set of none is everything in FP8, a cache policy of none is a cache
that nothing quantises. Knows nothing of tables or figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mtplab.study.fields import field_of

__all__ = [
    "DEPTH",
    "LENGTH",
    "cache_words",
    "engine_words",
    "follows",
    "prompts_words",
    "ranges",
    "signed",
    "weights_words",
]

#: what an axis calls them
DEPTH = "Draft depth k (draft tokens per round)"
LENGTH = "Acceptance length (tokens per round)"

_DRAFT = re.compile(r"(?P<target>.*) \(draft: (?P<draft>.*)\)", re.DOTALL)


def engine_words(engine: str | None) -> str:
    """What ran a row (`ResultRow.engine`): an engine's name, or `mtplab` for its own runner; a server of mtplab's own
    is told from that."""
    return {None: "mtplab", "mtplab": "mtplab serve"}.get(engine, engine)


def weights_words(label: str, model_format: str | None) -> str:
    """An exclusion set's label (`ResultRow.exclude_label`) in words: `all FP8`, `all BF16`, `published`, globs.

    "All" means every linear module. In a checkpoint that is stored in FP8 (`model_format` None), excluding nothing
    leaves what is stored in BF16 as it is.
    """
    both = _DRAFT.fullmatch(label)
    if both:
        target, draft = (weights_words(part, model_format) for part in both.groups())
        return f"{target} (draft: {draft})"
    nothing = "all FP8" if model_format == "fp8" else "none (as stored)"
    return {"*": "all BF16", "none": nothing}.get(label, label)


def cache_words(policy: str, draft_policy: str | None = None) -> str:
    """`int8`, `unquantised`, or both where the draft's cache does not follow: `int8 (draft unquantised)`."""
    target, draft = ("unquantised" if name == "none" else name for name in (policy, draft_policy or policy))
    return target if follows(draft_policy or policy, policy) else f"{target} (draft {draft})"


def follows(draft_policy: str, policy: str) -> bool:
    """Whether a draft has its target's cache policy, both by name (`QuantPolicy.name`): all of it but the layers that
    are kept, which are the target's. `int8` follows `int8@3`."""
    return draft_policy in (policy, policy.partition("@")[0])


def prompts_words(row: Any) -> str:
    """How much a row ran: `73 prompts × 64 tokens`."""
    count = field_of(row, "n_prompts")
    return f"{count} prompt{'s' * (count != 1)} × {field_of(row, 'max_new_tokens')} tokens"


def ranges(numbers: Iterable[int], dash: str = "-") -> list[str]:
    """Rising numbers, those that follow each other together: `0-3`, `7`."""
    found: list[list[int]] = []
    for each in numbers:
        if found and each == found[-1][-1] + 1:
            found[-1].append(each)
        else:
            found.append([each])
    return [f"{each[0]}{dash}{each[-1]}" if len(each) > 1 else str(each[0]) for each in found]


def signed(value: float, digits: int = 2) -> str:
    """A change, with its sign: `+0.12`, `−0.12`."""
    return f"{value:+.{digits}f}".replace("-", "−")
