"""What a variant of the target costs the target itself: KL, top-1 agreement and perplexity on the same text.

High acceptance over a broken target is a known trap: a head agrees easily with a target that repeats itself. So the
target is measured beside it, against the unquantised one. The text is what that one writes (sampled at temperature 1),
so that the mean KL over its positions estimates the divergence of whole texts; or any text that is given.

Knows nothing of drafts or rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.errors import ConfigError
from mtplab.study.interval import jackknife, without_one
from mtplab.study.prompts import calibration_ids
from mtplab.study.questions import edges_of

if TYPE_CHECKING:
    import threading

    import torch

    from mtplab.models import Model, ModelConfig
    from mtplab.quant.policy import QuantPolicy

__all__ = ["KEPT_BYTES", "Quality", "Reading", "logits_bytes", "own_texts", "quality", "read", "read_if_kept"]

# of a reference's logits that are worth keeping; past it the reference is read again for each variant
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Quality:
    """A target over texts, token by token; positions count from a text's first token.

    Flat over all predicted tokens: `text` and `position` say which, `nll` [n] float64 is the variant's negative
    log-probability of the token, in nats; `reference_nll` the reference's, `kl` the divergence KL(reference‖variant)
    of the distributions at that position in nats, and `agrees` whether both have the same likeliest token. The last
    three are None where there was no reference.
    """

    text: np.ndarray
    position: np.ndarray
    nll: np.ndarray
    reference_nll: np.ndarray | None = None
    kl: np.ndarray | None = None
    agrees: np.ndarray | None = None

    @property
    def perplexity(self) -> float:
        """exp of the variant's mean negative log-probability."""
        return float(np.exp(self.nll.mean()))

    @property
    def reference_perplexity(self) -> float | None:
        """The reference's on the same tokens."""
        return None if self.reference_nll is None else float(np.exp(self.reference_nll.mean()))

    @property
    def mean_kl(self) -> float | None:
        """Nats per token."""
        return None if self.kl is None else float(self.kl.mean())

    @property
    def top1_agreement(self) -> float | None:
        """Share of positions at which both have the same likeliest token."""
        return None if self.agrees is None else float(self.agrees.mean())

    def kl_interval(self) -> float | None:
        """Half a 95 % interval of `mean_kl` over texts (jackknife); None without a reference or with one text."""
        return self._kl_interval(np.ones(len(self.text), bool))

    def _kl_interval(self, inside: np.ndarray) -> float | None:
        """The same over the tokens `inside` [n], of the texts that have some."""
        if self.kl is None:
            return None
        sizes = np.bincount(self.text[inside])
        sums = np.bincount(self.text[inside], self.kl[inside])
        return jackknife(without_one(sums[sizes > 0], sizes[sizes > 0]))

    def by_context(self, edges: Sequence[int]) -> list[dict[str, Any]]:
        """Means within ranges of positions: from, to, tokens, kl, half its 95 % interval over texts, top1_agreement,
        perplexity (None without tokens)."""
        edges = edges_of(edges)
        found = []
        for low, high in itertools.pairwise(edges):
            inside = (self.position >= low) & (self.position < high)
            some = bool(inside.any())
            found.append(
                {
                    "from": int(low),
                    "to": int(high),
                    "tokens": int(inside.sum()),
                    "kl": float(self.kl[inside].mean()) if some and self.kl is not None else None,
                    "kl_half_interval": self._kl_interval(inside) if some else None,
                    "top1_agreement": float(self.agrees[inside].mean()) if some and self.agrees is not None else None,
                    "perplexity": float(np.exp(self.nll[inside].mean())) if some else None,
                }
            )
        return found


@dataclass(frozen=True, eq=False)
class Reading:
    """A model's logits over texts, kept: a reference that is read once for many variants."""

    texts: list[list[int]]
    parts: list[tuple[int, int, torch.Tensor]]  # as `read_texts` yields them
    config: ModelConfig


def read(
    model: Model, texts: Sequence[str | Sequence[int]], exact: bool = False, cancel: threading.Event | None = None
) -> Reading:
    """The logits of a model without a quantised cache, for `quality`'s reference, in `logits_bytes`.

    Raises ConfigError for texts that are none, and Cancelled once `cancel` is set.
    """
    from mtplab.decode.reading import read_texts
    from mtplab.decode.settings import token_ids
    from mtplab.quant.policy import resolve_policy

    ids = token_ids(model, texts, "texts", "text")
    for number, text in enumerate(ids):
        _check_length(number, text, model.config.max_position)
    parts = list(_until(cancel, read_texts(model, ids, resolve_policy("none"), exact)))
    return Reading(ids, parts, model.config)


def logits_bytes(model: Model, texts: Sequence[Sequence[int]]) -> int:
    """Bytes of what `read` keeps of texts as ids: float32 logits of every token."""
    return 4 * model.config.vocab_size * sum(map(len, texts))


def read_if_kept(model: Model, texts: Sequence[str | Sequence[int]], exact: bool = False) -> Reading | Model:
    """A reference for many variants: what `read` keeps of texts, or the model itself where that is too much."""
    from mtplab.decode import token_ids

    return read(model, texts, exact) if logits_bytes(model, token_ids(model, texts)) <= KEPT_BYTES else model


def own_texts(model: Model, prompts: Any, max_new_tokens: int = 128, seed: int = 0, **settings: Any) -> list[list[int]]:
    """Prompts continued by the model itself, drawn at temperature 1: texts that are typical of it, as ids. Its cache is
    unquantised meanwhile, whatever its default is.

    `settings` are those of `generate`. Raises what it raises.
    """
    from mtplab.decode import generate, token_ids

    ids = token_ids(model, prompts)
    plain = {"depth": 0, "temperature": 1.0, "ignore_eos": True, "quant_policy": "none"}
    run = generate(model, ids, seed=seed, max_new_tokens=max_new_tokens, **plain | settings)
    return [prompt + output for prompt, output in zip(ids, run.tokens, strict=True)]


