"""What a model is made of, in numbers: its layers one by one, their mixers and feeds, and what each keeps of a token.

Every family's file turns its config.json into these, and `build.py` turns these into layers. Knows nothing of files,
names or tensors, and imports no torch: memory is worked out from it, and sweeps are planned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from mtplab.errors import ConfigError

__all__ = [
    "AttentionSpec",
    "CacheRows",
    "DeltaSpec",
    "DenseSpec",
    "Geometry",
    "LayerSpec",
    "Llama3",
    "MixtureNames",
    "MixtureSpec",
    "MlaSpec",
    "ModelConfig",
    "Rotary",
    "Yarn",
]


@dataclass(frozen=True)
class Yarn:
    """YaRN's frequencies for contexts `factor` times the `original` one (arXiv 2309.00071, section 3): those that turn
    more than `beta_fast` times in it stay, those that turn less than `beta_slow` times are divided by `factor`, and a
    ramp lies between, over whole features where `truncate`. cos and sin are multiplied by `attention`."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's frequencies for contexts `factor` times the `original` one: those that turn more than `high` times in
    it stay, those that turn less than `low` times are divided by `factor`, and a ramp lies between."""

    factor: float
    original: int
    low: float
    high: float
    attention: float = 1.0  # what cos and sin are multiplied by, as YaRN's


@dataclass(frozen=True)
class Rotary:
    """Rotation of `dim` features of a head: the first half of them paired with the second or, `interleaved`, each even
    one with the next."""

    dim: int
    theta: float
    scaling: Yarn | Llama3 | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class CacheRows:
    """What a layer's cache keeps of a token: `sides` rows (K and V, or one for both) of `dim` features a head."""

    heads: int
    dim: int
    sides: int = 2


@dataclass(frozen=True)
class Geometry:
    """What an attention layer needs of a pass, which layers share that are alike in it."""

    rotary: Rotary
    rows: CacheRows
    group: int  # query heads to a KV head
    window: int | None = None  # a token sees so many, itself included; None for all before it


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention. `norms`: whether each head's q and k pass an RMSNorm. `gated`: the output is multiplied
    by sigmoid(gate), and q_proj holds each head's gate beside its query. `head_gated`: by one sigmoid for each head, of
    g_proj's. `bias`: of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    norms: bool = False
    gated: bool = False
    head_gated: bool = False
    bias: bool = False
    window: int | None = None

    @property
    def rows(self) -> CacheRows:
        """What its cache keeps of a token."""
        return CacheRows(self.kv_heads, self.head_dim)

    @property
    def geometry(self) -> Geometry:
        """What it needs of a pass."""
        return Geometry(self.rotary, self.rows, self.heads // self.kv_heads, self.window)


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of every head are
    linear in one row of `kv_rank` features a token, beside which the key has `rotary.dim` that turn, one for all heads.
    That row is what the cache keeps. A head's query has `nope_dim` features that do not turn and the turning ones;
    `q_rank`: what queries are made from is so wide, None for the hidden state itself. `scale`: of the scores."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    rotary: Rotary
    scale: float
    # of the norms of queries and rows: DeepSeek's code and transformers' leave it so whatever rms_norm_eps says
    norm_eps: float = 1e-6

    @property
    def q_dim(self) -> int:
        """Features of a head's query."""
        return self.nope_dim + self.rotary.dim

    @property
    def rows(self) -> CacheRows:
        """What its cache keeps of a token: the row, which is key and value at once."""
        return CacheRows(1, self.kv_rank + self.rotary.dim, sides=1)

    @property
    def geometry(self) -> Geometry:
        """What it needs of a pass."""
        return Geometry(self.rotary, self.rows, self.heads)


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta rule, which keeps a state in place of a cache. Counts are of heads, features and taps.

    `interleaved`: one projection gives q, k, v and z, a key head's beside each other, and another b and a likewise;
    else q, k and v of all heads are one projection, and z, b and a one each.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int
    interleaved: bool = False

    @property
    def key_dim(self) -> int:
        """Features of all key heads together."""
        return self.k_heads * self.k_dim

    @property
    def value_dim(self) -> int:
        """Features of all value heads together."""
        return self.v_heads * self.v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def conv_size(self) -> int:
        """Numbers of the convolution's state, of a sequence."""
        return (self.conv_kernel - 1) * self.conv_dim

    @property
    def state_size(self) -> int:
        """Numbers of the recurrent state, of a sequence, which are float32."""
        return self.v_heads * self.k_dim * self.v_dim


@dataclass(frozen=True)
class DenseSpec:
    """A gated MLP of `size` inner features, clamped to `limit` (`quant/gating.py`) where it has one."""

    size: int
    limit: float | None = None


@dataclass(frozen=True)
class MixtureNames:
    """What names on disk call a mixture's parts, within their layer. Experts lie one by one, `{experts}.{e}.gate_proj`
    and so on, or stacked [e, n, k]: `stacks` are such tensors and the projections that lie in each, one below the
    other. Together those are gate, up and down."""

    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    stacks: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("mlp.experts.gate_up_proj", ("gate_proj", "up_proj")),
        ("mlp.experts.down_proj", ("down_proj",)),
    )
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"

    def layer_of(self, module: str) -> str:
        """The layer that one of its experts' modules is of, with its dot."""
        return module.partition(f".{self.experts.partition('.')[0]}.")[0] + "."

    def experts_of(self, module: str) -> str:
        """What a layer's experts are called together, by one of their modules."""
        return self.layer_of(module) + self.experts


