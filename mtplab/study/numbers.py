"""How a measured number is written: no more digits than its interval bears, in one unit.

KL is in nats everywhere: in rows, options, tables and figures. Knows nothing of what was measured.
"""

from __future__ import annotations

import math

__all__ = ["NATS", "fixed", "percent", "plus_minus", "rounded"]

NATS = "nats per token"
_FINE = 9  # digits behind the point; smaller numbers get an exponent


def rounded(value: float, error: float | None = None, sign: bool = False) -> tuple[str, str | None]:
    """(the number, its ±): two digits of the error, and the number to the same place; three digits of a number that
    has no error. `sign` puts a + before a gain."""
    if not math.isfinite(value):
        return str(value), None
    if not error or not math.isfinite(error):
        return (fixed(value, _place(value, 3), sign) if value else "0"), None
    place = _place(error, 2)
    return fixed(value, place, sign), fixed(error, place)


def plus_minus(value: float, error: float | None = None, sign: bool = False) -> str:
    """`0.00456 ± 0.00028`."""
    number, spread = rounded(value, error, sign)
    return number if spread is None else f"{number} ± {spread}"


def percent(share: float, digits: int = 0, sign: bool = False) -> str:
    """`41 %`, or with `sign` `−14 %`."""
    return f"{fixed(100 * share, digits, sign)} %"


def fixed(value: float, place: int, sign: bool = False) -> str:
    """To a place behind the point, `0.90`; `sign` puts a + before a gain."""
    plus = "+" if sign else ""
    if place > _FINE:
        return f"{value:{plus}.1e}".replace("-", "−")
    text = f"{round(value, place):{plus},.{max(0, place)}f}"
    # what is rounded to nothing has no sign
    return text.lstrip("+-") if not any(digit in text for digit in "123456789") else text.replace("-", "−")


def _place(value: float, digits: int) -> int:
    """Digits behind the point that show `digits` of a value."""
    size = math.floor(math.log10(abs(value)))
    # 0.0996 to two digits is 0.10, not 0.100
    if round(abs(value), digits - 1 - size) >= 10 ** (size + 1):
        size += 1
    return digits - 1 - size
