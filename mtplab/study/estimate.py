"""What every module costs in FP8, estimated from one forward pass and a few backward ones, with no module run alone.

**Target.** A module's error e, at the input it has in BF16, moves the logits of position t by d_t = J_t e to first
order. KL is least, 0, where nothing moves, so its first-order term is none and the second is the whole of it,

    KL ≈ ½ Σ_t d_tᵀ F_t d_t,      F_t = diag(p_t) − p_t p_tᵀ,

the Fisher information of the logits (Amari, "Natural gradient works efficiently in learning", 1998; Martens, "New
insights and perspectives on the natural gradient method", 2020, §5; the same expansion, with the loss's Hessian, ranks
weights in Le Cun, Denker, Solla, "Optimal brain damage", 1990, and Hassibi, Stork, "Optimal brain surgeon", 1993).
J_t e for every module would be a forward pass each. Its product with a random vector is not: F_t = S_t S_tᵀ with
S_t = diag(√p_t) − p_t √p_tᵀ, so for z_t = S_t ξ_t, ξ_t independent signs, E[(Σ_t z_tᵀ d_t)²] = Σ_t d_tᵀ F_t d_t: z's of
different positions are uncorrelated, and their cross terms vanish in the mean. One backward pass of Σ_t z_tᵀ logits_t
gives ⟨∂/∂y_m, e_m⟩ = Σ_t z_tᵀ d_t for all modules m at once: their *scores* s_m. Hence

    KL of a set M ≈ ½ E[(Σ_{m∈M} s_m)²],      per text, and without bias for every set, cross terms included.

Tokens drawn from p_t would do for z_t too (one-hot less p_t has the same covariance: the usual sampled Fisher), but a
rare token makes the square's tails as heavy as 1/p; signs (Hutchinson, 1990) bound the variance by that of a normal
variable: one draw on one text errs by at most √2 of its own value, N alike texts with R draws by √(2 / (N R)).

**Draft.** A draft is not at a minimum of its divergence KL(p‖q) from the target's p, so the first-order term counts:

    ΔKL(p‖q) ≈ Σ_t (q_t − p_t)ᵀ d_t + ½ Σ_t d_tᵀ F(q_t) d_t,

one backward pass without chance, and the same random ones (the second derivative of −log q by the logits is F(q)
whatever the token; that of the logits is left out, Gauss and Newton's approximation). Of the share of drafts accepted
when they are drawn, Σ_v min(p, q), the first-order term is one more backward pass. All at the first draft, at the
slots of the given text. Acceptance of greedy drafts is a count of equal tokens and has no derivative: neither says by
how much acceptance length changes, and nothing here does.

**Where it ends.** The expansion is local: `Estimate.local` says whether a set's KL is small enough for it, and
`with_estimates` compares with what was measured, text by text. Knows nothing of how sets are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.errors import ConfigError
from mtplab.study.exclusion_meter import Change, ExclusionMeter
from mtplab.study.interval import jackknife, student, without_one
from mtplab.study.module_groups import ModuleGroup

if TYPE_CHECKING:
    import torch

    from mtplab.models import Model
    from mtplab.study.text_batches import TextBatch

__all__ = ["Estimate", "estimate_texts", "estimated"]

# nats per token: beyond it the second-order term of KL is no longer the whole of it
LOCAL = 0.2

Table = dict[str, np.ndarray]  # by module


@dataclass(frozen=True, eq=False)
class Estimate:
    """Scores of every module that FP8 treats otherwise, by text.

    `target` and `draft`: module (name on disk) → [draws, texts] float64, scores of random vectors. `toward`: a module
    of the draft → [texts], first-order change of Σ KL(target ‖ draft) in nats; `accepted` → [texts], of the expected
    number of first drafts accepted when they are drawn. `judged` tokens and `slots` of first drafts, by text.
    """

    target: Table
    draft: Table
    toward: Table
    accepted: Table
    judged: tuple[int, ...]
    slots: tuple[int, ...]
    draws: int
    seconds: float

    def kl_by_text(self, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        """[texts] nats, summed over each text's tokens: KL of the target with these modules or groups in FP8, and no
        others. The draft's modules cost the target nothing."""
        return 0.5 * (self._scores(self.target, modules) ** 2).mean(0)

    def kl(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """KL(BF16 ‖ the target with these in FP8), nats per token, ± half a 95 % interval over texts."""
        return _ratio(self.kl_by_text(modules), self.judged)

    def kl_noise(self, modules: Iterable[ModuleGroup | str]) -> float | None:
        """Half a 95 % interval of what the random vectors alone leave open, nats per token; None for one draw."""
        squares = 0.5 * self._scores(self.target, modules) ** 2
        if self.draws < 2:
            return None
        return student(self.draws - 1) * float(squares.sum(1).std(ddof=1) / self.draws**0.5) / sum(self.judged)

    def local(self, modules: Iterable[ModuleGroup | str]) -> bool:
        """Whether the estimate is small enough to be one: the expansion knows nothing of large errors."""
        return self.kl(modules).value <= LOCAL

    def draft_kl_by_text(self, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        """[texts] nats, summed over slots: change of KL(target ‖ draft) with these of the draft's in FP8."""
        names = list(_names(modules))
        second = 0.5 * (self._scores(self.draft, names) ** 2).mean(0)
        return self._first(self.toward, names) + second

    def draft_kl(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """Change of KL(target ‖ first draft), nats per slot, ± half a 95 % interval over texts."""
        return _ratio(self.draft_kl_by_text(modules), self.slots)

    def draft_accepted(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """First-order change of the share of first drafts accepted when they are drawn at temperature 1."""
        return _ratio(self._first(self.accepted, modules), self.slots)

    def _first(self, table: Table, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        found = [table[name] for name in _names(modules) if name in table]
        return np.sum(found, 0) if found else np.zeros(len(self.judged))

    def _scores(self, table: Table, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        found = [table[name] for name in _names(modules) if name in table]
        return np.sum(found, 0) if found else np.zeros((self.draws, len(self.judged)))


def _names(modules: Iterable[ModuleGroup | str]) -> Iterator[str]:
    for each in modules:
        yield from (each,) if isinstance(each, str) else each.modules


def _ratio(sums: np.ndarray, sizes: Sequence[int]) -> Change:
    return Change(float(sums.sum() / sum(sizes)), jackknife(without_one(sums, sizes)))


def estimated(meter: ExclusionMeter, draws: int = 16, seed: int = 0) -> Estimate:
    """The estimate for a meter's modules over its own texts, on which it measures KL too.

    Args:
        draws: random vectors, a backward pass each; the estimate errs by √(2 / (texts · draws)) of itself.
        seed: of those vectors.

    Raises ConfigError for a number of draws that is none.
    """
    quantised = meter.model.with_exclusions(sorted(meter.fixed) or "none", model_format="fp8")
    skips = [len(prompt) - 1 for prompt in meter.prompts]
    return estimate_texts(meter.model, quantised, meter.texts, skips, draws, seed)


def estimate_texts(
    model: Model, quantised: Model, texts: Sequence[Sequence[int]], skips: Sequence[int], draws: int = 16, seed: int = 0
) -> Estimate:
    """Scores of every module that `quantised` treats otherwise than `model`.

    Args:
        model, quantised: a model and the same with modules in FP8 (`with_exclusions`).
        texts: lists of ids; judged are the tokens after the first `skips[i]` + 1 of text i, two at least.
        draws, seed: as in `estimated`.
    """
    from mtplab.decode.threads import on_device, running_with, thread_count
    from mtplab.study.text_batches import check_texts

    if type(draws) is not int or draws < 1:
        raise ConfigError(f"draws is {draws!r:.60}; expected a whole number of at least 1")
    check_texts(texts, skips)
    began = time.perf_counter()
    weights = sum(int(np.prod(module.shape)) for module in model.plan.modules)
    with running_with(thread_count(None, weights, model.device)), on_device(model.device):
        parts = _Passes(model, quantised, draws, seed).over(texts, skips)
    joined = [{name: np.concatenate([part[i][name] for part in parts], -1) for name in parts[0][i]} for i in range(4)]
    judged = tuple(len(text) - skip - 1 for text, skip in zip(texts, skips, strict=True))
    slots = tuple(count - 1 for count in judged)
    return Estimate(*joined, judged, slots, draws, time.perf_counter() - began)


class _Passes:
    """The forward and backward passes over batches of texts."""

    def __init__(self, model: Model, quantised: Model, draws: int, seed: int) -> None:
        import torch

        from mtplab.models.probed import probed

        self.model, self.draws = model, draws
        self.target, self.draft, self.recorder = probed(model, quantised)
        self.generator = torch.Generator().manual_seed(seed)

    def over(self, texts: Sequence[Sequence[int]], skips: Sequence[int]) -> list[list[Table]]:
        """Batch by batch: the four tables of `Estimate`."""
        import torch

        from mtplab.study.text_batches import text_batches

        linears = [module.shape for module in self.model.plan.modules if module.kind == "linear"]
        # of a linear layer: its input, its output, that in FP8 and e; of the vocabulary: logits, p, z, what they leave
        row_bytes = 4 * (sum(k + 3 * n for n, k in linears) + 8 * self.model.config.vocab_size)
        with torch.inference_mode(False), torch.enable_grad():
            return [self._batch(batch) for batch in text_batches(self.model, texts, skips, row_bytes)]

    def _batch(self, batch: TextBatch) -> list[Table]:
        import torch

        self.recorder.owner = batch.owner
        hidden = batch.target(self.target)
        logits = self.target.logits(self.target.normed(hidden[batch.judged]))
        p = logits.detach().float().softmax(-1)
        target = self._squares(logits, p)
        if self.draft is None:
            return [target, {}, {}, {}]
        given = self.target.normed(hidden.detach())
        logits = self.target.logits(batch.draft(self.draft, given))
        shares, p = logits.float().softmax(-1), p[batch.before]
        q = shares.detach()
        logits.backward((q - p).to(logits.dtype), retain_graph=True)
        toward = self.recorder.take()
        torch.minimum(shares, p).sum().backward(retain_graph=True)
        accepted = self.recorder.take()
        # the vocabulary head is the target's, and what it costs in FP8 is the target's too
        mine = {name for packed in self.draft.linears() for name in packed.names}
        tables = [self._squares(logits, q), *({n: x.cpu().numpy() for n, x in t.items()} for t in (toward, accepted))]
        return [target, *({name: x for name, x in table.items() if name in mine} for table in tables)]

    def _squares(self, logits: torch.Tensor, p: torch.Tensor) -> Table:
        """Module → scores [draws, texts] of random vectors of covariance F(p) at every row of logits [m, v]."""
        import torch

        root = p.sqrt()
        found = []
        for _ in range(self.draws):
            signs = torch.randint(0, 2, p.shape, generator=self.generator, dtype=torch.int8).to(p.device)
            z = torch.where(signs.bool(), root, -root)
            z.addcmul_(p, z.sum(-1, keepdim=True), value=-1.0)
            logits.backward(z.to(logits.dtype), retain_graph=True)
            found.append(self.recorder.take())
        return {name: torch.stack([each[name] for each in found]).cpu().numpy() for name in found[0]}
