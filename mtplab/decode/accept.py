"""The speculative step of a run: which drafts are kept and what follows them. The rule lives beside its kernel.

Knows nothing of models, caches or random generators.
"""

from __future__ import annotations

from mtplab.kernels.acceptance_reference import Verdict, accept_greedy, accept_sampled

__all__ = ["Verdict", "accept_greedy", "accept_sampled"]
