"""Checks that read the values: codes and scales that are wrong, weights that are zero, a head never trained.

Every threshold says here what it is against, with what the bundled model has (`mtplab audit data/tiny-qwen3_5 --deep`).
With `stats.py`, `deep_norms.py` and `compare.values_findings` all of the audit that needs torch.

What no statistic of a file tells is which half of the fusion (`mtp.fc`, `eh_proj`) reads the embedding: on the bundled
model its columns' norms follow their norm's weights (correlation 0.55 and 0.19; crosswise 0.06 and -0.21), but a
checkpoint whose norms were folded into the weights, the same function, has the opposite. A run tells
(`mtplab generate`), and `mtplab.compare_hidden` tells which hidden state the head was trained with.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator

import torch

from mtplab.checkpoint.audit import deep_norms
from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.stats import Stats, plain_stats, scaled_stats
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.draft_layouts import FUSIONS
from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.lenses.fused import GROUPS
from mtplab.checkpoint.names import normalised
from mtplab.checkpoint.values import read_rows, read_tensor
from mtplab.errors import CheckpointError

__all__ = ["deep_findings"]

_BAND_BYTES = 1 << 22
_FLOATS = ("BF16", "F16", "F32")
_SIBLING_FACTOR = 8.0  # rms of a module against the median of its siblings in other layers; bundled: 0.82 to 1.03
_SCALE_FACTOR = 2.0**10  # scale against the siblings' median; bundled: 0.81 to 1.70
# rows' and columns' norms against what independent values give, and the fourth moment: bundled at least 1.5 in one of
# the two directions for every weight of the head, 1.0 for random ones
_SPREAD_FACTOR, _NORMAL = 1.3, 3.3
# E4M3 is a float: codes brought to a scale r times as large stay as exact until they become subnormal. Measured on
# normal values: rounding error times 1.0 for powers of two up to 512, up to 1.5 for others
_RANGE_LOST, _ROUNDED_AGAIN = 512.0, 1.02
_FN_TOP, _FNUZ_TOP = 0x7E, 0x77  # bytes of 448 and of 240 as E4M3FN spells them


def deep_findings(subject: Subject, progress: Callable[[int], None]) -> Iterator[Finding]:
    """Read every weight once and judge. `progress` gets the bytes of each as it is read."""
    stats: dict[str, Stats] = {}
    for module in subject.modules:
        try:
            found = _stats_of(subject, module)
        except CheckpointError as error:
            yield Finding("error", "unreadable", str(error), (module.name,), "", "Download the file again.")
            found = None
        if found is not None:
            stats[module.name] = found
        progress(module.nbytes)
    checks = (_bad_values, _scales, _exponents, _directions, _fnuz, _siblings, _zeros, _random_head, _fused_scales)
    for check in (*checks, *deep_norms.CHECKS):
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
                "error", kind,
                f"{sum(found.values())} {what} are NaN or infinite, in {len(names)} tensors: {listed(names)}.",
                tuple(names), "One of them makes every logit NaN, and every token id 0.",
                "The export is damaged (an unclamped cast writes such codes): download or quantise again.",
            )  # fmt: skip


def _scales(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    names = [name for name, found in stats.items() if found.bad_scales]
    if names:
        count = sum(stats[name].bad_scales for name in names)
        yield Finding(
            "error", "bad-scale",
            f"{count} scales are not finite and positive, in {len(names)} weights: {listed(names)}.", tuple(names),
            "Zero erases a block, or divides by zero where the weight is quantised again; NaN spreads to all.",
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
                "in the median.", tuple(odd),
                "The weight is as many times too large or too small: noise, from this layer on.",
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
            f"{listed(odd)} (rms {first.rms:.3g} against {first.inverse_rms:.3g}).", tuple(odd),
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
            "values here would be twice too large; if only the range was, a bit of precision is lost.",
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


def _exponents(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    """Scales declared powers of two that are none."""
    if str(subject.content.get("scale_fmt", "")).lower() != "ue8m0":
        return
    names = [name for name, found in stats.items() if found.uneven_scales]
    if names:
        yield Finding(
            "warning", "scale-format",
            f"scale_fmt is 'ue8m0', and {len(names)} weights have scales that are no power of two: {listed(names)}.",
            tuple(names),
            "Kernels for ue8m0 keep a scale's exponent alone: such values come out up to 2 times too small.",
            "Take scale_fmt out of the config, or quantise again with powers of two.",
        )  # fmt: skip


def _zeros(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    whole = [m.name for m in subject.linears if m.name in stats and m.part != "draft" and stats[m.name].count
             and stats[m.name].rms == 0 and not stats[m.name].bad]  # fmt: skip
    if whole:
        yield Finding(
            "warning", "zero-weight", f"{len(whole)} linear weights of the target are all zero: {listed(whole)}.",
            tuple(whole), "The module gives nothing: a weight that was allocated and never filled looks like this.",
            "Compare it with the original checkpoint.",
        )  # fmt: skip
    part = {name: found for name, found in stats.items() if found.zero_blocks and found.rms > 0}
    if part:
        yield Finding(
            "note", "zero-blocks",
            f"{sum(found.zero_blocks for found in part.values())} blocks hold zeros alone, in {len(part)} weights: "
            f"{listed(list(part))}.", tuple(part),
            "A writer that divides by a block's largest value gives such blocks a scale of 0 or NaN when it quantises "
            "them again.", "",
        )  # fmt: skip


def _random_head(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    draft = [m for m in subject.linears if m.part == "draft" and m.name in stats and min(m.shape) >= 32]
    random, zero = [], []
    for module in draft:
        found = stats[module.name]
        if found.rms == 0:
            zero.append(module.name)
        elif 0 < found.kurtosis < _NORMAL and _independent(found, module.shape):
            random.append(module.name)
    never = "They were initialised and never loaded or trained: acceptance 0 %"
    alike = "Rows and columns of a trained matrix differ in size; these are as alike as chance makes them."
    for kind, names, what, why in (
        ("zero-head", zero, "are all zero", ""),
        ("random-head", random, "look like independent random numbers", f"{alike} "),
    ):
        if names:
            fusion = any(name.rpartition(".")[2] in FUSIONS for name in names)
            yield Finding(
                "error" if fusion or 2 * len(names) >= len(draft) else "warning",
                kind, f"{len(names)} of {len(draft)} linear weights of the draft head {what}: {listed(names)}.",
                tuple(names), f"{why}{never}" + (", since every draft passes through the fusion." if fusion else "."),
                "Take the head's weights from the original checkpoint.",
            )  # fmt: skip


def _independent(found: Stats, shape: tuple[int, ...]) -> bool:
    """Whether rows and columns differ no more than sums of independent values do.

    A norm over k independent values with fourth moment q (over the squared second) varies by sqrt((q - 1) / 4k).
    """
    n, k = shape[-2], shape[-1]
    row = math.sqrt(max(0.0, found.kurtosis - 1) / (4 * k))
    column = math.sqrt(max(0.0, found.kurtosis - 1) / (4 * n))
    return found.row_spread < _SPREAD_FACTOR * row and found.column_spread < _SPREAD_FACTOR * column


def _fused_scales(subject: Subject, stats: dict[str, Stats]) -> Iterator[Finding]:
    """Per-tensor scales that differ among what engines fuse under one."""
    odd: dict[str, float] = {}
    if subject.quantization is None:
        return
    scheme_of = subject.quantization.scheme_of
    whole = {m.name for m in subject.linears if m.weight == "fp8" and m.name in stats
             and (scheme := scheme_of(m.name)) is not None and scheme.granularity == "tensor"}  # fmt: skip
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in whole):
        for members in GROUPS:
            scales = [stats[f"{parent}.{name}"].scale for name in members if f"{parent}.{name}" in whole]
            if len(scales) > 1 and min(scales) > 0 and max(scales) / min(scales) > _ROUNDED_AGAIN:
                odd[f"{parent}.{members[0]}"] = max(scales) / min(scales)
    if odd:
        worst = max(odd, key=lambda name: odd[name])
        lost = odd[worst] > _RANGE_LOST
        yield Finding(
            "warning" if lost else "note", "fused-scales",
            f"Per-tensor scales of modules that engines fuse differ by up to {odd[worst]:.1f}x ({listed([worst])} "
            f"and its siblings), in {len(odd)} places.", tuple(odd),
            "An engine with one scale for the fused product rounds the codes of the smaller ones a second time"
            + (", and what is small in them becomes zero." if lost else ": up to half as much error again."),
            "Quantise per channel or block, or with a scale common to the group." if lost else "",
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
                    "Store the copy as the target's is, or leave it out.",
                )  # fmt: skip
                continue
            try:
                alike = _same(copy, original)
            except CheckpointError as error:
                yield Finding("error", "unreadable", str(error), (copy.name, target), "", "Download the file again.")
                continue
            if not alike:
                yield Finding(
                    "warning", "copy-differs", f"{listed([copy.name, target])} hold different values.",
                    (copy.name, target),
                    "Engines that share the target's use another matrix than the head was trained with.",
                    "If the head has an embedding or output of its own, use an engine that loads it.",
                )  # fmt: skip


def _same(first: TensorInfo, second: TensorInfo) -> bool:
    rows = first.shape[0] if first.shape else 1
    step = max(1, _BAND_BYTES * rows // max(1, first.nbytes))
    if not first.shape:
        return torch.equal(read_tensor(first), read_tensor(second))
    bands = ((start, min(rows, start + step)) for start in range(0, rows, step))
    return all(
        torch.equal(read_rows(first, *band).view(torch.uint8), read_rows(second, *band).view(torch.uint8))
        for band in bands
    )


def _groups(stats: dict[str, Stats]) -> dict[str, list[str]]:
    """Modules by what they are in their layer, numbers left out: the draft head's beside the target's."""
    found: dict[str, list[str]] = {}
    for name in stats:
        at = re.search(r"layers\.[0-9]+\.(.+)", name)
        if at is not None:
            found.setdefault(re.sub(r"\.[0-9]+\.", ".*.", at[1]), []).append(name)
    return found
