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

**Draft.** A draft is not at a minimum of its divergence D = KL(p‖q) from the target's p, so D changes to first order,
and to second by more than F: half of dᵀF(q)d is taken back by the curvature of what lies between (measured: LOG.md).
With the gradient g taken where every module of the head has half of its error, both orders are there,

    D(all) − D ≈ Σ_m ⟨g(½), e_m⟩      (the midpoint rule along a straight path, exact up to cubic terms),

and each term is its module's change of D plus half of what it has in common with the others, which is small unless
one of them is large. The same for the expected share of drafts accepted when they are drawn, Σ_v min(p_v, q_v). Two
backward passes, no chance. (The target's KL could be shared out so too: three times as fast as eight draws and as
sure, but one large error then hides all small ones; the scores of a module know nothing of other modules.) All at the
first draft, at the slots of the given texts. Acceptance of greedy drafts is a count of equal tokens and has no
derivative: by how much acceptance *length* changes is estimated nowhere here.

**Where it ends.** The expansion is local: `Estimate.local` says whether a change is small enough for it, and
`estimate_check` compares with what was measured, text by text. Knows nothing of how sets are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtplab.errors import ConfigError
from mtplab.study.exclusion_meter import Change, ExclusionMeter
from mtplab.study.interval import student
from mtplab.study.module_groups import ModuleGroup

if TYPE_CHECKING:
    import torch

    from mtplab.models import Model
    from mtplab.study.text_batches import TextBatch

__all__ = ["Estimate", "estimate_texts", "estimated"]

# nats per token: beyond it the second-order term of KL is no longer the whole of it
LOCAL = 0.2
_ENOUGH = 128  # texts times draws: an error of √(2 / 128)

Table = dict[str, np.ndarray]  # by module


