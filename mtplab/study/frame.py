"""Records as a pandas frame, where pandas is installed. Knows nothing of what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtplab.errors import ConfigError

__all__ = ["frame"]


def frame(records: Sequence[dict[str, Any]], without: str) -> Any:
    """A pandas DataFrame, a line a record. Raises ConfigError without pandas, and says what does `without` it."""
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            f"to_frame() needs pandas, which is not installed: pip install pandas ({without} without)"
        ) from None
    return pandas.DataFrame(records)
