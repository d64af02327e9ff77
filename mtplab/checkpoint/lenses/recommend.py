"""The exclusion list under which every engine builds what the file holds, as far as a list can say it.

Knows the methods' ways of writing a list, not the engines: that all agree is what the tests check.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtplab.checkpoint.lenses.base import View

__all__ = ["recommended_exclusions"]

_WRAPPED, _TEXT = "model.language_model.", "model."


def recommended_exclusions(views: Iterable[View], method: str) -> list[str]:
    """Full names, as on disk, of the linear modules that are stored unquantised, in order, each once.

    What lies under the multimodal wrapper's root stands under the text model's too: some readers of the text model
    compare names without renaming the list. `lm_head` is named even where it is tied and has no tensor: transformers
    quantises a head that its list leaves out. A fused module that is stored in part quantised no list can save.
    For auto-round these are the keys of `extra_config` (with `bits` 16), for compressed-tensors `ignore`, for ModelOpt
    `exclude_modules` or `ignore`, for Quark `exclude`.
    """
    found: dict[str, None] = {}
    head_is_quantised = False
    for view in views:
        if view.part == "head" and view.stored_fp8:
            head_is_quantised = True
        if view.kind != "linear" or view.stored_fp8:
            continue
        found[view.name] = None
        if view.name.startswith(_WRAPPED):
            found[_TEXT + view.name[len(_WRAPPED) :]] = None
    if not head_is_quantised:
        found["lm_head"] = None
    return list(found)
