"""Checkpoints on disk: headers, formats, exclusions, plans, values, writing.

Knows nothing of layers or engines. Importing it, opening and planning import no torch.
"""

from __future__ import annotations

from mtplab.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.formats import QuantizationConfig
from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.pairing import Problem
from mtplab.checkpoint.plan import ModulePlan, Plan
from mtplab.checkpoint.write import SafetensorsWriter, write_safetensors

__all__ = [
    "Checkpoint",
    "ModulePlan",
    "Plan",
    "Problem",
    "QuantizationConfig",
    "SafetensorsWriter",
    "TensorInfo",
    "open_checkpoint",
    "write_safetensors",
]
