"""Checks of the norms' values: RMSNorm multiplies by w in some families, by 1 + w in others, and converters mix them.

Knows statistics only, and needs torch through them alone. Measured values are those of the bundled model (1 + w,
trained), by `mtplab audit --deep`'s own `plain_stats`: target's means -0.58 to 0.46, median -0.14; head's -0.54 to
0.37, at most 0.28 outside the target's norms of the same name, and 0 outside all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.stats import Stats
from mtplab.checkpoint.audit.subject import Subject

__all__ = ["CHECKS"]

# families whose RMSNorm multiplies by 1 + w (transformers' modeling files): their weights lie about 0
_ONE_PLUS = ("qwen3_5", "qwen3_next", "gemma", "step3", "step_3")
# and those that are known to multiply by w; of others nothing is said
_BY_W = (
    "deepseek", "glm", "kimi", "llama", "mimo", "minimax", "mistral", "mixtral", "nemotron_h", "qwen2", "qwen3",
)  # fmt: skip
_FAR = ("gemma",)  # of these, those whose trained weights do not stay near 0
_PLAIN_NORM = ("linear_attn.norm",)  # the gated norm of a gated delta layer multiplies by w in these families too
_BESIDE = 0.5  # outside what the target's have by this much; bundled: 0.28
_ONE = (0.6, 1.6)  # a distance of "about 1" between means


class _Norms:
    def __init__(self, subject: Subject, stats: Mapping[str, Stats]) -> None:
        model = str(subject.text.get("model_type", subject.config.get("model_type", "")))
        self.one_plus = model.startswith(_ONE_PLUS)
        self.known = self.one_plus or model.startswith(_BY_W)
        self.far = model.startswith(_FAR)
        self.of: dict[str, dict[str, Stats]] = {"target": {}, "draft": {}}
        for module in subject.modules:
            usable = module.kind == "norm" and module.name in stats and not module.name.endswith(_PLAIN_NORM)
            if usable and module.part in self.of and module.shape:
                self.of[module.part][module.name] = stats[module.name]
        self.rule, self.other = ("1 + w", "w") if self.one_plus else ("w", "1 + w")


def _target(subject: Subject, stats: Mapping[str, Stats]) -> Iterator[Finding]:
    norms = _Norms(subject, stats)
    target = norms.of["target"]
    if len(target) < 3 or norms.far or not norms.known:
        return
    means = {name: found.mean for name, found in target.items()}
    median = statistics.median(means.values())
    # a gain is hardly ever negative, so weights under w are not, and weights under 1 + w have both signs; bundled:
    # 10 of 11 with both signs or all below 0, and none once 1 is added
    crossing = sum(found.low < -0.1 * abs(found.high) for found in target.values()) / len(target)
    wrong = 0.7 < median < 1.5 and crossing < 0.1 if norms.one_plus else median < 0.3 and crossing > 0.7
    if wrong:
        yield Finding(
            "error", "norm-convention",
            f"The target's norm weights are {median:.2f} in the median, where this architecture multiplies by "
            f"{norms.rule}.", tuple(target), f"They look written for {norms.other}: every layer's input is scaled "
            "wrongly.",
            "A converter added or took off the 1: convert again.",
        )  # fmt: skip
        return
    # by what a norm is in its layer: all of one kind were converted, all of another not
    by_kind: dict[str, list[float]] = {}
    for name, mean in means.items():
        by_kind.setdefault(name.rpartition(".")[2], []).append(mean)
    if not norms.one_plus or len(by_kind) < 2:
        return
    shifted = {kind for kind, found in by_kind.items() if all(0.3 < m < 1.6 for m in found) and _mid(found) > 0.7}
    raw = {kind for kind, found in by_kind.items() if _mid(found) < 0.3}
    clear = shifted and raw and min(min(by_kind[k]) for k in shifted) > max(max(by_kind[k]) for k in raw)
    positive = shifted and all(
        found.low > 0 for name, found in target.items() if name.rpartition(".")[2] in shifted
    )  # fmt: skip
    if clear and positive:
        names = tuple(name for name in means if name.rpartition(".")[2] in shifted)
        yield Finding(
            "warning", "mixed-norms",
            f"{len(names)} of the target's {len(means)} norms lie about 1 ({listed(names)}), the others about 0.",
            names,
            f"The architecture multiplies by {norms.rule}: a converter that added 1 to some of them looks like this.",
            "Compare them with the original checkpoint.",
        )  # fmt: skip


def _draft(subject: Subject, stats: Mapping[str, Stats]) -> Iterator[Finding]:
    norms = _Norms(subject, stats)
    target, draft = ({name: found.mean for name, found in norms.of[part].items()} for part in ("target", "draft"))
    if not target or not draft:
        return
    middle = statistics.median(target.values())
    moved = [name for name in draft if _moved(name, draft[name], target)]
    if not moved:
        return
    apart = draft[moved[0]] - middle
    certain = norms.one_plus or 2 * len(moved) > len(draft)  # under w, a norm or two of 1.5 may be trained so
    yield Finding(
        "error" if certain else "warning", "draft-norm-convention",
        f"{len(moved)} of the draft head's {len(draft)} norms lie about 1 {'above' if apart > 0 else 'below'} the "
        f"target's ({draft[moved[0]]:.2f} against {middle:.2f}): {listed(moved)}.", tuple(moved),
        (f"The architecture multiplies by {norms.rule}; these look converted " if norms.known else "Converted ")
        + ("twice" if (apart > 0) == norms.one_plus else "the other way")
        + (", the others not" if len(moved) < len(draft) else "") + ": acceptance falls to 0 %.",
        "Subtract or add 1, so that head and target are alike.",
    )  # fmt: skip


def _moved(name: str, mean: float, target: Mapping[str, float]) -> bool:
    """Whether it lies about 1 beyond the target's of the same name, or beyond all where it has no namesake."""
    last = name.rpartition(".")[2]
    alike = [found for other, found in target.items() if other.endswith(f".{last}")] or list(target.values())
    beyond = max(mean - max(alike), min(alike) - mean)
    return beyond > _BESIDE and _ONE[0] < abs(mean - statistics.median(alike)) < _ONE[1]


def _initial(subject: Subject, stats: Mapping[str, Stats]) -> Iterator[Finding]:
    """Norms that are exactly what they are initialised to."""
    norms = _Norms(subject, stats)
    if not norms.known:
        return
    initial = 0.0 if norms.one_plus else 1.0
    for part, severity in (("draft", "error"), ("target", "warning")):
        found = norms.of[part]
        if len(found) > 1 and all(one.low == one.high == initial for one in found.values()):
            yield Finding(
                severity, f"initial-{part}-norms",
                f"All {len(found)} norms of the {'draft head' if part == 'draft' else part} are exactly {initial:.0f}: "
                f"{listed(list(found))}.", tuple(found),
                "That is what they are initialised to; training moves them. They were never loaded, or never trained"
                + (": acceptance 0 %." if part == "draft" else "."),
                "Take them from the original checkpoint.",
            )  # fmt: skip


def _mid(values: list[float]) -> float:
    return statistics.median(values)


CHECKS = (_target, _draft, _initial)