@dataclass(frozen=True, eq=False)
class Estimate:
    """What passes over texts say of every module that FP8 treats otherwise, by its name on disk.

    `target` → scores [draws, texts] of random vectors; `draft` → [texts], the change of Σ KL(target ‖ first draft) in
    nats; `accepted` → [texts], of the expected number of first drafts accepted when they are drawn. float64 all.
    `judged` tokens and `slots` of first drafts are by text.
    """

    target: Table
    draft: Table
    accepted: Table
    judged: tuple[int, ...]
    slots: tuple[int, ...]
    draws: int
    seconds: float

    def of(self, group: ModuleGroup) -> Change:
        """A group's own: `kl` for one of the target, `draft_kl` for one of the draft."""
        return self.kl([group]) if group.part == "target" else self.draft_kl([group])

    def kl_by_text(self, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        """[texts] nats, summed over each text's tokens: KL of the target with these modules or groups in FP8, and no
        others. The draft's modules cost the target nothing."""
        scores = _summed(self.target, modules, (self.draws, len(self.judged)))
        return 0.5 * (scores**2).mean(0)

    def kl(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """KL(BF16 ‖ the target with these in FP8), nats per token, ± half a 95 % interval over texts and draws."""
        return Change.of(self.kl_by_text(modules), self.judged)

    def noise(self, modules: Iterable[ModuleGroup | str]) -> float | None:
        """Half a 95 % interval of what the random vectors alone leave open of `kl`, the texts given; None for one
        draw."""
        if self.draws < 2:
            return None
        totals = 0.5 * (_summed(self.target, modules, (self.draws, len(self.judged))) ** 2).sum(1)
        return student(self.draws - 1) * float(totals.std(ddof=1)) / self.draws**0.5 / sum(self.judged)

    def draft_kl_by_text(self, modules: Iterable[ModuleGroup | str]) -> np.ndarray:
        """[texts] nats, summed over slots: change of KL(target ‖ first draft) with these of the draft's in FP8."""
        return _summed(self.draft, modules, (len(self.slots),))

    def draft_kl(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """Change of KL(target ‖ first draft), nats per slot, ± half a 95 % interval over texts."""
        return Change.of(self.draft_kl_by_text(modules), self.slots)

    def draft_accepted(self, modules: Iterable[ModuleGroup | str]) -> Change:
        """Change of the share of first drafts that are accepted when they are drawn at temperature 1."""
        return Change.of(_summed(self.accepted, modules, (len(self.slots),)), self.slots)

    def local(self, group: ModuleGroup) -> bool:
        """Whether a group's estimate is small enough to be one."""
        return abs(self.of(group).value) <= LOCAL


def _summed(table: Table, modules: Iterable[ModuleGroup | str], shape: tuple[int, ...]) -> np.ndarray:
    names = [name for each in modules for name in ((each,) if isinstance(each, str) else each.modules)]
    return sum((table[name] for name in names if name in table), np.zeros(shape))


def estimated(meter: ExclusionMeter, draws: int | None = None, seed: int = 0) -> Estimate:
    """The estimate for a meter's modules over its own texts, on which it measures KL too.

    Args:
        draws: random vectors, a backward pass each; the target's estimates err by √(2 / (texts · draws)) of themselves.
            None: as many as make that an eighth, 4 to 32.
        seed: of those vectors.

    Raises ConfigError for a number of draws that is none.
    """
    quantised = meter.model.with_exclusions(sorted(meter.fixed) or "none", model_format="fp8")
    skips = [len(prompt) - 1 for prompt in meter.prompts]
    return estimate_texts(meter.model, quantised, meter.texts, skips, draws, seed)


def estimate_texts(
    model: Model,
    quantised: Model,
    texts: Sequence[Sequence[int]],
    skips: Sequence[int],
    draws: int | None = None,
    seed: int = 0,
) -> Estimate:
    """Scores of every module that `quantised` treats otherwise than `model`.

    Args:
        model, quantised: a model and the same with modules in FP8 (`with_exclusions`).
        texts: lists of ids; judged are the tokens after the first `skips[i]` + 1 of text i, two at least.
        draws, seed: as in `estimated`.
    """
    from mtplab.decode.threads import model_threads, on_device, running_with
    from mtplab.study.text_batches import check_texts

    if draws is None:
        draws = min(max(-(-_ENOUGH // max(1, len(texts))), 4), 32)
    if type(draws) is not int or draws < 1:
        raise ConfigError(f"draws is {draws!r:.60}; expected a whole number of at least 1")
    check_texts(model, texts, skips)
    began = time.perf_counter()
    with running_with(model_threads(model)), on_device(model.device):
        parts = _Passes(model, quantised, draws, seed).over(texts, skips)
    joined = [{name: np.concatenate([part[i][name] for part in parts], -1) for name in parts[0][i]} for i in range(3)]
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
        """Batch by batch: the three tables of `Estimate`."""
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
        self.recorder.owner = batch.owner[batch.judged]
        logits = self.target.logits(self.target.normed(hidden[batch.judged]))
        p = logits.detach().float().softmax(-1)
        target = self._squares(logits, p)
        del logits
        if self.draft is None:
            return [target, {}, {}]
        given, p = self.model.given(hidden.detach(), self.target), p[batch.before]
        self.recorder.owner = batch.owner
        with torch.no_grad():  # every e as it is in BF16
            batch.draft(self.draft, given)
        self.recorder.share = 0.5
        drafted = batch.draft(self.draft, given)
        # the vocabulary head is the target's, and so is what it costs in FP8
        self.recorder.share, self.recorder.owner = 0.0, batch.owner[batch.slots]
        q = self.draft.logits(drafted).float().softmax(-1)
        found = []
        for objective in (-(p * q.log()).sum(), torch.minimum(p, q).sum()):
            objective.backward(retain_graph=True)
            recorded = self.recorder.take()
            names = [name for packed in self.draft.linears() for name in packed.names if name in recorded]
            found.append({name: recorded[name].cpu().numpy() for name in names})
        return [target, *found]

    def _squares(self, logits: torch.Tensor, p: torch.Tensor) -> Table:
        """Module → scores [draws, texts] of random vectors of covariance F(p) at every row of logits [m, v]."""
        import torch

        found = []
        for _ in range(self.draws):
            signs = torch.randint(0, 2, p.shape, generator=self.generator, dtype=torch.int8).to(p.device)
            logits.backward(fisher_vector(p, signs.bool()).to(logits.dtype), retain_graph=True)
            found.append(self.recorder.take())
        return {name: torch.stack([each[name] for each in found]).cpu().numpy() for name in found[0]}


def fisher_vector(p: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """z = (diag(√p) − p √pᵀ) ξ of probabilities p [.., v] and signs ξ [.., v] bool (True is +1), the shape of p: where
    signs are random its covariance is diag(p) − p pᵀ."""
    import torch

    z = torch.where(signs, p.sqrt(), -p.sqrt())
    return z.addcmul_(p, z.sum(-1, keepdim=True), value=-1.0)
