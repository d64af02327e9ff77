"""What FP8 does to the arithmetic of layers, module by module: of a whole model, or of a slice that a laptop can hold.

Two models with the same layers read the same texts: one quantised, one not. Every linear module of the second gets the
input that it has there, and its counterpart gets the same; every layer likewise. So errors are each one's own, and only
`hidden` says what comes of all of them so far. Knows nothing of drafting or acceptance: a slice has none to measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.checkpoint.text_table import printable
from mtplab.decode.threads import model_threads, on_device, running_with
from mtplab.errors import ConfigError
from mtplab.models import Model
from mtplab.models.variant import exchanged
from mtplab.quant.headwise import HeadwiseLinear
from mtplab.quant.linear import PackedLinear
from mtplab.quant.policy import resolve_policy
from mtplab.study.number_table import number_lines, number_table
from mtplab.study.text_batches import TextBatch, check_texts, text_batches
from mtplab.study.words import ranges

if TYPE_CHECKING:
    from mtplab.models.spec import MixtureSpec
    from mtplab.quant.experts import Experts

__all__ = ["LayerError", "ModuleError", "Numerics", "compare_layers"]


@dataclass(frozen=True)
class ModuleError:
    """One linear module, or a layer's experts together: ‖y_fp8 − y‖ / ‖y‖ over all rows, for the same inputs."""

    name: str
    part: str  # target or draft
    error: float


@dataclass(frozen=True)
class LayerError:
    """One decoder layer. `added`: ‖Δ‖ / ‖what the layer adds‖ for the same input, of a head's module ‖Δ‖ / ‖output‖;
    `hidden`: ‖Δ‖ / ‖hidden state‖ after it, with every layer before it quantised too, None for the head's."""

    name: str
    part: str
    added: float
    hidden: float | None


@dataclass(frozen=True)
class Numerics:
    """What `compare_layers` found. `about` says in sentences what was and was not read: it belongs to every number."""

    layers: tuple[LayerError, ...]
    modules: tuple[ModuleError, ...]  # those that FP8 treats otherwise
    tokens: int
    draft_kl: float | None  # of the head's distributions, in nats; None where there is no head
    about: tuple[str, ...]

    def worst(self, count: int = 12) -> list[ModuleError]:
        """The modules with the largest errors, largest first."""
        return sorted(self.modules, key=lambda module: -module.error)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "layers": [vars(each) for each in self.layers],
            "modules": [vars(each) for each in self.modules],
            "tokens": self.tokens,
            "draft_kl_nats": self.draft_kl,
            "about": list(self.about),
        }

    def _tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]], str]]:
        layers = [(each.name, _percent(each.added), _percent(each.hidden)) for each in self.layers]
        modules = [(each.name, _percent(each.error)) for each in self.worst()]
        head = ("layer", "error of what it adds (%)", "of the hidden state so far (%)")
        return [
            (head, layers, "Error by layer"),
            (("module", "error of its output (%)"), modules, f"Largest of {len(self.modules)} modules in FP8"),
        ]

    def __str__(self) -> str:
        parts = ["\n".join([name, *number_lines(head, lines, 1, rule=True)]) for head, lines, name in self._tables()]
        return "\n\n".join([*parts, "\n".join(self._sentences())])

    def _repr_html_(self) -> str:
        from html import escape

        tables = "".join(
            f"<p>{escape(name)}</p>{number_table(head, lines, name, 1)}" for head, lines, name in self._tables()
        )
        return f'<div class="mtplab-numerics">{tables}<p>{"<br>".join(map(escape, self._sentences()))}</p></div>'

    def _sentences(self) -> list[str]:
        found = [f"{self.tokens} tokens read."]
        if self.draft_kl is not None:
            found.append(f"The head's distributions move by a KL of {self.draft_kl:.5f} nats for the same input.")
        return found + [printable(each, 400) for each in self.about]


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3f}"


@dataclass
class _Sums:
    """Σ‖Δ‖² and Σ‖y‖² by name."""

    by_name: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, plain: Tensor, quantised: Tensor) -> None:
        """Of one pass."""
        error, size = self.by_name.get(name, (0.0, 0.0))
        plain, quantised = plain.double(), quantised.double()
        self.by_name[name] = error + float((quantised - plain).square().sum()), size + float(plain.square().sum())

    def relative(self, name: str) -> float:
        """√(Σ‖Δ‖² / Σ‖y‖²); 0 where nothing was there to be wrong."""
        error, size = self.by_name[name]
        return (error / size) ** 0.5 if size else 0.0


class _Both(PackedLinear):
    """A packed layer that notes what its counterpart makes of the same input."""

    def __init__(self, plain: PackedLinear, quantised: PackedLinear, sums: _Sums):
        self.names, self._plain, self._quantised, self._sums = plain.names, plain, quantised, sums

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [m, k] → one tensor [m, n_i] per member."""
        found = self._plain(x)
        for name, mine, its in zip(self.names, found, self._quantised(x), strict=True):
            self._sums.add(name, mine, its)
        return found

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [m, n] + the only member's product."""
        return residual + self(x)[0]

    def weights(self) -> list[Tensor]:
        """The plain ones."""
        return self._plain.weights()


