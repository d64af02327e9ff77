"""Decoding: caches and rollback, sampling, the speculative step, the runner."""

from mtplab.decode.generate import generate, token_ids
from mtplab.decode.runner import Cancelled
from mtplab.decode.stats import AcceptanceStats, Generation, Progress, RoundRecord

__all__ = ["AcceptanceStats", "Cancelled", "Generation", "Progress", "RoundRecord", "generate", "token_ids"]
