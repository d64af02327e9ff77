"""Checks of the draft head: is it there, is it whole, and what it shares with the target."""

from __future__ import annotations

from collections.abc import Iterator

from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.subject import Subject

__all__ = ["CHECKS"]


def _complete(subject: Subject) -> Iterator[Finding]:
    head = subject.head
    if head is None:
        return
    where = subject.ckpt.files.folder / "config.json"
    if head.promised and not head.layers:
        if any(problem.kind == "missing-head" for problem in subject.ckpt.problems):
            return
        yield Finding(
            "error", "missing-head", f"{where} promises {head.promised} MTP layers, and no tensor belongs to one.", (),
            "Exporters drop the head: transformers skips mtp.* keys on load and never saves them. Engines then fail, "
            "or "
            "draft with what was never loaded: acceptance 0 %.",
            "Take the head's tensors from the original checkpoint, or set the number to 0.",
        )  # fmt: skip
    elif head.promised and head.layers < head.promised:
        yield Finding(
            "warning", "fewer-head-layers",
            f"{where} promises {head.promised} MTP layers, {head.layers} are on disk.", (),
            "An engine that builds all of them drafts with layers that were never loaded.", "Correct the number.",
        )  # fmt: skip
    if head.layers and head.missing:
        yield Finding(
            "error", "incomplete-head",
            f"The {head.family} head lacks {len(head.missing)} modules: {listed(head.missing)}.", head.missing,
            "They stay as they are initialised, without a message in most engines: acceptance falls to 0 %.",
            "Take them from the original checkpoint; a shard or an export left them out.",
        )  # fmt: skip


def _shared(subject: Subject) -> Iterator[Finding]:
    head = subject.head
    if head is None or not head.layers:
        return
    own = [name for name in head.shared if "shared_head" in name]
    if own:
        yield Finding(
            "warning", "shared-head-absent",
            f"The head has no vocabulary head of its own: {listed(own)} is not in the file.", tuple(own),
            "It is to be shared with the target's lm_head. An engine that does not know leaves it uninitialised: "
            "acceptance length 1.00 (vLLM pull request 34385).",
            "Copy lm_head.weight under that name, or use a release that shares it.",
        )  # fmt: skip


def _tied(subject: Subject) -> Iterator[Finding]:
    tied = subject.text.get("tie_word_embeddings", subject.config.get("tie_word_embeddings"))
    present = any(module.part == "head" for module in subject.modules)
    if tied is False and not present and len(subject.modules) > 1 and "architectures" in subject.config:
        yield Finding(
            "error", "no-lm-head", "tie_word_embeddings is false, and there is no lm_head.", (),
            "The target's logits come from a matrix that was never loaded; the draft head uses the same one.",
            "Restore lm_head.weight, or set tie_word_embeddings to true if they were tied.",
        )  # fmt: skip
    if tied is True and present:
        names = [module.name for module in subject.modules if module.part == "head"]
        yield Finding(
            "note", "tied-head-stored",
            f"tie_word_embeddings is true, and {listed(names)} is stored as well.", tuple(names),
            "Engines use the embedding; the stored one counts where the config is ignored.",
        )  # fmt: skip


def _precision(subject: Subject) -> Iterator[Finding]:
    head = subject.head
    if head is None or not head.layers or subject.quantization is None:
        return
    fc = [
        module.name
        for module in subject.linears
        if module.weight == "fp8"
        and module.name.endswith(("mtp.fc", ".eh_proj", ".input_proj"))
        and module.part == "draft"
    ]
    if fc:
        yield Finding(
            "warning", "fp8-fusion",
            f"The head's fusion is FP8: {listed(fc)}.", tuple(fc),
            "Published releases keep it in BF16, and several engines build it so whatever is stored. It joins "
            "embedding "
            "and hidden state, whose sizes differ.",
            "Keep it in BF16 (mtplab quantize --exclude), or check the acceptance that it costs.",
        )  # fmt: skip


CHECKS = (_complete, _shared, _tied, _precision)