class _BothHeadwise(HeadwiseLinear):
    """Likewise, of one that is multiplied head by head: what both of its halves make."""

    def __init__(self, plain: HeadwiseLinear, quantised: HeadwiseLinear, sums: _Sums):
        self.names, self._plain, self._quantised, self._sums = plain.names, plain, quantised, sums

    def through_keys(self, q: Tensor) -> Tensor:
        """q [m, h, dk] → [m, h, r]."""
        return self._noted(self._plain.through_keys(q), self._quantised.through_keys(q))

    def through_values(self, mixed: Tensor) -> Tensor:
        """mixed [m, h, r] → [m, h, dv]."""
        return self._noted(self._plain.through_values(mixed), self._quantised.through_values(mixed))

    def _noted(self, mine: Tensor, its: Tensor) -> Tensor:
        self._sums.add(self.names[0], mine, its)
        return mine


class _BothExperts:
    """Likewise, a layer's experts together, under one name."""

    def __init__(self, name: str, plain: Experts, quantised: Experts, sums: _Sums):
        self._name, self._plain, self._quantised, self._sums = name, plain, quantised, sums
        self.linears = plain.linears

    def __call__(self, x: Tensor, routing: Any) -> Tensor:
        """x [m, hidden] → [t, hidden], as `Experts` does."""
        found = self._plain(x, routing)
        self._sums.add(self._name, found, self._quantised(x, routing))
        return found


def compare_layers(
    plain: Model, quantised: Model, texts: Sequence[Sequence[int]], about: Sequence[str] = ()
) -> Numerics:
    """Errors of `quantised` against `plain`, layer by layer and module by module, over texts (lists of ids).

    Args:
        plain, quantised: the same layers, of one model or of two files (`load_model(path, layers="0-3")` and its
            `with_exclusions`).
        about: what else is to be said beside the numbers, of how the two were made.

    Raises ConfigError for models that are not of the same sizes, and for a text of less than three tokens or of ids
    that are not the models'.
    """
    _check_alike(plain, quantised)
    skips = [0] * len(texts)
    check_texts(plain, texts, skips)
    run = _Run(plain, quantised)
    row_bytes = 4 * (4 * plain.config.vocab_size + 64 * plain.config.hidden_size)
    with torch.inference_mode(), running_with(model_threads(plain)), on_device(plain.device):
        for batch in text_batches(plain, texts, skips, row_bytes):
            run.read(batch)
    return run.found(sum(map(len, texts)), about)


