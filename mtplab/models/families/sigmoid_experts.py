"""Experts chosen by sigmoid scores and a bias, in groups, as DeepSeek-V3 has them and GLM-4.5 after it.

Keys are those of transformers' `DeepseekV3Config` and `Glm4MoeConfig`, which name them alike. No family of its own.
"""

from __future__ import annotations

from mtplab.models.fields import Fields
from mtplab.models.spec import DenseSpec, Feed, MixtureSpec

__all__ = ["read_feeds", "read_sigmoid_experts"]


def read_sigmoid_experts(fields: Fields) -> MixtureSpec:
    """Routed and shared experts; the shared ones are one MLP of all their inner features."""
    size, shared = fields.number("moe_intermediate_size"), fields.count("n_shared_experts", 1, top=65536)
    count, groups = fields.number("n_routed_experts", top=65536), fields.number("n_group", 1)
    found = MixtureSpec(
        count=count,
        top_k=fields.number("num_experts_per_tok"),
        size=size,
        shared_size=shared * size,
        scores="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        factor=fields.real("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=fields.number("topk_group", 1),
    )
    if count % groups or (groups > 1 and count < 2 * groups):
        raise fields.wrong("n_group", f"groups of 2 or more that n_routed_experts, {count}, divide into")
    if found.top_groups > groups:
        raise fields.wrong("topk_group", f"at most n_group, {groups}")
    reached = count // groups * found.top_groups
    if found.top_k > reached:
        raise fields.wrong("num_experts_per_tok", f"at most {reached}, the experts of topk_group groups")
    return found


def read_feeds(fields: Fields, layers: int, experts: MixtureSpec) -> list[Feed]:
    """What follows each target layer's attention: MLPs in the first `first_k_dense_replace`, then experts."""
    dense = fields.count("first_k_dense_replace", top=10_000)
    mlp = DenseSpec(fields.number("intermediate_size")) if dense else None
    return [mlp if mlp is not None and i < dense else experts for i in range(layers)]
