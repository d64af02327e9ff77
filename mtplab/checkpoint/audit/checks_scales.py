"""Checks of how scales are named and stored: right here, and what other loaders make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.remedies import anew, without_fp8
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.draft_layouts import FUSIONS
from mtplab.checkpoint.lenses.fused import GROUPS
from mtplab.checkpoint.names import draft_prefixes, part_of

if TYPE_CHECKING:
    from mtplab.checkpoint.plan import ModulePlan

__all__ = ["CHECKS"]

# how AMD's codes differ from those of the same bits elsewhere: the bias is one more, and there is no infinity
_FNUZ = {
    "F8_E4M3FNUZ": "bias 8, at most 240; read as F8_E4M3 all values are twice too large",
    "F8_E5M2FNUZ": "bias 16, at most 57344; read as F8_E5M2 all values are twice too large, the largest NaN",
}


def _suffixes(subject: Subject) -> Iterator[Finding]:
    if subject.quantization is None or subject.quantization.method != "fp8":
        return
    by_suffix: dict[str, list[str]] = {}
    for module in subject.modules:
        if module.scale is not None and module.weight == "fp8":
            by_suffix.setdefault(module.scale.name.rpartition(".")[2], []).append(module.name)
    blocks = subject.content.get("weight_block_size") is not None
    plain = by_suffix.get("weight_scale", [])
    if blocks and plain:
        yield Finding(
            "warning", "scale-suffix",
            f"{len(plain)} block-scaled weights have their scale in weight_scale: {listed(plain)}.", tuple(plain),
            "With weight_block_size, engines look for weight_scale_inv: vLLM stops at the other name for Qwen3.5, and "
            "loaders that pass it over leave the scale uninitialised.",
            f"Rename the scales to weight_scale_inv: {anew(subject)} does.",
        )  # fmt: skip
    bare = [*by_suffix.get("scale", []), *by_suffix.get("qscale_weight", [])]
    if bare:
        yield Finding(
            "warning", "scale-suffix",
            f"{len(bare)} weights have their scale in a tensor called .scale or .qscale_weight: {listed(bare)}.",
            tuple(bare),
            "Loaders that look for weight_scale_inv miss it: DeepSeek-V4 ran at 1.8 % acceptance that way "
            "(vLLM issue 43455).",
            f"Use an engine release that knows the name, or write them anew: {anew(subject)}.",
        )  # fmt: skip
    if len(by_suffix) > 1:
        kinds = ", ".join(f"{len(names)} {suffix}" for suffix, names in by_suffix.items())
        yield Finding(
            "warning", "mixed-suffixes", f"Scales have different names within one checkpoint: {kinds}.", (),
            "A loader that settles on one of them leaves the others unread.",
            f"Write them under one name: {anew(subject)} does.",
        )  # fmt: skip
    shared = [m.name for m in subject.modules if m.weight == "fp8" and m.scale is not None and len(m.scale.shape) == 3]
    experts = [name for name in shared if ".experts." in name]
    if experts:
        yield Finding(
            "error", "stacked-scales",
            f"{len(experts)} experts' weights are stored one by one, their scales stacked: {listed(experts)}.",
            tuple(experts),
            "transformers' writer does this, and its own reader then takes raw codes for values, without an error.",
            f"Write them again, one scale beside each weight: {anew(subject)} does.",
        )  # fmt: skip


def _scale_dtypes(subject: Subject) -> Iterator[Finding]:
    powers: list[str] = []
    raw: list[str] = []
    for module in subject.modules:
        if module.scale is not None and module.weight == "fp8":
            if module.scale.dtype == "U8":
                raw.append(module.name)
            elif module.scale.dtype == "F8_E8M0":
                powers.append(module.name)
    if raw:
        yield Finding(
            "warning", "integer-scales",
            f"{len(raw)} weights have scales stored as U8: {listed(raw)}.", tuple(raw),
            "They are exponents, 2**(byte - 127). A reader that multiplies by the byte is off by a factor of 1e5.",
            f"Use a reader that knows MXFP8, or write them as values: {anew(subject)}.",
        )  # fmt: skip
    if powers:
        yield Finding(
            "note", "e8m0-scales",
            f"{len(powers)} weights have power-of-two scales stored as F8_E8M0: {listed(powers)}.", tuple(powers),
            "Kernels that take float32 scales (CUTLASS on Hopper) need them converted at load.", "",
        )  # fmt: skip
    nuz = [module.name for module in subject.modules if module.stored.endswith("FNUZ")]
    if nuz:
        kinds = sorted({module.stored for module in subject.modules if module.stored.endswith("FNUZ")})
        yield Finding(
            "warning", "fnuz",
            f"{len(nuz)} weights are stored as {' and '.join(kinds)}: {listed(nuz)}.", tuple(nuz),
            "AMD's MI300 format: " + "; ".join(_FNUZ[kind] for kind in kinds) + ".",
            f"Convert to F8_E4M3 for other devices: {anew(subject)}.",
        )  # fmt: skip


def _heads(subject: Subject) -> Iterator[Finding]:
    quantised = [
        module.name
        for module in subject.modules
        if module.weight == "fp8"
        and (module.part == "head" or module.name.endswith(("shared_head.head", "shared_head.output")))
    ]
    if quantised:
        yield Finding(
            "warning", "quantised-head",
            f"The vocabulary head is FP8: {listed(quantised)}.", tuple(quantised),
            "Most engines build it in BF16 whatever the config says: its scale has no place to go (vLLM: KeyError "
            "weight_scale; TensorRT-LLM: raw codes).",
            f"Store it in BF16 ({without_fp8(subject, quantised)}); it is read once a token, and errors in it are "
            "errors in every logit.",
        )  # fmt: skip


def _kv(subject: Subject) -> Iterator[Finding]:
    scales = subject.ckpt.kv_scales()
    if not scales:
        return
    drafts = draft_prefixes(subject.config)
    draft = [name for name in scales if part_of(name, drafts) == "draft"]
    yield Finding(
        "note", "kv-scales",
        f"{len(scales)} scales of a quantised KV cache are in the file: {listed(list(scales))}.", tuple(scales),
        "An engine asked for an FP8 cache uses them; one that does not know the names takes 1.0.",
    )  # fmt: skip
    if draft:
        yield Finding(
            "warning", "draft-kv-scales",
            f"{len(draft)} of them belong to the draft head: {listed(draft)}.", tuple(draft),
            "Loaders of MTP layers have failed on such names (vLLM pull request 27227).",
            "Use a release that maps them, or leave them out.",
        )  # fmt: skip


# kept whole on every rank, or, as keys and values, repeated where there are more ranks than heads
_WHOLE = (
    *FUSIONS, "in_proj_a", "in_proj_b", "k_proj", "v_proj", "wkv",
    "q_a_proj", "kv_a_proj_with_mqa", "wq_a", "wk", "weights_proj", "gate",
)  # fmt: skip


def _tensor_parallel(subject: Subject) -> Iterator[Finding]:
    """How far block-scaled weights can be split: every rank needs whole blocks."""
    limits: dict[int, list[str]] = {}
    for module in subject.linears:
        if module.weight != "fp8" or module.block is None or len(module.block) != 2 or len(module.shape) != 2:
            continue
        bm, bn = module.block
        if bm in (1, module.shape[0]):
            continue
        last = module.name.rpartition(".")[2]
        rows_split = last not in ("o_proj", "down_proj", "out_proj", "w2", "wo_b")
        size, block = (module.shape[0], bm) if rows_split else (module.shape[1], bn)
        if last in _WHOLE or size < block:
            continue
        ways = size // block if size % block == 0 else 1
        most = ways & -ways
        limits.setdefault(most, []).append(module.name)
    if limits and min(limits) < 8:
        most = min(limits)
        names = limits[most]
        yield Finding(
            "note", "tensor-parallel",
            (f"Weights split into whole blocks over at most {most} ranks" if most > 1 else
             "Weights cannot be split into whole blocks over ranks") + f": {listed(names, 2)} decide.", tuple(names),
            "A rank's part that ends within a block is refused by engines (vLLM pull request 52915).",
            f"Use a tensor-parallel size up to {most}, or expert parallelism.",
        )  # fmt: skip


# the last member of what engines compute as one → all of them
_FUSED = {group[-1]: group for group in GROUPS}


def _fused_blocks(subject: Subject) -> Iterator[Finding]:
    """Weights that others follow in what engines compute as one, and that end within a block of rows."""
    modules = subject.plan.by_name
    found: list[ModulePlan] = []
    for module in subject.linears:
        parent, dot, last = module.name.rpartition(".")
        if last not in _FUSED or module.weight != "fp8" or ".experts." in module.name:
            continue
        members = [modules.get(parent + dot + one) for one in _FUSED[last]]
        stored = [m for m in members if m is not None and m.weight == "fp8" and m.block and len(m.shape) == 2]
        if len(stored) == len(members):
            found += [m for m in stored[:-1] if m.block and m.block[0] > 1 and m.shape[0] % m.block[0]]
    if found:
        names = [module.name for module in found]
        rows = found[0].block[0] if found[0].block else 0
        yield Finding(
            "note", "fused-blocks",
            f"{len(names)} weights end within a block of {rows} rows, and others follow them in what engines compute "
            f"as one: {listed(names)}.", tuple(names),
            "vLLM 0.32.0 loads no such file of Qwen3.5: the fused weight has fewer rows of scales than its members.",
            "For vLLM, write it with blocks that divide them (`--block`), or with a scale a row (`--format fp8-channel "
            "--layout compressed-tensors`).",
        )  # fmt: skip


CHECKS = (_suffixes, _scale_dtypes, _heads, _kv, _tensor_parallel, _fused_blocks)
