"""Checks of the exclusion list against the tensors: the kind of fault that makes acceptance 0 %."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.remedies import without_fp8
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.lenses.fused import GROUPS
from mtplab.checkpoint.names import nearest, normalised
from mtplab.checkpoint.strict_json import shown

__all__ = ["ALWAYS_PLAIN", "CHECKS", "PLAIN"]

# linear modules that every engine builds in high precision whatever a list says, since no release ever quantised them
ALWAYS_PLAIN = re.compile(
    r"(^|\.)(lm_head|head|embed_tokens|output|gate|router|eh_proj|shared_expert_gate|weights_proj|indexers_proj|"
    r"e_score_correction_bias)$"
)
PLAIN = ("bf16", "f16", "f32")


def _unlisted(subject: Subject) -> Iterator[Finding]:
    """Stored in high precision, and nothing says so."""
    if subject.quantization is None or not any(module.weight == "fp8" for module in subject.modules):
        return
    scheme_of = subject.quantization.scheme_of
    found = [
        module
        for module in subject.linears
        if module.weight in PLAIN
        and module.name not in subject.entry_of
        and not ALWAYS_PLAIN.search(module.name)
        and (scheme := scheme_of(module.name)) is not None
        and not scheme.foreign
    ]
    # a format may say by other means what it quantises: auto-round names the blocks
    inside = subject.content.get("block_name_to_quantize")
    if isinstance(inside, str):
        blocks = tuple(f"{block}." for block in inside.split(","))
        found = [module for module in found if module.name.startswith(blocks)]
    bm, bn = next(
        (module.block for module in subject.linears if module.block is not None and len(module.block) == 2), (1, 1)
    )
    ragged = [m for m in found if m.shape[0] % bm or m.shape[1] % bn] if min(bm, bn) > 1 else []
    whole = [module for module in found if module not in ragged]
    for part, modules in (
        ("draft", [m for m in whole if m.part == "draft"]),
        ("", [m for m in whole if m.part != "draft"]),
    ):
        if modules:
            names = [module.name for module in modules]
            yield Finding(
                "error", "unlisted-plain",
                f"{len(names)} {'modules of the draft head' if part else 'linear modules'} are stored in "
                f"{modules[0].stored}, and {subject.quantization.where} lists none of them: {listed(names)}.",
                tuple(names),
                "An engine that follows the list builds them as FP8, finds no scale on disk, and fails to load or "
                "keeps what they were initialised to: "
                + ("built as FP8, stored as BF16, acceptance 0 %." if part else "the target's output is noise."),
                f"Add them to {subject.list_key}.",
            )  # fmt: skip
    if ragged:
        names = [module.name for module in ragged]
        yield Finding(
            "warning", "untileable",
            f"{len(names)} linear modules that are no multiple of {bm}x{bn} are stored in {ragged[0].stored} and not "
            f"listed: {listed(names)}.", tuple(names),
            "transformers' writer leaves such weights in high precision without listing them; engines build them as "
            "FP8.",
            f"Add them to {subject.list_key}.",
        )  # fmt: skip


def _listed_as_fp8(subject: Subject) -> Iterator[Finding]:
    found = [module for module in subject.linears if module.weight == "fp8" and module.name in subject.entry_of]
    for part, modules in (
        ("draft", [m for m in found if m.part == "draft"]),
        ("", [m for m in found if m.part != "draft"]),
    ):
        if modules:
            names = [module.name for module in modules]
            assert subject.quantization is not None
            yield Finding(
                "error", "listed-fp8",
                f"{len(names)} modules are stored as FP8 with a scale although {subject.quantization.where} lists "
                f"them: {listed(names)} (by {shown(subject.entry_of[names[0]])}).", tuple(names),
                "An engine that follows the list builds them in BF16 and reads raw codes, or leaves their scales "
                "unconsumed" + (": acceptance 0 %." if part else "."),
                f"Take the entries that cover them out of {subject.list_key}, or store them in BF16: "
                f"{without_fp8(subject, names)}.",
            )  # fmt: skip


def _unmatched(subject: Subject) -> Iterator[Finding]:
    if subject.quantization is None:
        return
    names = [module.name for module in subject.modules]
    _ = subject.entry_of  # asks every module, which is what marks the entries that match
    # a tied or shared head has no tensor of its own, and every published list names it
    shared = subject.head.shared if subject.head is not None else ()
    idle = [e for e in subject.listed.unmatched(names) if not e.endswith("lm_head") and normalised(e) not in shared]
    if not idle:
        return
    close = nearest(idle[0], names, 1)
    yield Finding(
        "warning", "unmatched-entry",
        f"{subject.quantization.where}: {len(idle)} entries of {subject.list_key} name no module of this checkpoint: "
        f"{listed(idle)}" + (f"; nearest to the first: {shown(close[0])}." if close else "."), tuple(idle),
        "What they were to protect is not protected: engines build it as FP8.",
        "Correct the names to those on disk, or remove the entries.",
    )  # fmt: skip


def _other_root(subject: Subject) -> Iterator[Finding]:
    if subject.quantization is None:
        return
    on_disk = {module.name for module in subject.modules}
    moved = [
        entry
        for entry in subject.quantization.exclusions
        if entry not in on_disk and normalised(entry) != entry and normalised(entry) in on_disk
    ]
    if moved:
        yield Finding(
            "warning", "other-root",
            f"{len(moved)} entries of {subject.list_key} have the multimodal model's root, the tensors the text "
            f"model's: {listed(moved, 2)}.", tuple(moved),
            "A loader that compares names as they stand matches none of them (transformers issue 48349: loaded without "
            "a message, and wrong).",
            f"Write them as they stand on disk: {shown(normalised(moved[0]))}.",
        )  # fmt: skip


def _split_draft(subject: Subject) -> Iterator[Finding]:
    """A list that names some of the head's high-precision modules, and not its siblings."""
    draft = [
        m for m in subject.linears if m.part == "draft" and m.weight in PLAIN and not ALWAYS_PLAIN.search(m.name)
    ]
    named = [module.name for module in draft if module.name in subject.entry_of]
    others = [module.name for module in draft if module.name not in subject.entry_of]
    if named and others and subject.quantization is not None and any(m.weight == "fp8" for m in subject.modules):
        yield Finding(
            "warning", "partial-draft-list",
            f"{subject.list_key} names {len(named)} high-precision modules of the draft head ({listed(named, 2)}) "
            f"and not the other {len(others)} ({listed(others, 2)}).", tuple(others),
            "Engines build the head from the list: a head half FP8 is looked for, and its scales are not there.",
            f"List the others by full name too in {subject.list_key}: engines differ in what a pattern covers.",
        )  # fmt: skip


