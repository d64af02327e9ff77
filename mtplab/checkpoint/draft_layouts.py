"""How each family of models names its MTP head, and where its config.json counts the head's layers.

Sources: the families' public checkpoints and the loaders of vLLM (model_executor/models/*_mtp.py) and transformers.
Names are those under the text model's own root. A table; it reads nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "BEHIND_COUNT",
    "COUNT_KEYS",
    "DEEPSEEK_V3",
    "FUSIONS",
    "FUSION_NORMS",
    "LAYOUTS",
    "MIMO",
    "OWN_COUNT",
    "QWEN",
    "ROOTS",
    "STEP",
    "HeadNames",
    "Layout",
]


@dataclass(frozen=True)
class HeadNames:
    """Modules of one of a head's layers, by their names on disk."""

    norm_embedding: str
    norm_hidden: str
    fc: str
    norm: str
    block: str  # prefix of the decoder block, with its dot
    embedding: str  # the head's own, where a family has one that a file may hold; "" where none
    head: str  # likewise


@dataclass(frozen=True)
class Layout:
    """How a family names its head. `{i}` is a head layer's number, `{n}` the target's number of decoder layers + i,
    `{last}` the number of the head's last layer."""

    family: str
    count_key: str  # in config.json: how many layers of a head there are
    root: str  # what all its names begin with; of those behind the target's layers, the target's own
    numbered: str  # what stands between the root and a head layer's number
    norms: tuple[str, str, str]  # of the embedding, of the hidden state, and the last one: full names
    joins: tuple[str, ...]  # matrices that join embedding and hidden state
    # of its own, which a file may leave out: the target's are used
    embedding: str = ""
    head: str = ""
    step_layers: int = 1  # layers on disk to one that config.json counts
    behind: bool = False  # whether head layers are numbered on behind the target's

    @property
    def layer(self) -> str:
        """Prefix of one head layer, as a regular expression whose only group is the number."""
        return re.escape(self.root + self.numbered) + r"([0-9]{1,4})\."

    @property
    def fusion(self) -> tuple[str, ...]:
        """Modules that join embedding and hidden state, and their norms."""
        return (*self.norms[:2], *self.joins, self.norms[2])

    @property
    def shared(self) -> tuple[str, ...]:
        """Modules that a file may leave out because the target's are used."""
        return tuple(filter(None, (self.embedding, self.head)))

    def names(self, i: int, layers: int, root: str = "model.") -> HeadNames:
        """Of head layer i on disk, where the target has so many decoder layers and its names begin with `root`."""

        def filled(name: str) -> str:
            name = name.format(i=i, n=layers + i)
            return root + name.removeprefix("model.") if name and self.behind else name

        block = filled(f"{self.root}{self.numbered}{'{n}' if self.behind else '{i}'}.")
        own = (*self.norms[:2], self.joins[0], self.norms[2])
        return HeadNames(*map(filled, own), block, filled(self.embedding), filled(self.head))


def _behind(part: str) -> str:
    return f"model.layers.{{n}}.{part}"


def _v3_norms(infix: str = "") -> tuple[str, str, str]:
    return _behind("enorm"), _behind("hnorm"), _behind(f"{infix}shared_head.norm")


QWEN = Layout(
    "Qwen3-Next, Qwen3.5 and later", "mtp_num_hidden_layers", "mtp.", "layers.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), ("mtp.fc",),
    embedding="mtp.embed_tokens", head="mtp.lm_head",
)  # fmt: skip
MIMO = Layout(
    "MiMo-7B", "num_nextn_predict_layers", "model.mtp_layers.", "",
    tuple(f"model.mtp_layers.{{i}}.{norm}" for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm")),
    ("model.mtp_layers.{i}.input_proj",),
)  # fmt: skip
# what is under shared_head lies one name deeper than DeepSeek-V3's, and nothing else does
STEP = Layout(
    "Step-3.5, 3.7", "num_nextn_predict_layers", "model.layers.", "", _v3_norms("transformer."),
    (_behind("eh_proj"),), head=_behind("transformer.shared_head.output"), behind=True,
)  # fmt: skip
DEEPSEEK_V3 = Layout(
    "DeepSeek-V3, GLM-4.5 and later", "num_nextn_predict_layers", "model.layers.", "", _v3_norms(),
    (_behind("eh_proj"),), embedding=_behind("embed_tokens"), head=_behind("shared_head.head"), behind=True,
)  # fmt: skip

LAYOUTS: tuple[Layout, ...] = (
    QWEN,
    Layout(
        "Nemotron-3", "num_nextn_predict_layers", "mtp.", "layers.",
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.{last}.final_layernorm"),
        ("mtp.layers.0.eh_proj",), step_layers=2,
    ),
    Layout(
        "DeepSeek-V4", "num_nextn_predict_layers", "mtp.", "",
        ("mtp.{i}.enorm", "mtp.{i}.hnorm", "mtp.{i}.norm"), ("mtp.{i}.e_proj", "mtp.{i}.h_proj"),
    ),
    Layout(
        "MiMo-V2", "num_nextn_predict_layers", "model.mtp.", "layers.",
        tuple(f"model.mtp.layers.{{i}}.{norm}" for norm in ("enorm", "hnorm", "final_layernorm")),
        ("model.mtp.layers.{i}.eh_proj",),
    ),
    MIMO,
    DEEPSEEK_V3,
    STEP,
)  # fmt: skip

# what config.json may call the number of head layers, the first that stands there counting
COUNT_KEYS = (*dict.fromkeys(layout.count_key for layout in LAYOUTS), "num_mtp_modules")
# of the layers that have a root of their own and are numbered from 0 (Qwen), and of those behind the target's
OWN_COUNT = LAYOUTS[0].count_key
BEHIND_COUNT = next(layout.count_key for layout in LAYOUTS if layout.behind)
# what the names of heads begin with that are not numbered among the target's layers
ROOTS = tuple(dict.fromkeys(layout.root for layout in LAYOUTS if not layout.behind))
# last names of the matrices that join embedding and hidden state: all that a head drafts passes through them
FUSIONS = frozenset(name.rpartition(".")[2] for layout in LAYOUTS for name in layout.joins)
# norms that a head's layer has beside its block's
FUSION_NORMS = frozenset(name.rpartition("}.")[2] for layout in LAYOUTS for name in layout.norms if "}." in name)
