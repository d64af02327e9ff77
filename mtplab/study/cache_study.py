"""What a cache policy costs: bytes, acceptance and the target's own quality, by depth and by position in the context.

Each target policy is decoded once and read over the same texts once; each draft policy beside it is one more trace of
the same output, so that the draft's cache is told apart from the target's. Everything after that is arithmetic on what
was kept. Uses `quality.py` and `trace.py`; measures nothing itself, and knows nothing of figures.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mtplab.errors import ConfigError
from mtplab.study.prompts import calibration_ids, load_prompts
from mtplab.study.quality import Quality, own_texts, quality, read_if_kept
from mtplab.study.questions import traced_depth

if TYPE_CHECKING:
    from mtplab.models import Model
    from mtplab.study.acceptance import Acceptance
    from mtplab.study.trace import Trace

__all__ = ["CacheLine", "CacheStudy", "compare_caches", "context_edges"]


@dataclass(frozen=True, eq=False)
class CacheLine:
    """One pair of policies: `policy` of the target's cache, `draft_policy` of the draft's; bytes that a token adds to
    each, all layers together; the trace, and the target's quality against an unquantised cache."""

    policy: str
    draft_policy: str
    nbytes: int
    draft_nbytes: int
    trace: Trace
    quality: Quality

    @cached_property
    def acceptance(self) -> Acceptance:
        """Acceptance by depth, position and context."""
        return self.trace.acceptance()


@dataclass(frozen=True, eq=False)
class CacheStudy:
    """Lines by (policy, draft's policy), in the order they were asked for."""

    lines: dict[tuple[str, str], CacheLine]

    @property
    def policies(self) -> list[str]:
        """The target's policies."""
        return list(dict.fromkeys(policy for policy, _ in self.lines))

    @property
    def draft_policies(self) -> list[str]:
        """The draft's policies."""
        return list(dict.fromkeys(draft for _, draft in self.lines))

    @property
    def max_depth(self) -> int:
        """The largest depth that can be asked for."""
        return min(line.trace.max_depth for line in self.lines.values())

    def line(self, policy: str, draft_policy: str | None = None) -> CacheLine:
        """A pair's line; the draft's policy None is the target's, without layers kept. Raises ConfigError for a pair
        that was not measured."""
        from mtplab.quant.policy import resolve_policy

        target = resolve_policy(policy)
        draft = target.everywhere if draft_policy is None else resolve_policy(draft_policy)
        if (target.name, draft.name) not in self.lines:
            known = ", ".join(f"{one} (draft {other})" for one, other in self.lines)
            raise ConfigError(f"{target.name} (draft {draft.name}) was not measured; there is {known}")
        return self.lines[target.name, draft.name]

    @property
    def alike(self) -> list[CacheLine]:
        """The lines whose draft has its target's policy."""
        from mtplab.quant.policy import resolve_policy

        own = ((name, resolve_policy(name).everywhere.name) for name in self.policies)
        return [self.lines[pair] for pair in own if pair in self.lines]

    @property
    def longest(self) -> int:
        """One more than the largest position that anything was measured at."""
        lines = self.lines.values()
        traced = max(int((line.trace.prompt_lengths + line.trace.output_lengths).max()) for line in lines)
        return max(traced, max(int(line.quality.position.max()) for line in lines)) + 1

    def change(self, line: CacheLine, depth: int, of_draft: bool = False) -> tuple[float, float | None] | None:
        """(change of acceptance length, half its 95 % interval, prompt by prompt) from both caches unquantised, or,
        with `of_draft`, from the same target with an unquantised draft's cache, which drafts for the same text; None
        where that pair was not measured or nothing was drafted."""
        base = self.lines.get((line.policy if of_draft else "none", "none"))
        return None if base is None else line.acceptance.change(base.acceptance, depth)

    def to_records(self, depth: int) -> list[dict[str, Any]]:
        """One dictionary a line at a depth: policies, bytes, acceptance length with its interval and its change from
        both caches unquantised, KL with its interval, top-1 agreement and perplexity."""
        found = []
        for line in self.lines.values():
            change = self.change(line, depth)
            found.append(
                {
                    "policy": line.policy,
                    "draft_policy": line.draft_policy,
                    "bytes": line.nbytes,
                    "draft_bytes": line.draft_nbytes,
                    "depth": depth,
                    "acceptance_length": line.acceptance.length(depth),
                    "half_interval": line.acceptance.half_interval(depth),
                    "change": None if change is None else change[0],
                    "change_half_interval": None if change is None else change[1],
                    "kl": line.quality.mean_kl,
                    "kl_half_interval": line.quality.kl_interval(),
                    "top1_agreement": line.quality.top1_agreement,
                    "perplexity": line.quality.perplexity,
                }
            )
        return found

    def by_context(self, line: CacheLine, depth: int, edges: Sequence[int]) -> list[dict[str, Any]]:
        """What a line gives in each range of positions: `Quality.by_context`'s record, and the acceptance length of
        rounds that begin there with its half interval (None where there are none)."""
        lengths = line.acceptance.by_context(depth, edges)
        halves = line.acceptance.context_intervals(depth, edges)
        return [
            record | {"acceptance_length": length, "half_interval": half}
            for record, (_, _, length), half in zip(line.quality.by_context(edges), lengths, halves, strict=True)
        ]

    def __repr__(self) -> str:
        pairs = f"{len(self.policies)} target policies, {len(self.lines)} pairs"
        return f"<CacheStudy: {pairs}, depths to {self.max_depth}>"


