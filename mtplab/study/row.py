"""The result row: one per point and depth, the same whoever produced it (a run or a trace).

This module does not run anything and does not know how rows are kept on disk. A row is frozen, strict and
versioned; writing it as JSON and reading that back gives an equal row, floats to the last bit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.decode import AcceptanceStats

__all__ = ["QUALITY_FIELDS", "ROW_SCHEMA", "DomainStats", "ResultRow", "conditional_of", "counts_of"]

# 2 brought the target's quality, 3 rows of serving engines; older rows are read as they are
ROW_SCHEMA = 3

QUALITY_FIELDS = (
    "kl",
    "kl_error",
    "top1_agreement",
    "perplexity",
    "reference_perplexity",
    "quality_text",
    "quality_note",
)

# an expectation (trace above temperature 0) is a float, a count is an int: both stay what they are
Count = Annotated[int | float, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class DomainStats(_Frozen):
    """Acceptance over the prompts of one domain; fields as in `ResultRow`.

    `prompt_rounds`, `prompt_tokens` and `prompt_accepted` hold one count per prompt, in the order they were given:
    what an interval over prompts needs. Empty in rows written before there were any.
    """

    tokens: Count
    rounds: Count
    drafted: Count
    accepted: Count
    acceptance_length: float | None
    per_position: list[Share | None]
    prompt_rounds: list[Count] = Field(default_factory=list)
    prompt_tokens: list[Count] = Field(default_factory=list)
    prompt_accepted: list[Count] = Field(default_factory=list)

    @classmethod
    def of(cls, per_prompt: Sequence[AcceptanceStats]) -> DomainStats:
        """The counts of these prompts, at least one, all at one depth."""
        return cls(
            **counts_of(reduce(operator.add, per_prompt)),
            prompt_rounds=[stats.rounds for stats in per_prompt],
            prompt_tokens=[stats.emitted for stats in per_prompt],
            prompt_accepted=[stats.accepted for stats in per_prompt],
        )

    @model_validator(mode="after")
    def _consistent(self) -> DomainStats:
        _check_shares(self)
        prompts = len(self.prompt_rounds)
        for name, total in (("rounds", self.rounds), ("tokens", self.tokens), ("accepted", self.accepted)):
            each = getattr(self, f"prompt_{name}")
            if len(each) != prompts or (each and not math.isclose(sum(each), total, rel_tol=1e-9)):
                raise ValueError(f"prompt_{name} has {len(each)} counts, {sum(each)} in all; expected {total} {name}")
        return self


def conditional_of(per_position: Sequence[float | None]) -> list[float | None]:
    """Conditional shares from unconditional ones; None where no round got that far, or nothing is known."""
    pairs = zip(per_position, [1.0, *per_position], strict=False)  # each beside the one before it
    return [None if now is None or not last else now / last for now, last in pairs]


def counts_of(stats: AcceptanceStats) -> dict[str, Any]:
    """Counts, length and shares under the names a row and its domains have for them."""
    return {
        "tokens": stats.emitted,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "per_position": stats.per_position,
    }


class ResultRow(_Frozen):
    """What one point gave at one depth.

    Settings: `exclude` is what the user asked for (None: as stored), `exclude_label` its short name. Numbers:
    `tokens` are those emitted by rounds (the prompt's first token belongs to no round), so that
    `acceptance_length == tokens / rounds`; `per_position` (length = depth) is unconditional, `conditional`
    has None where no round got that far. Without rounds, lengths and shares are None. `target_weight_bytes`
    counts all that is not the draft's, embedding and head included, in the dtypes that the plan gives;
    `kv_bytes_per_token` is summed over layers, as deployed: a cache of `none` counts the checkpoint's dtype, though it
    is held in the dtype that is computed in. `state_bytes` is the recurrent and convolution state of one sequence.
    `seconds` is the wall time of the run without its prefill and `tokens_per_second` is `tokens / seconds`; a trace has
    every depth from one decoding, so both are None there. `output_hash` is the
    SHA-256 of the emitted ids: at temperature 0 it must not depend on the depth. `remark` is what a reader must know
    about the settings, `caveat` what the measurement must say of itself (other people's requests meanwhile). A
    row with an `error` carries no numbers.

    `engine` names the serving engine that gave the numbers (None: mtplab's own runner). Its settings are what it was
    started with, or is said to have been; what it does not export is None here, also where a row of ours always has a
    number, and it exports no bytes. Its `seconds` are of all requests, prefill and waiting included, some of them at
    once; its `drafted` and `accepted` are by its own definition (`mtplab/engines`), which may count a last round's
    drafts beyond the end of the text; `tokens` and so `acceptance_length` never do.

    The target's quality, which every row of one target shares: `kl` is KL(reference ‖ target) in nats per token, the
    mean over the tokens of `quality_text`, `kl_error` half its 95 % interval over texts, `top1_agreement` the share of
    positions with the same likeliest token, `perplexity` the target's and `reference_perplexity` the reference's on the
    same tokens. The reference is the unquantised target with an unquantised cache. `quality_text` is `own:` (what the
    reference wrote at temperature 1 from the prompts) or `prompts:` and a digest of the tokens: numbers with
    different texts do not compare. `quality_note` says why something of it is missing; all are None where it was not
    asked for.
    """

    schema_version: Literal[1, 2, 3] = Field(ROW_SCHEMA, alias="schema")
    point: str
    method: Literal["run", "trace"]
    engine: str | None = None
    checkpoint: str
    depth: Annotated[int, Field(ge=0, le=16)]
    temperature: Annotated[float, Field(ge=0.0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0.0, le=1.0)]
    seed: int
    quant_policy: str
    draft_quant_policy: str
    exclude_label: str
    exclude: list[str] | None
    draft_exclude: list[str] | None
    model_format: str | None
    prompt_set: str
    n_prompts: Annotated[int, Field(ge=1)]
    max_new_tokens: Annotated[int, Field(ge=1)]

    tokens: Count | None = None
    rounds: Count | None = None
    drafted: Count | None = None
    accepted: Count | None = None
    acceptance_length: float | None = None
    per_position: list[Share | None] = Field(default_factory=list)
    conditional: list[Share | None] = Field(default_factory=list)
    by_domain: dict[str, DomainStats] = Field(default_factory=dict)

    target_weight_bytes: Count | None = None
    draft_weight_bytes: Count | None = None
    kv_bytes_per_token: Count | None = None
    draft_kv_bytes_per_token: Count | None = None
    state_bytes: Count | None = None
    seconds: Annotated[float, Field(ge=0.0)] | None = None
    tokens_per_second: Annotated[float, Field(ge=0.0)] | None = None
    kl: Annotated[float, Field(ge=0.0)] | None = None
    kl_error: Annotated[float, Field(ge=0.0)] | None = None
    top1_agreement: Share | None = None
    perplexity: Annotated[float, Field(gt=0.0)] | None = None
    reference_perplexity: Annotated[float, Field(gt=0.0)] | None = None
    quality_text: str | None = None
    quality_note: str | None = None
    output_hash: str | None = None
    remark: str | None = None
    caveat: str | None = None
    error: str | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    @model_validator(mode="after")
    def _consistent(self) -> ResultRow:
        if self.error is not None:
            return self
        missing = [n for n in ("tokens", "rounds", "drafted", "accepted") if getattr(self, n) is None]
        if missing and self.engine is None:
            raise ValueError(f"a row without an error needs {', '.join(missing)}")
        if len(self.per_position) != self.depth or len(self.conditional) != self.depth:
            raise ValueError(
                f"depth {self.depth} needs as many positions; per_position has {len(self.per_position)}, "
                f"conditional {len(self.conditional)}"
            )
        _check_shares(self)
        if self.engine is None and self.rounds and None in self.per_position:
            raise ValueError(f"per_position is {self.per_position}, but there are {self.rounds} rounds")
        return self

    def to_json(self) -> str:
        """One line of JSON; `ResultRow.from_json` gives the same row back."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ResultRow:
        """Raises `ConfigError` when the text is not a row of this schema."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "row"
            raise ConfigError(
                f"not a result row of schema {ROW_SCHEMA}: {where}: {first['msg']} "
                f"({problem.error_count()} problem(s) in all)"
            ) from None

    def with_quality(self, fields: dict[str, Any], about: dict[str, Any]) -> ResultRow:
        """The same result beside this quality of its target (`TargetQuality.row_fields` and `.about`)."""
        changed = {"schema_version": ROW_SCHEMA, "provenance": {**self.provenance, "quality": about}}
        return self.model_copy(update=fields | changed)

    def without_quality(self) -> ResultRow:
        """The same result, silent on the target's quality."""
        rest = {key: value for key, value in self.provenance.items() if key != "quality"}
        return self.model_copy(update=dict.fromkeys(QUALITY_FIELDS) | {"provenance": rest})

    def relabelled(self, **labels: Any) -> ResultRow:
        """The same result under other labels (names that are no part of the point's hash)."""
        allowed = {"checkpoint", "exclude_label", "exclude", "draft_exclude", "prompt_set", "remark"}
        assert labels.keys() <= allowed, f"not labels: {sorted(labels.keys() - allowed)}"
        return self.model_copy(update=labels)


def _check_shares(found: DomainStats | ResultRow) -> None:
    """What is kept agrees with the counts beside it. Raises ValueError."""
    length = found.acceptance_length
    if (length is None) == bool(found.rounds) or (
        length is not None and not math.isclose(length * found.rounds, found.tokens, rel_tol=1e-9)
    ):
        raise ValueError(f"acceptance_length is {length}, but there are {found.tokens} tokens in {found.rounds} rounds")
    shares = [share is not None for share in found.per_position]
    # an engine that counts rounds need not count positions
    if shares and (any(shares) if not found.rounds else any(shares) != all(shares)):
        raise ValueError(f"per_position is {found.per_position}, but there are {found.rounds} rounds")
