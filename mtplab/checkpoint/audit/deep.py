"""Checks that read the values: codes and scales that are wrong, norms in another convention, a head never trained.

Every threshold says here what it is against. The only module of the audit that needs torch (with `stats.py`).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator

import torch

from mtplab.checkpoint.audit.checks_lists import FUSED
from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.stats import Stats, plain_stats, scaled_stats
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.names import normalised
from mtplab.checkpoint.values import read_tensor
from mtplab.errors import CheckpointError

__all__ = ["deep_findings"]

# families whose RMSNorm multiplies by 1 + w (transformers' modeling files): their weights lie about 0
_ONE_PLUS = ("qwen3_5", "qwen3_next", "gemma", "step3", "step_3")
_PLAIN_NORM = ("linear_attn.norm",)  # the gated norm of a gated delta layer multiplies by w in these families too
_FLOATS = ("BF16", "F16", "F32")
_SIBLING_FACTOR = 8.0  # rms of a module against the median of its siblings in other layers
_SCALE_FACTOR = 2.0**10
_FN_TOP, _FNUZ_TOP = 0x7E, 0x77  # bytes of 448 and of 240 as E4M3FN spells them


def deep_findings(subject: Subject, progress: Callable[[int, int], None] | None = None) -> Iterator[Finding]:
    """Read every weight once and judge. `progress` gets (bytes read, bytes in all)."""
    stats: dict[str, Stats] = {}
    total, done = sum(module.nbytes for module in subject.modules), 0
    for module in subject.modules:
        try:
            found = _stats_of(subject, module)
        except CheckpointError as error:
            yield Finding("error", "unreadable", str(error), (module.name,), "", "Download the file again.")
            found = None
        if found is not None:
            stats[module.name] = found
        done += module.nbytes
        if progress is not None:
            progress(done, total)
    for check in (_bad_values, _scales, _directions, _fnuz, _siblings, _norms, _random_head, _fused_scales):
        yield from check(subject, stats)
    yield from _copies_of_target(subject)


def _stats_of(subject: Subject, module) -> Stats | None:
    if module.weight == "unusable":
        return None
    info = subject.ckpt.info(module.name)
    if module.weight == "fp8":
        pair = subject.ckpt.pair(module.name)
        return scaled_stats(pair) if pair is not None else None
    return plain_stats(info) if info.dtype in _FLOATS else None


def _bad_values(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    codes = {m.name: stats[m.name].bad for m in subject.modules if m.name in stats and m.weight == "fp8"}
    plain = {m.name: stats[m.name].bad for m in subject.modules if m.name in stats and m.weight != "fp8"}
    for kind, found, what in (("nan-codes", codes, "FP8 codes"), ("nan-values", plain, "values")):
        names = [name for name, bad in found.items() if bad]
        if names:
            yield Finding(
                "error", kind, f"{sum(found.values())} {what} are NaN or infinite, in {len(names)} tensors: "
                f"{listed(names)}.",
                tuple(names), "One of them makes every logit NaN, and every token id 0.",
                "The export is damaged (an unclamped cast writes such codes): download or quantise again.",
            )  # fmt: skip


def _scales(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    names = [name for name, found in stats.items() if found.bad_scales]
    if names:
        count = sum(stats[name].bad_scales for name in names)
        yield Finding(
            "error", "bad-scale", f"{count} scales are not finite and positive, in {len(names)} weights: "
            f"{listed(names)}.",
            tuple(names), "Zero erases a block, or divides by zero where the weight is quantised again; NaN spreads "
            "to all.",
            "Quantise again with a writer that keeps scales above zero.",
        )  # fmt: skip
    for key, group in _groups(stats).items():
        scales = {name: stats[name].scale for name in group if stats[name].scale > 0}
        if len(scales) < 3:
            continue
        median = statistics.median(scales.values())
        odd = [name for name, scale in scales.items() if not 1 / _SCALE_FACTOR < scale / median < _SCALE_FACTOR]
        if odd:
            yield Finding(
                "error", "absurd-scale",
                f"{listed(odd)}: scale {scales[odd[0]]:.3g}, where the {len(group)} weights {key} have {median:.3g} "
                f"in the "
                "median.", tuple(odd), "The weight is as many times too large or too small: noise, from this layer on.",
                "An uninitialised or wrongly typed scale: quantise or download again.",
            )  # fmt: skip


def _directions(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    """A scale stored as what the weight was multiplied by, not what its codes are to be multiplied by."""
    odd = [
        name
        for name, found in stats.items()
        # weights of a network are of the order of 0.001 to 1; reciprocal scales make them 1e4 and more
        if found.rms > 100 and 1e-5 < found.inverse_rms < 5
    ]
    if odd:
        first = stats[odd[0]]
        yield Finding(
            "error", "scale-direction",
            f"{len(odd)} weights are absurdly large as stored and of usual size with the scale's reciprocal: "
            f"{listed(odd)} "
            f"(rms {first.rms:.3g} against {first.inverse_rms:.3g}).", tuple(odd),
            "Every reader multiplies codes by the scale, also where it is called weight_scale_inv.",
            "Store the reciprocal of the scales.",
        )  # fmt: skip


def _fnuz(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    names = [m.name for m in subject.modules if m.weight == "fp8" and m.stored == "F8_E4M3" and m.name in stats]
    tops = {stats[name].top_code for name in names}
    if names and max(tops) == _FNUZ_TOP and sum(stats[name].count for name in names) > 10_000:
        yield Finding(
            "warning", "fn-fnuz", f"No code of {len(names)} E4M3 weights is larger than 240, and that one occurs.",
            tuple(names),
            "A writer for E4M3FN scales to 448. This one scaled to E4M3FNUZ's 240: were the codes FNUZ as well, all "
            "values "
            "here would be twice too large; if only the range was, a bit of precision is lost.",
            "Ask which device it was written for; quantise again for E4M3FN.",
        )  # fmt: skip


def _siblings(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    for key, group in _groups(stats).items():
        sizes = {name: stats[name].rms for name in group if stats[name].rms > 0}
        if len(sizes) < 4 or "norm" in key:
            continue
        median = statistics.median(sizes.values())
        odd = [name for name, size in sizes.items() if not 1 / _SIBLING_FACTOR < size / median < _SIBLING_FACTOR]
        if odd and len(odd) <= len(sizes) // 4:
            yield Finding(
                "warning", "outlier-module",
                f"{listed(odd)}: rms {sizes[odd[0]]:.3g}, {sizes[odd[0]] / median:.2g} times the median of its "
                f"{len(sizes)} siblings {key}.", tuple(odd),
                "A scale applied twice or not at all, or a tensor of another layer, looks like this.",
                "Compare it with the original checkpoint.",
            )  # fmt: skip


def _norms(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    one_plus = str(subject.text.get("model_type", subject.config.get("model_type", ""))).startswith(_ONE_PLUS)
    means: dict[str, dict[str, float]] = {"target": {}, "draft": {}}
    for module in subject.modules:
        usable = module.kind == "norm" and module.name in stats and not module.name.endswith(_PLAIN_NORM)
        if usable and module.part in means:
            means[module.part][module.name] = stats[module.name].mean
    if not means["target"]:
        return
    target = statistics.median(means["target"].values())
    rule, other = ("1 + w", "w") if one_plus else ("w", "1 + w")
    # an untrained weight is 0 under 1 + w and 1 under w; trained ones stay on their side of one half
    if (target > 0.7) == one_plus and (target > 0.7 or target < 0.3):
        yield Finding(
            "error", "norm-convention",
            f"The target's norm weights are {target:.2f} in the mean, where this architecture multiplies by {rule}.",
            tuple(means["target"]), f"They look written for {other}: every layer's input is scaled wrongly.",
            "A converter added or took off the 1: convert again.",
        )  # fmt: skip
    apart = {name: mean - target for name, mean in means["draft"].items()}
    moved = [name for name in apart if _moved(name, means)]
    if moved:
        first = moved[0]
        stays = len(moved) < len(apart)
        yield Finding(
            "error", "draft-norm-convention",
            f"{len(moved)} of the draft head's {len(apart)} norms lie about 1 "
            f"{'above' if apart[first] > 0 else 'below'} "
            f"the target's ({target + apart[first]:.2f} against {target:.2f}): {listed(moved)}.", tuple(moved),
            f"The architecture multiplies by {rule}; these look converted "
            + ("twice" if (apart[first] > 0) == one_plus else "the other way")
            + (", the others not" if stays else "") + ": acceptance falls to 0 %.",
            "Subtract or add 1, so that head and target are alike.",
        )  # fmt: skip


def _moved(name: str, means: dict[str, dict[str, float]]) -> bool:
    """Whether a draft norm lies about 1 beyond the target's of the same name, or beyond all where it has no "
    "namesake."""
    last = name.rpartition(".")[2]
    alike = [mean for other, mean in means["target"].items() if other.endswith(f".{last}")] or list(
        means["target"].values()
    )
    mean = means["draft"][name]
    beyond = max(mean - max(alike), min(alike) - mean)
    return beyond > 0.5 and 0.6 < abs(mean - statistics.median(alike)) < 1.6