def quality(
    model: Model,
    texts: Sequence[str | Sequence[int]],
    reference: Model | Reading | None = None,
    *,
    quant_policy: str | int | QuantPolicy | None = None,
    skip: Sequence[int] | int = 0,
    exact: bool = False,
    cancel: threading.Event | None = None,
    calibration: Any = None,
) -> Quality:
    """Read the texts with the model under a cache policy, and with the reference under none, and compare.

    Args:
        model, reference: as `mtplab.load_model` gives them, of one vocabulary; None compares with nothing. The
            reference may be what `read` kept of one over the same texts.
        texts: lists of token ids, or strings, which the model's tokenizer reads; of at least two tokens each, and of
            no more than either model has positions for.
        quant_policy: of the model's cache (its own default if None); the reference's cache is never quantised.
        skip: tokens at the beginning of each text that are read and not judged (a prompt), one number or one a text.
        exact: arithmetic whose rows do not depend on each other, where there is any.
        cancel: an event that ends it with Cancelled.
        calibration: texts that a calibrated policy takes its scales from, the bundled prompts if None.

    Raises ConfigError for texts that cannot be compared.
    """
    from mtplab.decode.calibration import bound
    from mtplab.decode.settings import token_ids
    from mtplab.quant.policy import resolve_policy

    ids = token_ids(model, texts, "texts", "text")
    skips = _skips(skip, len(ids))
    room = min(each.config.max_position for each in (model, reference) if each is not None)
    for number, (text, kept) in enumerate(zip(ids, skips, strict=True)):
        if len(text) < kept + 2:
            raise ConfigError(
                f"text {number} has {len(text)} tokens, of which {kept} are skipped; expected two or more after those"
            )
        _check_length(number, text, room)
    if reference is not None and reference.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the reference has a vocabulary of {reference.config.vocab_size}, the model of {model.config.vocab_size}; "
            "expected the same model in higher precision"
        )
    if isinstance(reference, Reading) and reference.texts != ids:
        raise ConfigError(f"the reference has read {len(reference.texts)} other texts; read these with it")
    policy = model.policy("target") if quant_policy is None else resolve_policy(quant_policy)
    policy = bound(model, policy, "target", calibration_ids([policy], model.encode, calibration))
    return _compare(model, ids, reference, policy, skips, exact, cancel)


def _skips(skip: Sequence[int] | int, count: int) -> list[int]:
    """How many tokens of each text are not judged. Raises ConfigError for what are no such numbers."""
    try:
        found = [operator.index(one) for one in ([skip] * count if isinstance(skip, int) else skip)]
    except TypeError:
        raise ConfigError(f"skip is {skip!r:.60}; expected a whole number, or one for each text") from None
    if len(found) != count or min(found, default=0) < 0:
        raise ConfigError(f"skip is {skip!r:.60}; expected a number from 0 on, or one for each of the {count} texts")
    return found


def _check_length(number: int, text: Sequence[int], room: int) -> None:
    if len(text) > room:
        raise ConfigError(
            f"text {number} has {len(text)} tokens; expected no more than max_position_embeddings, {room}. Cut it"
        )


def _until(cancel: threading.Event | None, parts: Iterable[Any]) -> Iterator[Any]:
    """The same parts, up to where somebody cancels. Raises Cancelled there."""
    from mtplab.decode import Cancelled

    for part in parts:
        if cancel is not None and cancel.is_set():
            raise Cancelled("cancelled between two texts")
        yield part


def _compare(
    model: Model,
    ids: list[list[int]],
    reference: Model | Reading | None,
    policy: QuantPolicy,
    skips: list[int],
    exact: bool,
    cancel: threading.Event | None,
) -> Quality:
    import torch

    from mtplab.decode.reading import read_texts
    from mtplab.decode.threads import model_threads, running_with
    from mtplab.quant.policy import resolve_policy

    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("text", "position", "nll", "ref", "kl", "agrees")}
    with running_with(model_threads(model)):
        other = None
        if isinstance(reference, Reading):
            other = iter(reference.parts)
        elif reference is not None:
            other = read_texts(reference, ids, resolve_policy("none"), exact)
        for index, start, logits in _until(cancel, read_texts(model, ids, policy, exact)):
            theirs = next(other)[2] if other is not None else None
            first = max(0, skips[index] - start)
            last = min(len(logits), len(ids[index]) - 1 - start)  # the last token predicts nothing that is there
            if last <= first:
                continue
            after = torch.tensor(ids[index][start + first + 1 : start + last + 1], device=logits.device)
            mine = logits[first:last].double().log_softmax(-1)
            columns["text"].append(np.full(last - first, index))
            columns["position"].append(np.arange(start + first + 1, start + last + 1))
            columns["nll"].append(-mine.gather(1, after[:, None])[:, 0].cpu().numpy())
            if theirs is not None:
                whole = theirs[first:last].to(mine.device).double().log_softmax(-1)
                columns["ref"].append(-whole.gather(1, after[:, None])[:, 0].cpu().numpy())
                columns["kl"].append((whole.exp() * (whole - mine)).sum(-1).clamp_min(0.0).cpu().numpy())
                columns["agrees"].append((whole.argmax(-1) == mine.argmax(-1)).cpu().numpy())
    joined = {name: np.concatenate(parts) if parts else None for name, parts in columns.items()}
    return Quality(joined["text"], joined["position"], joined["nll"], joined["ref"], joined["kl"], joined["agrees"])
