"""FP8 checkpoints of the bundled model with a mistake planted in each, of which `vllm_loads.py` asks what vLLM makes.

Written by `quantize_checkpoint`, then changed in config.json and, where the mistake lies there, among the tensors.
Knows nothing of engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtplab.checkpoint.convert import quantize_checkpoint

SOURCE = Path(__file__).resolve().parent.parent / "data" / "tiny-qwen3_5"
# K and V have 64 rows: blocks of 64 are whole where QKV is one weight
LAYOUTS: dict[str, dict[str, Any]] = {
    "fp8": {"block": (64, 128)},
    "ct": {"format": "fp8-channel", "layout": "compressed-tensors"},
    "tensor": {"format": "fp8-tensor"},
    "blocks of 128": {},
    "blocks of 192": {"block": (192, 128)},
    "ct, blocks of 128": {"layout": "compressed-tensors"},
    "ct, blocks of 64": {"layout": "compressed-tensors", "block": (64, 128)},
}
FC, HEAD, LAST = "mtp.fc", "mtp.layers.0", "model.layers.3"

Tensors = dict[str, torch.Tensor]
Listed = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class Planted:
    """A checkpoint: its layout, more `options` of its conversion (what is FP8 in the file), and what is changed then:
    the `entries` of its list, its `tensors`, its quantisation `config`. `beyond`: the kind of the audit's finding that
    tells of what the lens does not look at."""

    what: str
    layout: str = "fp8"
    entries: Listed | None = None
    tensors: Callable[[Tensors], None] | None = None
    config: Callable[[dict[str, Any]], None] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    beyond: str = ""


def without(*names: str) -> Listed:
    """The list without these entries."""
    return lambda listed: [entry for entry in listed if entry not in names]


def swapped(old: str, *new: str) -> Listed:
    """The list with an entry replaced, or left out."""
    return lambda listed: [*without(old)(listed), *new]


def added(*names: str) -> Listed:
    """The list with more entries."""
    return lambda listed: [*listed, *names]


def each(change: Callable[[str], str]) -> Listed:
    """The list with every entry changed."""
    return lambda listed: [change(entry) for entry in listed]


def only(*entries: str) -> Listed:
    """A list of these entries alone."""
    return lambda listed: list(entries)


def dropped(name: str) -> Callable[[Tensors], None]:
    """A tensor left out."""

    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    """Every tensor whose name ends so, under another."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(old)]:
            tensors[name.removesuffix(old) + new] = tensors.pop(name)

    return change


def orphaned(name: str, *shape: int) -> Callable[[Tensors], None]:
    """A scale that no weight has."""
    return lambda tensors: tensors.update({name: torch.full(shape, 0.01)})


def headless(listed: list[str]) -> list[str]:
    """The list without the head's entries."""
    return [entry for entry in listed if not entry.startswith("mtp.")]


def head_plain(what: str, *entries: str, layout: str = "fp8") -> Planted:
    """The whole head in BF16, and these entries for it."""
    return Planted(
        what, layout, lambda listed: [*headless(listed), *entries], options=(("draft_exclude", ("mtp.*", "published")),)
    )


def fp8_fc(what: str, entries: Listed | None = None, layout: str = "fp8", **more: Any) -> Planted:
    """The head all FP8, its fusion too."""
    return Planted(what, layout, entries, options=(("draft_exclude", "none"),), **more)


def kept(*names: str) -> tuple[tuple[str, Any], ...]:
    """Modules of the target that are BF16 in the file, besides those published so."""
    return (("exclude", ("published", *names)), ("draft_exclude", "published"))


FC_SCALE, DOWN_SCALE = f"{FC}.weight_scale_inv", f"{HEAD}.mlp.down_proj.weight_scale_inv"
QKV = tuple(f"{LAST}.self_attn.{name}_proj" for name in "qkv")
AB = tuple(f"model.layers.{layer}.linear_attn.in_proj_{x}" for layer in range(3) for x in "ab")

