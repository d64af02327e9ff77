"""The errors a user of mtplab can meet: one family, so that one `except` catches all of them.

This module knows nothing of what the rooms do. A message names what was found, what was expected and what
to do about it; anything else that escapes from mtplab is a bug in mtplab.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "ConfigError", "MtplabError"]


class MtplabError(Exception):
    """Base of every error mtplab raises on purpose."""


class CheckpointError(MtplabError):
    """A checkpoint cannot be read, contradicts itself, or is of a kind mtplab does not support."""


class ConfigError(MtplabError, ValueError):
    """A setting given by the user is unknown, out of range, or does not fit the checkpoint."""