def _random_head(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    draft = [m for m in subject.linears if m.part == "draft" and m.name in stats and min(m.shape) >= 32]
    random, zero = [], []
    for module in draft:
        found = stats[module.name]
        if found.rms == 0:
            zero.append(module.name)
        elif found.kurtosis < 3.3 and _independent(found, module.shape):
            random.append(module.name)
    for kind, names, what in (("zero-head", zero, "all zero"), ("random-head", random, "independent random numbers")):
        if names:
            yield Finding(
                "error", kind, f"{len(names)} of {len(draft)} linear weights of the draft head look like {what}: "
                f"{listed(names)}.", tuple(names),
                "Rows and columns of a trained matrix differ in size; these are as alike as chance makes them. The "
                "head was "
                "initialised and never loaded or trained: acceptance 0 %.",
                "Take the head's weights from the original checkpoint.",
            )  # fmt: skip


def _independent(found: Stats, shape: tuple[int, ...]) -> bool:
    """Whether rows and columns differ no more than sums of independent values do.

    A norm over k independent values with fourth moment q (over the squared second) varies by sqrt((q - 1) / 4k).
    """
    n, k = shape[-2], shape[-1]
    row = math.sqrt(max(0.0, found.kurtosis - 1) / (4 * k))
    column = math.sqrt(max(0.0, found.kurtosis - 1) / (4 * n))
    return found.row_spread < 1.3 * row and found.column_spread < 1.3 * column


def _fused_scales(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    """Per-tensor scales that differ among what engines fuse under one."""
    odd: dict[str, float] = {}
    whole = {m.name: m for m in subject.linears if m.weight == "fp8" and m.block == m.shape and m.name in stats}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in whole):
        for members in FUSED:
            scales = [stats[f"{parent}.{name}"].scale for name in members if f"{parent}.{name}" in whole]
            if len(scales) > 1 and min(scales) > 0 and max(scales) / min(scales) > 2:
                odd[f"{parent}.{members[0]}"] = max(scales) / min(scales)
    if odd:
        worst = max(odd, key=lambda name: odd[name])
        yield Finding(
            "warning", "fused-scales",
            f"Per-tensor scales of modules that engines fuse differ by up to {odd[worst]:.1f}x ({listed([worst])} "
            f"and its "
            f"siblings), in {len(odd)} places.", tuple(odd),
            "An engine with one scale for the fused product quantises the smaller ones again, with as many times less "
            "precision.", "Quantise per channel or block, or with a scale common to the group.",
        )  # fmt: skip


def _copies_of_target(subject: Subject) -> Iterator[Finding]:
    """Embeddings and heads that a draft layer carries as copies, where they are none."""
    by_name = {normalised(name): info for name, info in subject.ckpt.tensors.items()}
    pairs = (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight"))
    draft = [m.name for m in subject.modules if m.part == "draft"]
    for ending, target in pairs:
        for module in draft:
            copy = by_name.get(f"{normalised(module)}.weight")
            if copy is None or not copy.name.endswith(ending) or target not in by_name:
                continue
            original = by_name[target]
            if copy.dtype != original.dtype or copy.shape != original.shape:
                yield Finding(
                    "warning", "copy-differs", f"{listed([copy.name, target])} are {copy.dtype} {list(copy.shape)} and "
                    f"{original.dtype} {list(original.shape)}.", (copy.name, target),
                    "Engines that share the target's use another matrix than the head was trained with.",
                )  # fmt: skip
            elif not torch.equal(read_tensor(copy).view(torch.uint8), read_tensor(original).view(torch.uint8)):
                yield Finding(
                    "warning", "copy-differs", f"{listed([copy.name, target])} hold different values.",
                    (copy.name, target),
                    "Engines that share the target's use another matrix than the head was trained with.",
                    "If the head has an embedding or output of its own, use an engine that loads it.",
                )  # fmt: skip


def _groups(stats: dict[str, Stats]) -> dict[str, list[str]]:
    """Modules by what they are in their layer, numbers left out: the draft head's beside the target's."""
    found: dict[str, list[str]] = {}
    for name in stats:
        at = re.search(r"layers\.[0-9]+\.(.+)", name)
        if at is not None:
            found.setdefault(re.sub(r"\.[0-9]+\.", ".*.", at[1]), []).append(name)
    return found
