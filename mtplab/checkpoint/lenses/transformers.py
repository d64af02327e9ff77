"""transformers as read in its 5.24.0 wheel, with compressed-tensors 0.20.1: which list it takes and how it matches.

Only data; matching is in `matching.py`. Without a GPU its `fp8` reader multiplies scales in by the tensors alone,
which is not what is looked at here.
"""

from __future__ import annotations

from mtplab.checkpoint.lenses.base import SILENT, UNKNOWN, Consequence, Engine, Family, Fixed, Method

__all__ = ["TRANSFORMERS"]

_DRAFT = Fixed("", "ignored", "MTP tensors are dropped as they are loaded", parts=("draft",))
_ROUTER = Fixed(r"\.mlp\.gate$", "plain", "the router is no Linear module")
_EXPERTS = Fixed(
    r"\.experts\.\{",
    "unknown",
    "experts are stacked as they are loaded, and how this reader quantises them was not looked at",
    methods=("compressed-tensors", "fbgemm_fp8"),
)
_VISION = Fixed(r"^model\.visual\.", "ignored", "the text model has no vision tower")
_READS = "takes an entry for a regular expression from the start of a name, or for its end"
_UNSEEN = Consequence(UNKNOWN, "what its loader then does was not looked at")


def _rerooted(entries: list[str], method: str) -> list[str]:
    """Only the FP8 reader renames the list's entries along with the weights."""
    if method not in ("fp8", "mxfp8"):
        return entries
    old = "model.language_model."
    return ["model." + entry[len(old) :] if entry.startswith(old) else entry for entry in entries]


TRANSFORMERS = Engine(
    name="transformers",
    version="5.24.0",
    sources=(
        "transformers/quantizers/quantizers_utils.py (should_convert_module)",
        "transformers/quantizers/base.py (get_modules_to_not_convert, get_keys_to_not_convert)",
        "transformers/quantizers/quantizer_finegrained_fp8.py (_normalize_modules_to_not_convert)",
        "transformers/conversion_mapping.py (qwen3_5_text)",
        "https://github.com/huggingface/transformers/tree/v5.24.0",
    ),
    methods={
        "fp8": Method(
            rule="regex or end",
            keys=("modules_to_not_convert", "ignored_layers"),
            skip_empty=False,
            default=("lm_head",),
            reads=_READS,
            source="transformers/integrations/finegrained_fp8.py (replace_with_fp8_linear)",
        ),
        "mxfp8": Method(
            rule="regex or end",
            keys=("modules_to_not_convert", "ignored_layers"),
            skip_empty=False,
            default=("lm_head",),
            reads=_READS,
            source="transformers/integrations/finegrained_fp8.py (replace_with_fp8_linear)",
        ),
        "fbgemm_fp8": Method(
            rule="regex or end",
            keys=("modules_to_not_convert",),
            skip_empty=False,
            default=("lm_head",),
            reads=_READS,
            source="transformers/integrations/fbgemm_fp8.py",
            fp8_for_plain=_UNSEEN,
        ),
        "compressed-tensors": Method(
            rule="full name or re:, unfused",
            keys=("ignore",),
            reads="takes an entry for a full name, or for a regular expression after re:",
            source="compressed_tensors/utils/match.py 0.20.1 (match_name, is_match)",
            untargeted="plain",
            class_parts=False,
            fp8_for_plain=_UNSEEN,
        ),
        "quark": Method(
            rule="full name",
            keys=(),
            reads="",
            source="transformers/quantizers/quantizer_quark.py",
            unknown="leaves quark files to the quark package, which was not looked at",
        ),
        "auto-round": Method(
            rule="full name",
            keys=(),
            reads="",
            source="transformers/quantizers/quantizer_auto_round.py",
            unknown="leaves auto-round files to the auto-round package, which was not looked at",
        ),
        "torchao": Method(
            rule="full name",
            keys=(),
            reads="",
            source="transformers/quantizers/quantizer_torchao.py",
            unknown="takes a stored torchao tensor as the file's metadata says; the list's part in it is not known",
        ),
    },
    families={
        "": Family(
            fixed=(_DRAFT, _ROUTER, _EXPERTS),
            note="no names of this model family were looked at: asked with those on disk, routers taken for no Linear",
        ),
        "qwen3_5": Family(fixed=(_DRAFT, _ROUTER, _EXPERTS)),
        "qwen3_5 text": Family(
            renames=((r"^model\.language_model\.", "model."),),
            entries=_rerooted,
            fixed=(_DRAFT, _ROUTER, _EXPERTS, _VISION),
            note="releases before the list was renamed along with the weights leave entries under "
            "model.language_model. unmatched, silently (https://github.com/huggingface/transformers/issues/48349)",
        ),
        "qwen3_next": Family(fixed=(_DRAFT, _ROUTER, _EXPERTS)),
        "deepseek_v3": Family(fixed=(_DRAFT, _ROUTER, _EXPERTS)),
        "glm4_moe": Family(fixed=(_DRAFT, _ROUTER, _EXPERTS)),
    },
    fp8_for_plain=Consequence(
        SILENT, "values are cast to codes without a scale, and the missing scale is made up: no more than a warning"
    ),
    plain_for_fp8=Consequence(SILENT, "the raw codes are taken for weights, and the scale for a key too many"),
    unread="it warns and goes on without quantisation",
    unread_built="plain",
)
