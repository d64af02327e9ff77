"""Decoding: caches and rollback, sampling, the speculative step, the runner.

This room does not know points, sweeps or files: it runs a loaded model on the prompts it is given.
"""

from mtplab.decode.generate import generate
from mtplab.decode.runner import Cancelled
from mtplab.decode.settings import token_ids
from mtplab.decode.stats import AcceptanceStats, Generation, Progress, RoundRecord

__all__ = ["AcceptanceStats", "Cancelled", "Generation", "Progress", "RoundRecord", "generate", "token_ids"]
