"""Checks of the draft head: is it there, is it whole, and what it shares with the target."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtplab.checkpoint.audit.checks_lists import ALWAYS_PLAIN, PLAIN
from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.remedies import without_fp8
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.draft_layouts import FUSIONS
from mtplab.checkpoint.names import draft_prefixes, normalised, part_of
from mtplab.checkpoint.strict_json import shown

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
            "or draft with what was never loaded: acceptance 0 %.",
            "Take the head's tensors from the original checkpoint, or set the number to 0.",
        )  # fmt: skip
    elif head.promised and head.layers < head.promised * head.step_layers:
        yield Finding(
            "warning", "fewer-head-layers",
            f"{where} promises {head.promised} MTP layers"
            + (f" of {head.step_layers} each" if head.step_layers > 1 else "") + f", {head.layers} are on disk.", (),
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


_PUBLISHED_FP8 = {"e_proj", "h_proj"}  # of the fusions, those of DeepSeek-V4's release


def _precision(subject: Subject) -> Iterator[Finding]:
    head = subject.head
    if head is None or not head.layers or subject.quantization is None:
        return
    fc = [
        module.name
        for module in subject.linears
        if module.weight == "fp8"
        and module.name.rpartition(".")[2] in FUSIONS - _PUBLISHED_FP8
        and module.part == "draft"
    ]
    if fc:
        yield Finding(
            "warning", "fp8-fusion",
            f"The head's fusion is FP8: {listed(fc)}.", tuple(fc),
            "Published releases keep it in BF16, and several engines build it so whatever is stored. It joins "
            "embedding and hidden state, whose sizes differ.",
            f"Keep it in BF16 ({without_fp8(subject, fc)}), or check the acceptance that it costs.",
        )  # fmt: skip


def _counts(subject: Subject) -> Iterator[Finding]:
    """Places of config.json that count other numbers of MTP layers."""
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
    said = {}
    for where, content in (("", subject.config), ("text_config.", subject.text)):
        for key in keys if where == "" or content is not subject.config else ():
            if type(content.get(key)) is int:
                said[where + key] = content[key]
    if len(set(said.values())) > 1:
        yield Finding(
            "warning", "head-counts-disagree",
            f"config.json counts MTP layers twice: {', '.join(f'{key} {count}' for key, count in said.items())}.",
            (), "Engines read one or the other: some build layers that are not there, some leave out those that are.",
            "Make them alike; the tensors show which is right.",
        )  # fmt: skip
    head = subject.head
    if head is None or not head.layers:
        return
    if head.promised is None and not any(problem.kind == "unused-layers" for problem in subject.ckpt.problems):
        yield Finding(
            "note", "uncounted-head",
            f"There is a head of {head.layers} layer{'s' if head.layers > 1 else ''}, and config.json counts none.", (),
            "Engines that look there for speculation's depth find none, or take 1.", "",
        )  # fmt: skip
    elif 0 < (head.promised or 0) * head.step_layers < head.layers:
        yield Finding(
            "note", "more-head-layers",
            f"{head.layers} MTP layers are on disk, and config.json counts {head.promised}.", (),
            "Engines load as many as it counts; the others are not used.", "",
        )  # fmt: skip


def _kv_layout(subject: Subject) -> Iterator[Finding]:
    """Cached values per token and layer, the head's against the target's."""
    drafts = draft_prefixes(subject.config)
    widths: dict[str, dict[str, int]] = {"target": {}, "draft": {}}
    for module in subject.modules:
        layer, _, last = module.name.rpartition(".")
        if last in ("k_proj", "v_proj", "kv_a_proj_with_mqa", "wkv") and len(module.shape) == 2:
            part = widths["draft" if part_of(module.name, drafts) == "draft" else "target"]
            part[layer] = part.get(layer, 0) + module.shape[0]
    target = set(widths["target"].values())
    odd = {layer: width for layer, width in widths["draft"].items() if target and width not in target}
    if odd:
        first = next(iter(odd))
        yield Finding(
            "warning", "draft-kv-layout",
            f"{shown(first)} caches {odd[first]} values per token, the target's layers "
            f"{' or '.join(map(str, sorted(target)))}.", tuple(odd),
            "Engines that keep one page size for all layers refuse to start (vLLM issue 41559), or need a cache of its "
            "own for the head.", "Use a release that keeps the draft's cache apart.",
        )  # fmt: skip


def _numbering(subject: Subject) -> Iterator[Finding]:
    """Entries that name the head's layers as another engine numbers them."""
    count = subject.text.get("num_hidden_layers")
    head = subject.head
    if subject.quantization is None or head is None or not head.modules or type(count) is not int:
        return
    behind = re.compile(r"(?:model|mtp)\.layers\.([0-9]{1,4})(?:\.|$)")
    on_disk = tuple(f"{name}." for name in head.modules)
    other = []
    for entry in subject.quantization.exclusions:
        at = behind.match(normalised(entry))
        if at is None:
            continue
        if int(at[1]) >= count and not any(name.startswith(at[0].rstrip(".") + ".") for name in on_disk):
            other.append(entry)
    # norms and gates are built in high precision whatever a list says
    kept = [m.name for m in subject.linears if m.part == "draft" and m.weight in PLAIN]
    covering = (subject.entry_of.get(name, "") for name in kept if not ALWAYS_PLAIN.search(name))
    plain = list(dict.fromkeys(entry for entry in covering if entry.startswith("mtp.layers.")))
    if other:
        yield Finding(
            "warning", "draft-numbering",
            f"{len(other)} entries of {subject.list_key} number the head's layers behind the target's "
            f"({listed(other, 2)}); on disk they are called {shown(head.modules[0])} and so on.", tuple(other),
            "A reader that compares them with the names on disk protects none of them.",
            "Write them as they stand on disk.",
        )  # fmt: skip
    if plain:
        yield Finding(
            "note", "draft-numbering",
            f"{len(plain)} entries of {subject.list_key} name layers of the head from 0 on: {listed(plain, 2)}.",
            tuple(plain),
            f"Engines that number them behind the target's (mtp.layers.{count}) must rename the list as well; where "
            "one does not, these modules are built as FP8 (vLLM issue 55496).",
        )  # fmt: skip


def _indexer(subject: Subject) -> Iterator[Finding]:
    own = [m.name for m in subject.modules if m.part == "draft" and ".indexer." in m.name]
    if own:
        yield Finding(
            "note", "draft-indexer",
            f"The head has an indexer of its own: {listed(own, 2)}.", tuple(own),
            "An engine that gives the head the target's chosen positions instead leaves it unused, and acceptance is "
            "low (ATOM pull request 1362).",
        )  # fmt: skip


CHECKS = (_complete, _shared, _tied, _precision, _counts, _kv_layout, _numbering, _indexer)
