"""The study: points of a sweep, run once, kept on disk, read back.

This room does not know how figures, panels or the command line look, and imports torch only where a model is
loaded or run.
"""

from mtplab.study.prompts import Prompt, PromptSet, load_prompts
from mtplab.study.result import SweepResult
from mtplab.study.row import DomainStats, ResultRow
from mtplab.study.store import read_rows
from mtplab.study.sweep import engine_commands, sweep

__all__ = [
    "DomainStats",
    "Prompt",
    "PromptSet",
    "ResultRow",
    "SweepResult",
    "engine_commands",
    "load_prompts",
    "read_rows",
    "sweep",
]
