"""One point at one depth, through the real runner, from the point's trace or from an engine: settings in, a row out.

The only module of this room that knows what a runner's or an engine's result looks like. It does not know about
files, other points or who asked. At temperature 0 both ways give the same numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from mtplab.engines import Counts, Measured, Share
from mtplab.study import provenance
from mtplab.study.point import PointConfig, digest_of
from mtplab.study.row import DomainStats, ResultRow, conditional_of, counts_of

if TYPE_CHECKING:
    from mtplab.decode import AcceptanceStats
    from mtplab.study.acceptance import Acceptance

__all__ = ["Labels", "error_row", "produce", "served_row", "traced_row", "weight_facts"]


@dataclass(frozen=True)
class Labels:
    """How the user named a point; no part of its hash."""

    checkpoint: str
    exclude_label: str
    exclude: tuple[str, ...] | None
    draft_exclude: tuple[str, ...] | None
    prompt_set: str
    remark: str | None = None

    def fields(self) -> dict[str, Any]:
        """As the row's fields."""
        return {
            "checkpoint": self.checkpoint,
            "exclude_label": self.exclude_label,
            "exclude": None if self.exclude is None else list(self.exclude),
            "draft_exclude": None if self.draft_exclude is None else list(self.draft_exclude),
            "prompt_set": self.prompt_set,
            "remark": self.remark,
        }


def produce(
    model: Any,
    config: PointConfig,
    depth: int,
    labels: Labels,
    generate: Callable[..., Any],
    on_round: Callable[[Any], None] | None = None,
    cancel: Any = None,
) -> ResultRow:
    """Runs the point's prompts in the runner's batches, and counts. Errors of the runner pass through."""
    generation = generate(
        model,
        [list(ids) for ids in config.prompts],
        depth=depth,
        **config.run_arguments(),
        on_round=on_round,
        cancel=cancel,
    )
    stats = reduce(operator.add, generation.per_prompt)
    return ResultRow(
        **_settings(config, depth, labels),
        **counts_of(stats),
        conditional=stats.conditional,
        by_domain=_by_domain(config.domains, generation.per_prompt),
        **_bytes(model, config, (generation.memory or {}).get("state_bytes")),
        # prefill is the same work at every depth; what a depth changes is the rest
        seconds=generation.decode_seconds,
        tokens_per_second=generation.tokens_per_second,
        output_hash=digest_of([list(tokens) for tokens in generation.tokens]),
        provenance=provenance.collect(str(getattr(model, "device", config.device)), config.settings())
        | {"threads": generation.settings["threads"]},
    )


def traced_row(acceptance: Acceptance, config: PointConfig, depth: int, labels: Labels) -> ResultRow:
    """The row of a depth from the point's trace. A trace decodes once for all depths, so a depth has no seconds and no
    tokens per second of its own: both are None; what the trace took stands in the provenance."""
    trace = acceptance.trace
    per_prompt = acceptance.per_prompt(depth)
    stats = reduce(operator.add, per_prompt)
    model = trace.settings["model"]
    about = {"max_depth": trace.max_depth, "seconds": trace.seconds, "target_reused": trace.settings["target_reused"]}
    return ResultRow(
        **_settings(config, depth, labels),
        **counts_of(stats),
        conditional=stats.conditional,
        by_domain=_by_domain(config.domains, per_prompt),
        **model["bytes"],
        output_hash=trace.output_hash,
        provenance=provenance.collect(model["device"], config.settings())
        | {"threads": trace.settings["threads"], "trace": about},
    )