def _fused(subject: Subject) -> Iterator[Finding]:
    """Modules that engines fuse into one, of which some are FP8 and others not."""
    by_layer: dict[str, dict[str, str]] = {}
    for module in subject.linears:
        parent, _, last = module.name.rpartition(".")
        if module.weight == "fp8" or module.weight in PLAIN:  # what cannot be used is told elsewhere
            by_layer.setdefault(parent, {})[last] = module.weight
    split: dict[tuple[str, ...], list[str]] = {}
    for parent, weights in by_layer.items():
        for members in GROUPS:
            kinds = {weights[name] == "fp8" for name in members if name in weights}
            if len(kinds) == 2:
                split.setdefault(members, []).append(parent)
    quantised = {module.name for module in subject.linears if module.weight == "fp8"}
    for members, parents in split.items():
        mixed = [name for parent in parents for one in members if (name := f"{parent}.{one}") in quantised]
        yield Finding(
            "warning", "fused-split",
            f"{', '.join(members)} are part FP8, part not, in {len(parents)} layers: {listed(parents)}.",
            tuple(f"{parent}.{name}" for parent in parents for name in members),
            "Engines that fuse them into one product (vLLM, SGLang) refuse to load such a checkpoint.",
            f"{without_fp8(subject, mixed)} makes all of them BF16 and lists them.",
        )  # fmt: skip


CHECKS = (_unlisted, _listed_as_fp8, _unmatched, _other_root, _split_draft, _fused)