class _Run:
    """Both models over batches of texts, and the sums of what differs."""

    def __init__(self, plain: Model, quantised: Model):
        self.plain, self.quantised = plain, quantised
        self.modules, self.layers = _Sums(), _Sums()
        self.kl = self.slots = 0.0
        pairs = {id(mine): its for mine, its in zip(_walked(plain), _walked(quantised), strict=True)}
        heads = zip(_own_heads(plain), _own_heads(quantised), strict=True)
        pairs |= {id(mine): its for mine, its in heads if mine is not None and its is not None}
        self.members: dict[str, list[str]] = {}  # of experts that are measured together, as the plan names them

        def both(packed: PackedLinear) -> PackedLinear:
            if id(packed) not in pairs:
                return packed
            kind = _BothHeadwise if isinstance(packed, HeadwiseLinear) else _Both
            return kind(packed, pairs[id(packed)], self.modules)

        def both_experts(experts: Experts, spec: MixtureSpec) -> _BothExperts:
            its = pairs[id(experts)]
            name = spec.names.experts_of(experts.names[0])
            self.members[name] = its.names
            return _BothExperts(name, experts, its, self.modules)

        self.target, self.draft = exchanged(plain, both, both_experts)

    def read(self, batch: TextBatch) -> None:
        """One batch."""
        run, embedding = batch.run, self.plain.target.embedding
        x = run.gather(F.embedding(batch.tokens, embedding))
        far = run.gather(F.embedding(batch.tokens, self.quantised.target.embedding))
        caches = [self.plain.target_caches(run.batch, batch.capacity, resolve_policy("none")) for _ in range(3)]
        rows = zip(self.plain.config.layers, self.target.layers, self.quantised.target.layers, *caches, strict=True)
        for spec, mine, its, *kept in rows:
            same, far, y = its(x, run, kept[0]), its(far, run, kept[1]), mine(x, run, kept[2])
            self.layers.add(f"layer {spec.number} added", (y - x)[: run.rows], (same - x)[: run.rows])
            self.layers.add(f"layer {spec.number}", y[: run.rows], far[: run.rows])
            x = y
        self._read_vocabulary(self.target.head, self.target.normed(x[: run.rows]))
        if self.draft is not None:
            self._read_head(batch, self.plain.given(x))

    def _read_vocabulary(self, head: PackedLinear | None, normed: Tensor) -> None:
        """A vocabulary head, which is multiplied only where it is in FP8: it is large, and few files have it so."""
        parts = self.quantised.plan.by_name
        if isinstance(head, _Both) and any(parts[each].weight == "fp8" for each in head.names if each in parts):
            head(normed)

    def _read_head(self, batch: TextBatch, given: Tensor) -> None:
        """Every module of the head at every slot, all of them with the target's hidden state and the next token."""
        for step in range(self.plain.config.mtp_layers):
            mine, its = (self._head(each, batch, given, step) for each in (self.draft, self.quantised.draft))
            self.layers.add(f"head {step} added", mine, its)
            log_p, log_q = (
                each.logits(x, step).double().log_softmax(-1)
                for each, x in ((self.plain.draft, mine), (self.quantised.draft, its))
            )
            self.kl += float((log_p.exp() * (log_p - log_q)).sum())
            self.slots += len(log_p)
            self._read_vocabulary(self.draft.modules[step].head, mine)

    def _head(self, head: Any, batch: TextBatch, given: Tensor, step: int) -> Tensor:
        """Hidden states after the module's norm, at the slots that a token follows."""
        caches = self.plain.draft_caches(step + 1, batch.run.batch, batch.capacity, resolve_policy("none"))
        embedded = head.embed(batch.following, batch.run.positions.flatten()[batch.run.places], step)
        return head.normed(head(embedded, given, batch.run, caches[-1], step)[batch.slots], step)

    def found(self, tokens: int, about: Sequence[str]) -> Numerics:
        """What all batches gave."""
        c, sums = self.plain.config, self.layers
        layers = [
            LayerError(f"layer {i}", "target", sums.relative(f"layer {i} added"), sums.relative(f"layer {i}"))
            for i in (spec.number for spec in c.layers)
        ]
        heads = (f"head {i}" for i in range(c.mtp_layers))
        layers += [LayerError(name, "draft", sums.relative(f"{name} added"), None) for name in heads]
        parts = self.quantised.plan.by_name
        modules = []
        for name in self.modules.by_name:
            decided = [parts[each] for each in self.members.get(name, [name]) if each in parts]
            if any(each.weight == "fp8" for each in decided):
                part = "draft" if decided[0].part == "draft" else "target"
                modules.append(ModuleError(name, part, self.modules.relative(name)))
        kl = self.kl / self.slots if self.slots else None
        return Numerics(tuple(layers), tuple(modules), tokens, kl, (*about, *_about(self.plain)))


def _check_alike(plain: Model, quantised: Model) -> None:
    """Raises ConfigError where numbers of the one would not be about the other."""
    a, b = plain.config, quantised.config
    if a.layers != b.layers or a.draft_layers != b.draft_layers:
        raise ConfigError(
            f"{plain.checkpoint.path} and {quantised.checkpoint.path} have other layers here; expected the same "
            "ones of one model, before and after it was quantised"
        )
    for key in ("family", "vocab_size", "hidden_size", "num_layers", "rms_norm_eps"):
        if getattr(a, key) != getattr(b, key):
            raise ConfigError(
                f"{plain.checkpoint.path} and {quantised.checkpoint.path} have {key} {getattr(a, key)} and "
                f"{getattr(b, key)}; expected one model, before and after it was quantised"
            )


def _own_heads(model: Model) -> list[PackedLinear | None]:
    return [] if model.draft is None else [each.head for each in model.draft.modules]


def _walked(model: Model) -> list[Any]:
    """Packed layers and experts that two files of one model both have, in one order: whether a head has an output
    matrix of its own is each file's, for one that holds the target's has none."""
    found = []

    def note(each: Any, *_: Any) -> Any:
        found.append(each)
        return each

    draft = model.draft and replace(model.draft, modules=[replace(each, head=None) for each in model.draft.modules])
    exchanged(replace(model, draft=draft), note, note)
    return found


def _about(model: Model) -> list[str]:
    c, said = model.config, []
    if c.mtp_layers > 1:
        said.append("Every module of the head reads what the first one does: the target's hidden state and next token.")
    if not c.sliced:
        return said
    numbers = [layer.number for layer in c.layers]
    said += [f"A slice: {len(numbers)} of the target's {c.num_layers} layers ({', '.join(ranges(numbers))})."]
    if numbers[0]:
        said.append(
            f"Layer {numbers[0]} reads embeddings in place of what layer {numbers[0] - 1} gives: its inputs are not "
            "the model's."
        )
    if any(b - a > 1 for a, b in pairwise(numbers)):
        said.append("Layers behind a gap read what the layer before the gap gives.")
    if model.draft is not None and numbers[-1] != c.num_layers - 1:
        last = numbers[-1]
        said.append(f"The head reads hidden states after layer {last}, not those after layer {c.num_layers - 1}.")
    said.append("No acceptance and no output can be measured on a slice.")
    return said