def served_row(found: Measured, config: PointConfig, depth: int, labels: Labels) -> ResultRow:
    """The row of a depth from what a serving engine gave. What it does not export is None."""
    counts = reduce(operator.add, (share.counts for share in found.shares))
    per_position = _shares_of(counts, depth)
    outputs = found.outputs
    facts = provenance.collect(f"{found.engine}'s own", config.settings())
    return ResultRow(
        **_settings(config, depth, labels),
        caveat=" · ".join(found.remarks) or None,
        tokens=counts.tokens,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        acceptance_length=counts.tokens / counts.rounds if counts.rounds else None,
        per_position=per_position,
        conditional=conditional_of(per_position),
        by_domain=_served_domains(found.shares, config.domains, depth),
        seconds=found.seconds,
        tokens_per_second=counts.tokens / found.seconds if found.seconds > 0 else None,
        output_hash=None if outputs is None else digest_of([list(ids) for ids in outputs]),
        provenance=facts | {"threads": None, "engine": {"version": found.version, **found.facts}},
    )


def _shares_of(counts: Counts, depth: int) -> list[float | None]:
    """Unconditional shares; all None where there are no rounds or positions are not counted."""
    if not counts.rounds or counts.per_position is None:
        return [None] * depth
    return [count / counts.rounds for count in counts.per_position]


def _served_domains(shares: Sequence[Share], domains: Sequence[str], depth: int) -> dict[str, DomainStats]:
    """By domain, prompt by prompt where each was counted by itself; nothing where the engine does not count."""
    if any(None in (x.counts.rounds, x.counts.drafted, x.counts.accepted) for x in shares):
        return {}
    groups: dict[str, list[Share]] = {}
    for share in shares:
        groups.setdefault(domains[share.prompts[0]], []).append(share)
    found = {}
    for domain, parts in groups.items():
        counts, alone = [part.counts for part in parts], all(len(part.prompts) == 1 for part in parts)
        total = reduce(operator.add, counts)
        found[domain] = DomainStats(
            tokens=total.tokens,
            rounds=total.rounds,
            drafted=total.drafted,
            accepted=total.accepted,
            acceptance_length=total.tokens / total.rounds if total.rounds else None,
            per_position=_shares_of(total, depth),
            prompt_rounds=[each.rounds for each in counts] if alone else [],
            prompt_tokens=[each.tokens for each in counts] if alone else [],
            prompt_accepted=[each.accepted for each in counts] if alone else [],
        )
    return found


def weight_facts(model: Any, config: PointConfig) -> dict[str, Any]:
    """What a row says of the model that a trace was made with, JSON-ready: its bytes and its device."""
    return {"bytes": _bytes(model, config, model.state_bytes()), "device": str(model.device)}


def error_row(config: PointConfig, depth: int, labels: Labels, error: str) -> ResultRow:
    """A row that says why there are no numbers."""
    return ResultRow(
        **_settings(config, depth, labels),
        error=error,
        provenance=provenance.collect(config.device, config.settings()),
    )


def _settings(config: PointConfig, depth: int, labels: Labels) -> dict[str, Any]:
    return {
        "point": config.hash(),
        "method": config.method,
        "engine": None if config.engine is None else config.engine.name,
        "depth": depth,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "seed": config.seed,
        "quant_policy": config.quant_policy,
        "draft_quant_policy": config.draft_quant_policy,
        "model_format": config.model_format,
        "n_prompts": len(config.prompts),
        "max_new_tokens": config.max_new_tokens,
        **labels.fields(),
    }


def _by_domain(domains: Sequence[str], per_prompt: Sequence[AcceptanceStats]) -> dict[str, DomainStats]:
    groups: dict[str, list[AcceptanceStats]] = {}
    for domain, stats in zip(domains, per_prompt, strict=True):
        groups.setdefault(domain, []).append(stats)
    return {domain: DomainStats.of(parts) for domain, parts in groups.items()}


def _bytes(model: Any, config: PointConfig, state_bytes: int | None) -> dict[str, Any]:
    draft = model.plan.loaded_nbytes("draft")
    return {
        "target_weight_bytes": model.plan.loaded_nbytes() - draft,
        "draft_weight_bytes": draft,
        "kv_bytes_per_token": model.kv_bytes_per_token(config.quant_policy, "target"),
        "draft_kv_bytes_per_token": model.kv_bytes_per_token(config.draft_quant_policy, "draft"),
        "state_bytes": state_bytes,
    }
