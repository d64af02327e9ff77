"""The audit of a checkpoint that is not written yet: this one, quantised again under another exclusion list.

What would be written is what `convert.decide` decides, as headers; nothing is read but headers, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.audit.audit import Audit, examine
from mtplab.checkpoint.config_json import with_quantization
from mtplab.checkpoint.header import TensorInfo

if TYPE_CHECKING:
    from mtplab.checkpoint.checkpoint import Checkpoint
    from mtplab.checkpoint.convert.decide import Decision
    from mtplab.checkpoint.convert.layouts import Recipe

__all__ = ["rewritten"]

# what the source's files show, and those to be written do not
_OF_FILES = ("links", "unused-file", "configs-disagree")


def rewritten(ckpt: Checkpoint, exclude: str | Sequence[str] | None = None, format: str | None = None) -> Audit:
    """What an audit would say of `mtplab quantize`'s output for this source, these exclusions and this `--format`.

    `format`: "fp8-block", "fp8-tensor", in layout "hf"; None makes a plain checkpoint "fp8-block", and leaves an FP8
    one in the layout it has, but for what is excluded and becomes BF16. `plan`, sizes, engines and findings are those
    of the folder that would be written. Raises as `quantize_checkpoint` does where it refuses source or settings.
    """
    from mtplab.checkpoint.checkpoint import Checkpoint
    from mtplab.checkpoint.convert.decide import Wish, decide
    from mtplab.checkpoint.convert.layouts import recipe_of

    if ckpt.refused is not None:
        raise ckpt.refused
    plain = ckpt.quantization is None
    recipe = recipe_of(format or "fp8-block", "hf") if plain or format is not None else None
    decision = decide(ckpt, Wish(recipe, exclude=exclude))
    tensors = {
        output.name: TensorInfo(output.name, output.dtype, output.shape, piece.source.file, 0, output.nbytes)
        for piece in decision.pieces.pieces
        for output in piece.outputs
    }
    shards = tuple(dict.fromkeys(info.file for info in tensors.values()))
    files = ckpt.files._replace(shards=shards, tensors=tensors, unindexed={}, unused=())
    found = examine(Checkpoint(ckpt.path, files, with_quantization(ckpt.config, _content(ckpt, decision, recipe))))
    return replace(
        found,
        method=f"{found.method}, as it would be written",
        findings=tuple(finding for finding in found.findings if finding.kind not in _OF_FILES),
    )


def _content(ckpt: Checkpoint, decision: Decision, recipe: Recipe | None) -> dict[str, Any]:
    from mtplab.checkpoint.convert.amend import amended
    from mtplab.checkpoint.convert.layouts import layouts

    if recipe is not None:
        return layouts()[recipe.layout].config(recipe, decision.kept)
    assert ckpt.found is not None and ckpt.quantization is not None
    return amended({"quant_method": ckpt.quantization.method, **ckpt.found.content}, decision.to_bf16)
