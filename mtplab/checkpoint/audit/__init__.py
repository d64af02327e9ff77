"""The audit: what is in a checkpoint, what is wrong with it, why that matters and what to do.

Headers only, and no torch, but for what `deep` asks for: the deep checks, and the values of a source compared.
"""

from __future__ import annotations

from mtplab.checkpoint.audit.audit import Audit, examine
from mtplab.checkpoint.audit.finding import SEVERITIES, Finding
from mtplab.checkpoint.audit.heads import Head
from mtplab.checkpoint.audit.supposed import rewritten

__all__ = ["SEVERITIES", "Audit", "Finding", "Head", "examine", "rewritten"]
