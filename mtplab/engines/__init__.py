"""Serving engines: how each is started, asked and counted, so that a sweep runs on them and gives the same rows.

One small file per engine says what it calls things; the rest knows no engine by name. What sends or starts anything
(`attach`, `launch`) is imported where it is used, so that a sweep without an engine waits for none of it.
"""

from mtplab.engines.measured import Counts, Measured, Share
from mtplab.engines.serving import ServerSlot, Serving
from mtplab.engines.settings import Attach, Launch, Limits, engine_settings

__all__ = [
    "Attach",
    "Counts",
    "Launch",
    "Limits",
    "Measured",
    "ServerSlot",
    "Serving",
    "Share",
    "engine_settings",
]
