"""Checks of the files: what the reader found at fault, what lies beside, where links lead, copies that disagree."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.remedies import quantize_command
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.config_copies import quantization_copies
from mtplab.checkpoint.names import draft_prefixes, module_of, part_of
from mtplab.checkpoint.strict_json import shown

__all__ = ["CHECKS"]

# kind of fault → (why it matters, what to do); `{copy}` stands for the command that copies the checkpoint
_TOLD: dict[str, tuple[str, str]] = {
    "unexplained-fp8": (
        "A loader that follows config.json takes the codes for values: raw numbers up to 448.",
        "Restore the config.json the weights were published with.",
    ),
    "unknown-layout": ("No reader knows how these codes become values.", "Export the weights again."),
    "no-scheme": (
        "An engine builds the module in high precision and reads raw codes, or refuses to load.",
        "Add the module to a group's targets, or export it in BF16.",
    ),
    "dtype": ("The codes would be decoded by another format's rule.", "Correct the config, or export again."),
    "missing-scale": (
        "The codes are read as values up to 448: output is noise, and acceptance 0 %, where it is in the head.",
        "Download or export the checkpoint again; the exporter dropped the scale.",
    ),
    "scale-dtype": ("Kernels read the scale's bytes as another type.", "Write scales as F32, BF16 or F8_E8M0."),
    "scale-grid": (
        "A reader that infers the block size from the shapes scales the wrong values, silently.",
        "Correct the block size in the config, or export the weight again.",
    ),
    "missing-weight": (
        "Loaders leave the scale unconsumed and the module as it was initialised.",
        "A shard is missing, or the export dropped the weight: take the full checkpoint.",
    ),
    "packed": ("What is not FP8 is not read here.", "Take the checkpoint's BF16 or FP8 release."),
    "bytes-as-integers": (
        "Readers that trust the dtype compute with integers; transformers does, and reports nothing.",
        "Write the weights as F8_E4M3: {copy}.",
    ),
    "junk-scale": (
        "A reader that multiplies whatever has a scale turns the weight into noise: such scales are often "
        "uninitialised memory.",
        "Remove the scale, and list the module among the exclusions.",
    ),
    "nothing-quantised": (
        "Engines build FP8 layers, find no scales, and fail or run with what they were initialised to.",
        "Remove the quantisation config, or take the FP8 weights it belongs to.",
    ),
    "unindexed": ("Whatever follows the index never reads them.", "Rebuild the index."),
    "unindexed-head": (
        "Whatever follows the index runs without a head, or drafts with one that was never loaded: acceptance 0 %.",
        "Rebuild the index.",
    ),
    "unused-layers": ("They take room and are not run.", "If they belong to the model, correct the number."),
    "missing-head": (
        "Engines that are told to speculate fail, or run a head that was never loaded: acceptance 0 %.",
        "Set the number to 0 to run without a head, or take a checkpoint that has its head.",
    ),
}


def _problems(subject: Subject) -> Iterator[Finding]:
    if subject.ckpt.refused is not None:
        yield Finding(
            "error", "not-read", str(subject.ckpt.refused), (),
            "The values of its quantised weights cannot be told; sizes and names are below as they are stored.",
            "Convert the checkpoint, or take its BF16 or FP8 release.",
        )  # fmt: skip
        return
    by_kind: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for problem in subject.ckpt.problems:
        by_kind.setdefault((problem.severity, problem.kind), []).append((problem.tensor, problem.message))
    drafts = draft_prefixes(subject.config)
    for (severity, kind), found in by_kind.items():
        if kind == "missing-head":  # a run without it is fine, and is all that a run can be
            severity = "error"
        if kind == "unindexed":
            lost = [name for name in subject.ckpt.files.unindexed if part_of(module_of(name), drafts) == "draft"]
            if lost:
                severity, kind = "error", "unindexed-head"
                found = [(name, found[0][1] + f" {len(lost)} of them are the draft head's.") for name in lost[:1]]
                found += [(name, "") for name in lost[1:]]
        why, fix = _TOLD.get(kind, ("", ""))
        fix = fix.format(copy=quantize_command(subject)) if "{copy}" in fix else fix
        more = f" ({len(found) - 1} more of this kind)" if len(found) > 1 and found[1][1] else ""
        yield Finding(severity, kind, found[0][1] + more, tuple(name for name, _ in found if name), why, fix)


def _beside(subject: Subject) -> Iterator[Finding]:
    unused = subject.ckpt.files.unused
    if unused:
        yield Finding(
            "warning", "unused-file",
            f"{len(unused)} safetensors files lie in the folder and belong to no index: "
            f"{listed([file.name for file in unused])}.", (),
            "Engines differ: some load every *.safetensors there is, and then have tensors twice.",
            "Move them elsewhere, or rebuild the index.",
        )  # fmt: skip


def _links(subject: Subject) -> Iterator[Finding]:
    folder = subject.ckpt.files.folder
    away = []
    for shard in subject.ckpt.files.shards:
        real, expected = os.path.realpath(shard), os.path.join(os.path.realpath(folder), os.path.relpath(shard, folder))
        if real != expected:
            away.append(f"{shard.name} -> {real}")
    if away:
        yield Finding(
            "note", "links",
            f"{len(away)} files are links, as a hub cache's are: {listed(away, 2)}.", (),
            "What is read is what they lead to.",
        )  # fmt: skip


def _copies(subject: Subject) -> Iterator[Finding]:
    copies = quantization_copies(subject.config, subject.ckpt.files.folder)
    for (first, said), (other, also) in itertools.pairwise(copies):
        differing = [key for key in said if key in also and said[key] != also[key]]
        if differing:
            key = differing[0]
            yield Finding(
                "warning", "configs-disagree",
                f"{first} says {key} {shown(said[key])}, {other} says {shown(also[key])}.", (),
                "Engines read one or the other: vLLM prefers config.json, TensorRT-LLM hf_quant_config.json.",
                "Make them alike; the tensors show which is right.",
            )  # fmt: skip


CHECKS = (_problems, _beside, _links, _copies)
