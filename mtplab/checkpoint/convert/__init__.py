"""Checkpoints written as other checkpoints: to FP8 in a layout of choice, to BF16, with more or less kept out.

Knows nothing of layers or runs.
"""

from __future__ import annotations

from mtplab.checkpoint.convert.quantize import FORMATS, Written, quantize_checkpoint

__all__ = ["FORMATS", "Written", "quantize_checkpoint"]
