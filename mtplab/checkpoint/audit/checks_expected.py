"""Checks that what config.json asks for is there, and of the size it asks for."""

from __future__ import annotations

from collections.abc import Iterator

from mtplab.checkpoint.audit.expected import expected_modules
from mtplab.checkpoint.audit.finding import Finding, listed
from mtplab.checkpoint.audit.subject import Subject
from mtplab.checkpoint.names import nearest, normalised
from mtplab.checkpoint.strict_json import shown

__all__ = ["CHECKS"]

# one matrix in place of several, as some exports have it
_INSTEAD = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_a": "in_proj_ba",
    "in_proj_b": "in_proj_ba",
}  # fmt: skip


def _expected(subject: Subject) -> Iterator[Finding]:
    if subject.ckpt.refused is not None:
        return
    heads = subject.head.layers if subject.head is not None else 0
    asked = expected_modules(subject.text, heads)
    here = {normalised(module.name): module for module in subject.modules}
    missing = [name for name in asked if name not in here and not _fused(name, asked[name], here)]
    if 2 * len(missing) > len(asked) + 1:  # other names altogether, or a part of a checkpoint
        return
    if missing:
        parent = missing[0].rpartition(".")[0]
        alike = [  # of the same shape, in the same place, and not asked for
            name
            for name in here
            if name not in asked and name.rpartition(".")[0] == parent and here[name].shape == asked[missing[0]]
        ]
        close = nearest(missing[0], alike, 1)
        hint = f" There is {shown(close[0])} of its shape, which is not asked for: was it renamed?" if close else ""
        yield Finding(
            "error", "absent",
            f"config.json asks for {len(missing)} module{'s' if len(missing) > 1 else ''} that the files do not have: "
            f"{listed(missing)}.{hint}", tuple(missing),
            "An engine refuses to load, or leaves them as they are initialised: garbage, and acceptance 0 % where they "
            "are the head's.",
            "Rename what was renamed, or take the tensors from the original checkpoint.",
        )  # fmt: skip
    wrong = [
        name
        for name, shape in asked.items()
        if name in here and here[name].weight in ("fp8", "bf16", "f16", "f32") and here[name].shape != shape
    ]
    if wrong:
        first = wrong[0]
        yield Finding(
            "error", "wrong-shape",
            f"{len(wrong)} module{'s have' if len(wrong) > 1 else ' has'} another shape than config.json asks for: "
            f"{listed(wrong)}; {first} is {list(here[first].shape)}, expected {list(asked[first])}.", tuple(wrong),
            "Engines refuse to load it, or cut or pad it.",
            "The config belongs to another model, or the export cut the tensor: restore the one that is wrong.",
        )  # fmt: skip


def _fused(name: str, shape: tuple[int, ...], here: dict[str, object]) -> bool:
    parent, _, last = name.rpartition(".")
    if len(shape) == 3 and last in ("gate_proj", "up_proj", "down_proj"):  # a stack that lies as single experts
        return all(f"{parent}.experts.{expert}.{last}" in here for expert in range(shape[0]))
    group, _, number = parent.rpartition(".")
    if group.endswith(".experts") and number.isdigit():  # stacked: gate above up, or one projection of all experts
        return any(f"{group}.{stack}" in here for stack in (_INSTEAD.get(last), last))
    return last in _INSTEAD and f"{parent}.{_INSTEAD[last]}" in here


CHECKS = (_expected,)