@dataclass(frozen=True)
class MixtureSpec:
    """`count` experts of `size` inner features, of which every token goes through `top_k`, and one shared by all.

    `scores`: "softmax" over the experts, or "sigmoid" of each; the `top_k` largest are taken, of sigmoids after a bias
    is added that chooses but does not weigh. With `groups` > 1 only experts of the `top_groups` groups whose two best
    sum highest are looked at. Weights are made to sum to 1 where `normalised`, then multiplied by `factor`.
    `shared_size` 0 for none; `shared_gated`: the shared one is multiplied by a sigmoid of its own. `limit` and
    `shared_limit` clamp the routed ones and the shared one (`quant/gating.py`).
    """

    count: int
    top_k: int
    size: int
    shared_size: int
    scores: str = "softmax"
    normalised: bool = True
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared_gated: bool = False
    limit: float | None = None
    shared_limit: float | None = None
    names: MixtureNames = MixtureNames()


Mixer = AttentionSpec | MlaSpec | DeltaSpec
Feed = DenseSpec | MixtureSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer; `number` as names on disk count it."""

    number: int
    mixer: Mixer
    feed: Feed

    @property
    def rows(self) -> CacheRows | None:
        """What its KV cache keeps of a token; None for a layer that has none."""
        return None if isinstance(self.mixer, DeltaSpec) else self.mixer.rows


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes: what it is called, its target's layers, and its head's, one for each module."""

    family: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int  # of the target, on disk
    layers: tuple[LayerSpec, ...]
    draft_layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    one_plus_norms: bool  # norms are stored zero-centred
    tied_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def mtp_layers(self) -> int:
        """Modules of the head; 0 for no head."""
        return len(self.draft_layers)

    def draft_caches(self, depth: int) -> int:
        """KV caches of the head when it drafts so deep: one for all drafts, or one for each (`head.py`)."""
        return depth if self.mtp_layers > 1 else min(depth, self.mtp_layers)

    @property
    def attention(self) -> dict[int, CacheRows]:
        """Number of each target layer with a KV cache → what that keeps of a token."""
        return {layer.number: layer.rows for layer in self.layers if layer.rows is not None}

    @property
    def geometries(self) -> tuple[Geometry, ...]:
        """Those of the target's and the head's attention layers, each once."""
        mixers = (layer.mixer for layer in (*self.layers, *self.draft_layers))
        return tuple(dict.fromkeys(mixer.geometry for mixer in mixers if not isinstance(mixer, DeltaSpec)))

    @property
    def one_row(self) -> bool:
        """Whether a cache keeps one row of a token that is key and value at once."""
        return any(geometry.rows.sides == 1 for geometry in self.geometries)

    @property
    def deltas(self) -> list[DeltaSpec]:
        """The delta-rule layers, of the target alone."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaSpec)]

    @property
    def sliced(self) -> bool:
        """Whether some of the target's layers are left out."""
        return len(self.layers) < self.num_layers

    def slice(self, numbers: Collection[int] | None) -> ModelConfig:
        """The same with these of the target's layers only; None for all. Raises ConfigError for one there is not."""
        if numbers is None:
            return self
        wrong = sorted(set(numbers) - {layer.number for layer in self.layers})
        if wrong:
            raise ConfigError(
                f"layers names {', '.join(map(str, wrong[:4]))}{', …' * (len(wrong) > 4)}; this model has layers 0 to "
                f"{self.num_layers - 1}"
            )
        return replace(self, layers=tuple(layer for layer in self.layers if layer.number in numbers))