CASES: dict[str, Planted] = {
    # Hugging Face's fp8 in blocks
    "sound": Planted("nothing: the control"),
    "fc-unlisted": Planted("mtp.fc is BF16, and not listed", entries=without(FC)),
    "fc-listed": fp8_fc("mtp.fc is FP8, and listed", added(FC)),
    "fc-fp8": fp8_fc("nothing: mtp.fc is FP8, and not listed"),
    "fc-model": Planted("mtp.fc is BF16, listed as model.mtp.fc", entries=swapped(FC, f"model.{FC}")),
    "fc-case": Planted("mtp.fc is BF16, listed as MTP.fc", entries=swapped(FC, "MTP.fc")),
    "fc-weight": Planted("mtp.fc is BF16, listed as mtp.fc.weight", entries=swapped(FC, f"{FC}.weight")),
    "fc-short": Planted("mtp.fc is BF16, listed as fc", entries=swapped(FC, "fc")),
    "fc-parent": Planted("mtp.fc is BF16, listed as mtp", entries=swapped(FC, "mtp")),
    "fc-glob": Planted("mtp.fc is BF16, listed as *.mtp.*", entries=swapped(FC, "*.mtp.*")),
    "fc-re": Planted(r"mtp.fc is BF16, listed as re:mtp\..*", entries=swapped(FC, r"re:mtp\..*")),
    "head-glob": head_plain("the head is BF16, listed as mtp.*", "mtp.*"),
    "head-names": head_plain(
        "nothing: the head is BF16, listed name by name", FC,
        *(f"{HEAD}.self_attn.{x}_proj" for x in "qkvo"), *(f"{HEAD}.mlp.{x}_proj" for x in ("gate", "up", "down")),
    ),
    "head-fused": head_plain(
        "nothing: the head is BF16, listed by fused names", FC,
        *(f"{HEAD}.{x}" for x in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    ),
    "head-behind": head_plain(
        "the head is BF16, numbered behind the target (model.layers.4)", FC,
        *(f"model.layers.4.self_attn.{x}_proj" for x in "qkvo"),
        *(f"model.layers.4.mlp.{x}_proj" for x in ("gate", "up", "down")),
    ),
    "head-next": head_plain(
        "the head is BF16, its layer off by one (mtp.layers.1)", FC,
        *(f"mtp.layers.1.self_attn.{x}_proj" for x in "qkvo"),
        *(f"mtp.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")),
    ),
    "o-next": Planted(
        "model.layers.3's o_proj is BF16, listed as layer 4's",
        entries=swapped(f"{LAST}.self_attn.o_proj", "model.layers.4.self_attn.o_proj"),
        options=kept(f"{LAST}.self_attn.o_proj"),
    ),
    "q-listed": Planted("all FP8, q_proj of QKV listed", entries=added(QKV[0])),
    "q-plain": Planted("q_proj of QKV is BF16, and listed", options=kept(QKV[0])),
    "gate-listed": Planted("all FP8, gate_proj of gate_up listed", entries=added(f"{HEAD}.mlp.gate_proj")),
    "qkv-of-qkvz": Planted(
        "all FP8, in_proj_qkv of in_proj_qkvz listed", entries=added("model.layers.0.linear_attn.in_proj_qkv")
    ),
    "b-unlisted": Planted("in_proj_b of in_proj_ba is BF16, and not listed", entries=without(AB[1])),
    "ab-unlisted": Planted("in_proj_a and in_proj_b are BF16, and not listed", entries=without(*AB)),
    "empty": Planted("an empty list", entries=only()),
    "substrings": Planted(
        "parts of names listed: in_proj_a, in_proj_b, fc", entries=only("in_proj_a", "in_proj_b", "fc")
    ),
    "weights": Planted("every entry ends in .weight", entries=each(lambda entry: f"{entry}.weight")),
    "root": Planted(
        "nothing: listed under model.language_model.",
        entries=each(lambda entry: entry.replace("model.", "model.language_model.", 1)),
    ),
    "root-lost": Planted(
        "in_proj_a and in_proj_b listed under layers., without model.",
        entries=each(lambda entry: entry.removeprefix("model.")),
    ),
    "head-unlisted": Planted("nothing: lm_head is not listed, which needs no entry", entries=without("lm_head")),
    "other-key": Planted(
        "nothing: the list stands under ignored_layers",
        config=lambda said: said.update(ignored_layers=said.pop("modules_to_not_convert")),
    ),
    "two-keys": Planted(
        "ignored_layers holds lm_head alone, beside the whole list",
        config=lambda said: said.update(ignored_layers=["lm_head"]),
    ),
    "scale-missing": Planted("down_proj of the head has no scale", tensors=dropped(DOWN_SCALE)),
    "scale-orphaned": Planted("mtp.fc is BF16 and listed, and has a scale", tensors=orphaned(FC_SCALE, 4, 4)),
    "scale-less": fp8_fc("mtp.fc is FP8 and listed, and has no scale", added(FC), tensors=dropped(FC_SCALE)),
    "scale-name": Planted("scales are called weight_scale", tensors=renamed(".weight_scale_inv", ".weight_scale")),
    "tensor": Planted("nothing in its list: one scale a tensor, called weight_scale_inv", "tensor"),
    "blocks": Planted("nothing in its list: K ends within a block of 128 rows", "blocks of 128", beyond="fused-blocks"),
    "blocks-192": Planted(
        "nothing in its list: gate_proj ends within a block of 192 rows", "blocks of 192", beyond="fused-blocks"
    ),
    # compressed-tensors, a scale a row but for the last two
    "ct-sound": Planted("nothing: the control", "ct"),
    "ct-fc-unlisted": Planted("mtp.fc is BF16, and not listed", "ct", without(FC)),
    "ct-fc-listed": fp8_fc("mtp.fc is FP8, and listed", added(FC), "ct"),
    "ct-fc-weight": Planted("mtp.fc is BF16, listed as mtp.fc.weight", "ct", swapped(FC, f"{FC}.weight")),
    "ct-fc-end": Planted(r"mtp.fc is BF16, listed as re:fc$", "ct", swapped(FC, "re:fc$")),
    "ct-head-glob": head_plain("the head is BF16, listed as mtp.*", "mtp.*", layout="ct"),
    "ct-head-re": head_plain("nothing: the head is BF16, listed as re:.*mtp.*", "re:.*mtp.*", layout="ct"),
    "ct-head-model": head_plain(r"the head is BF16, listed as re:model\.mtp\..*", r"re:model\.mtp\..*", layout="ct"),
    "ct-head-case": head_plain("the head is BF16, listed as re:.*MTP.*", "re:.*MTP.*", layout="ct"),
    "ct-q-listed": Planted("all FP8, q_proj of QKV listed", "ct", added(QKV[0])),
    "ct-ab-unlisted": Planted("in_proj_a and in_proj_b are BF16, and not listed", "ct", without(*AB)),
    "ct-ab-re": Planted(
        r"nothing: in_proj_a and in_proj_b listed as re:.*in_proj_[ab]$", "ct",
        lambda listed: [*without(*AB)(listed), "re:.*in_proj_[ab]$"],
    ),
    "ct-root-re": Planted(
        r"in_proj_a and in_proj_b listed as re:model\.language_model\..*in_proj_[ab]$", "ct",
        lambda listed: [*without(*AB)(listed), r"re:model\.language_model\..*in_proj_[ab]$"],
    ),
    "ct-root": Planted(
        "nothing: listed under model.language_model.", "ct",
        each(lambda entry: entry.replace("model.", "model.language_model.", 1)),
    ),
    "ct-empty": Planted("an empty list", "ct", only()),
    "ct-scale-missing": Planted(
        "down_proj of the head has no scale", "ct", tensors=dropped(DOWN_SCALE.removesuffix("_inv"))
    ),
    "ct-scale-orphaned": Planted(
        "mtp.fc is BF16 and listed, and has a scale", "ct", tensors=orphaned(f"{FC}.weight_scale", 256, 1)
    ),
    "ct-blocks": Planted(
        "nothing in its list: K ends within a block of 128 rows", "ct, blocks of 128", beyond="fused-blocks"
    ),
    "ct-blocks-ab": Planted(
        "in_proj_a and in_proj_b are BF16, and not listed", "ct, blocks of 64", without(*AB), beyond="untileable"
    ),
}  # fmt: skip


def write(name: str, folder: Path) -> Path:
    """The checkpoint of a case, in a folder of its name within `folder`."""
    case, made = CASES[name], folder / name
    quantize_checkpoint(SOURCE, made, **LAYOUTS[case.layout], **dict(case.options))
    file = made / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    said = config["quantization_config"]
    if case.entries is not None:
        key = "ignore" if "ignore" in said else "modules_to_not_convert"
        said[key] = case.entries(said[key])
    if case.config is not None:
        case.config(said)
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    if case.tensors is not None:
        tensors = load_file(made / "model.safetensors")
        case.tensors(tensors)
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made