def context_edges(longest: int, first: int = 64) -> list[int]:
    """Ranges of positions that double: 0, 64, 128, 256, … until `longest` lies inside."""
    edges = [0, first]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


def compare_caches(
    model: Model,
    prompts: Any = None,
    policies: Sequence[str | int] | None = None,
    draft_policies: Sequence[str | int] = (),
    max_depth: int = 4,
    max_new_tokens: int = 64,
    *,
    texts: Sequence[str | Sequence[int]] | None = None,
    text_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    calibration: Any = None,
    on_step: Callable[[int, int, str], None] | None = None,
    cancel: threading.Event | None = None,
) -> CacheStudy:
    """Measure cache policies of a model's target, each with a draft that follows it and with each of `draft_policies`.

    Args:
        prompts: as `mtplab.sweep` takes them; None is the bundled ones.
        policies, draft_policies: texts or numbers of `quant_policy`. None of the first is none, int8, int4, fp8_e4m3
            and turboquant, as far as this model's caches can be kept so.
        max_depth, max_new_tokens, temperature, seed: of the traces (`mtplab.trace`).
        texts: what quality is read on; None lets the model continue the prompts by `text_tokens` tokens, drawn at
            temperature 1 with an unquantised cache. The prompts themselves are then read and not judged.
        calibration: texts that calibrated policies take their scales from, as prompts are given; None is the bundled
            prompts, whatever `prompts` is.
        on_step: called with (steps done, steps in all, what comes next); cancel: an event that ends it.

    Raises ConfigError as `mtplab.trace` and `quality` do, Cancelled where `cancel` was set.
    """
    from mtplab.decode import Cancelled
    from mtplab.models.cache_fit import check_cache, fitting
    from mtplab.quant.policy import resolve_policy

    if model.draft is None:
        raise ConfigError(f"{model.checkpoint.path} has no MTP head: there is no acceptance to compare; use quality()")
    max_depth = traced_depth(max_depth)
    if policies is None:
        policies = fitting(model.config, ("none", "int8", "int4", "fp8_e4m3", "turboquant"))
    # a text is one policy, and not the letters of it
    policies, draft_policies = ([one] if isinstance(one, str) else one for one in (policies, draft_policies))
    if not policies:
        raise ConfigError("policies is empty; give at least one, such as 'int8'")
    targets = list(dict.fromkeys(resolve_policy(policy).name for policy in policies))
    extra = [resolve_policy(policy).name for policy in draft_policies]
    drafts = {name: list(dict.fromkeys([resolve_policy(name).everywhere.name, *extra])) for name in targets}
    for part, names in (("target", [targets]), ("draft", drafts.values())):
        for name in dict.fromkeys(itertools.chain(*names)):
            check_cache(model.checkpoint, model.config, resolve_policy(name), part)
    ids = calibration_ids([*targets, *extra], model.encode, calibration)
    chosen = load_prompts(prompts)
    given = [list(one) for one in chosen.encoded(model.encode)]
    total, done = 2 * len(targets) + sum(map(len, drafts.values())) + 1, 0

    def step(what: str) -> None:
        nonlocal done
        if cancel is not None and cancel.is_set():
            raise Cancelled(f"cancelled before {what}")
        if on_step is not None:
            on_step(done, total, what)
        done += 1

    step("texts")
    skip: Sequence[int] | int = 0
    if texts is None:
        skip = [len(one) - 1 for one in given]
        texts = own_texts(model, given, text_tokens, seed)
    reference = read_if_kept(model, texts)
    lines: dict[tuple[str, str], CacheLine] = {}
    for name in targets:
        step(f"{name}: quality")
        found = quality(model, texts, reference, quant_policy=name, skip=skip, calibration=ids)
        step(f"{name}: decoding")
        settings = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens, "calibration": ids}
        traces = _traces(model, given, chosen, name, drafts[name], max_depth, settings, step, cancel)
        for draft, traced in traces.items():
            bytes_of = model.kv_bytes_per_token(name), model.kv_bytes_per_token(draft, "draft")
            lines[name, draft] = CacheLine(name, draft, *bytes_of, traced, found)
    if on_step is not None:
        on_step(total, total, "")
    return CacheStudy(lines)


def _traces(model, ids, chosen, policy, drafts, max_depth, settings, step, cancel) -> dict[str, Trace]:
    """A trace for each of the draft's policies, all of the one output that the target's policy gives."""
    from mtplab.decode.settings import resolve_run
    from mtplab.study.trace import decoded, traced

    names = tuple(prompt.domain for prompt in chosen.prompts)
    found, output, seconds = {}, None, None
    for draft in drafts:
        policies = {"quant_policy": policy, "draft_quant_policy": draft}
        asked = resolve_run(model, ids, max_depth, **settings, **policies, cancel=cancel)
        if output is None:
            output, seconds = decoded(model, asked, cancel=cancel)
        step(f"{policy}: draft {draft}")
        found[draft] = traced(model, asked, names, output, seconds, cancel)
        seconds = None
    return found
