"""The passes a round is made of, as functions of tensors: eager, or compiled for a batch of fixed shape.

Knows nothing of sequences, acceptance or rollback. torch.compile pays where per-operator overhead is the cost, at
batch 1: it takes some seconds for each number of tokens a pass has (LOG.md). Compiled passes read whole buckets of the
cache, so that a growing context does not compile again, and make no promise about the bits of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FunctionType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mtplab.decode.state import RunState
from mtplab.models import Model
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.mixture import leave_experts_uncompiled
from mtplab.models.passes import PassMaker
from mtplab.models.rows import pad_rows, round_up, row_count

# one code object serves every depth, batch, cache policy and bucket
_RECOMPILE_LIMIT = 128


def verify_step(target, passes: PassMaker, tokens, positions, longest, exact, key_length, caches):
    """The target over tokens [b, t] → hidden before and after the final norm [b, t, h], logits [b, t, v]."""
    run = passes.make(positions, longest, exact, key_length=key_length)
    hidden = target(tokens, run, caches)
    normed = target.normed(hidden)
    logits = target.logits(normed)
    b, t = tokens.shape
    return tuple(x[: run.rows].view(b, t, -1) for x in (hidden, normed, logits))


def draft_step(head, passes: PassMaker, tokens, hidden, positions, at, longest, exact, key_length, kv):
    """The head over tokens [b, t] and hidden [b, t, h]; of slot at[i] of sequence i (the only one if None): its hidden
    before and after mtp.norm [b, h], and logits [b, v]."""
    b, t = tokens.shape
    run = passes.make(positions, longest, exact, key_length=key_length)
    embedded = run.gather(head.embed(tokens, positions))
    out = head(embedded, run.gather(hidden), run, kv)[: run.rows]
    if at is not None:
        out = out.view(b, t, -1)[torch.arange(b, device=out.device), at]
    normed = head.normed(pad_rows(out, row_count(b, exact)))
    return out, normed[:b], head.logits(normed)[:b]


def module_step(head, passes: PassMaker, tokens, hidden, positions, at, longest, exact, key_length, kv, step):
    """Of a head with a module per depth, the one of this step over tokens [b, t] and hidden [b, t, h]: its hidden
    before and after its norm at every slot [b, t, h], and logits [b, v] at slot at[i] of sequence i."""
    b, t = tokens.shape
    run = passes.make(positions, longest, exact, key_length=key_length)
    embedded = run.gather(head.embed(tokens, positions, step))
    out = head(embedded, run.gather(hidden), run, kv, step)
    normed = head.normed(out, step)
    out, normed = out[: run.rows].view(b, t, -1), normed[: run.rows].view(b, t, -1)
    last = normed[torch.arange(b, device=at.device), at]
    return out, normed, head.logits(pad_rows(last, row_count(b, exact)), step)[:b]


# a model's compiled passes live as long as it does
_compiled: WeakKeyDictionary[Model, tuple[Callable, Callable, Callable]] = WeakKeyDictionary()


def _compiled_for(model: Model) -> tuple[Callable, Callable, Callable]:
    """The steps compiled for this model alone."""
    if model not in _compiled:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
        leave_experts_uncompiled()
        for part in filter(None, (model.target, model.draft)):
            for linear in part.linears():
                linear.prepare_compiled()
        _compiled[model] = _compile(verify_step), _compile(draft_step), _compile(module_step)
    return _compiled[model]


def _compile(step: Callable) -> Callable:
    # torch.compile files what it compiles under the code object: a copy belongs to one model
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
    # a pass is some dozens of kernels of microseconds each: Python between them would cost as much again
    options = {"size_asserts": False, "cpp_wrapper": True, "guard_filter_fn": _guards_of_a_call}
    return torch.compile(own, dynamic=False, options=options)


def _guards_of_a_call(guards) -> list[bool]:
    """Which of torch.compile's conditions are checked at every call: those on a call's own arguments.

    A model does not change once loaded, nor do classes and modules; some hundred checks of them would take as long as
    a tenth of a pass (LOG.md).
    """
    return [re.match(r"(target|head)\b|G\b|type\(|dict\(", guard.name or "") is None for guard in guards]


class Steps:
    """The passes of one run."""

    def __init__(self, model: Model, passes: PassMaker, state: RunState, exact: bool, compiled: bool):
        self.model, self.passes, self.state, self.exact, self.compiled = model, passes, state, exact, compiled
        self._offsets = torch.arange(passes.most_tokens, device=model.device)
        steps = _compiled_for(model) if compiled else (verify_step, draft_step, module_step)
        self._verify, self._draft, self._module = steps

    def verify(self, tokens: Tensor, start: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """`verify_step` with sequence i's tokens at positions start[i], start[i] + 1, …, the last at `longest` − 1."""
        positions, reach = self._where(start, longest, tokens.shape[1])
        return self._verify(self.model.target, self.passes, tokens, positions, *reach, self.state.target)

    def draft(
        self, tokens: Tensor, hidden: Tensor, start: Tensor, longest: int, at: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`draft_step` with sequence i's slots at start[i], start[i] + 1, …, the last at `longest` − 1."""
        return self._draft(*self._of_head(tokens, hidden, start, longest, at), self.state.draft[0])

    def module(
        self, step: int, tokens: Tensor, hidden: Tensor, start: Tensor, longest: int, at: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`module_step` with sequence i's slots at start[i], start[i] + 1, …, the last at `longest` − 1."""
        return self._module(*self._of_head(tokens, hidden, start, longest, at), self.state.draft[step], step)

    def _of_head(self, tokens: Tensor, hidden: Tensor, start: Tensor, longest: int, at: Tensor | None) -> tuple:
        """What both of the head's steps are given first."""
        positions, reach = self._where(start, longest, tokens.shape[1])
        return (self.model.draft, self.passes, tokens, hidden, positions, at, *reach)

    def _where(self, start: Tensor, longest: int, t: int) -> tuple[Tensor, tuple[int, bool, int | None]]:
        positions = start[:, None] + self._offsets[:t]
        if not self.compiled:
            return positions, (longest, self.exact, None)
        bucket = min(round_up(longest, KEY_BLOCK), self.passes.capacity)
        return positions, (bucket, self.exact, bucket)
