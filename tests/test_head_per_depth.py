"""A head with a layer per depth: drafts are those of the training's definition, and traces and runs agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from mtplab import CheckpointError, generate, load_model, memory, open_checkpoint
from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode import runner
from mtplab.decode.calibration import bound
from mtplab.decode.runner import Run
from mtplab.quant.policy import POLICIES, resolve_policy
from mtplab.study.trace import trace
from oracle import oracle, oracle_config, oracle_hidden
from tiny import write_deep, write_tiny

# ragged, two of them shorter than the slots that are read again
PROMPTS = ["Once upon a time there was a king who", "def main():", "In", "x", "import os\n\n\ndef", "The king " * 20]
PROMPTS += ["And the LORD spake unto", "Lo, "]


@pytest.fixture(scope="module", params=[2, 3])
def each(request, bundled, tmp_path_factory):
    """The bundled model in BF16 with a head of two or three layers."""
    return load_model(write_deep(tmp_path_factory.mktemp("each"), bundled, request.param))


@pytest.fixture(scope="module")
def deep(bundled, tmp_path_factory):
    """With three layers."""
    return load_model(write_deep(tmp_path_factory.mktemp("deep"), bundled, 3))


class Definition:
    """hʲ(t) = module_j(hʲ⁻¹(t), embedding of token t + j) over all slots of a text, by transformers' layers, in one
    causal pass each; nothing is kept from one call to the next."""

    def __init__(self, model, draft_hidden: str):
        path = model.checkpoint.path
        self.reference, self.post_norm = oracle(path), draft_hidden == "post_norm"
        self.chained, self.config = model.draft.chained, oracle_config(path)
        self.config._attn_implementation = "eager"
        self.config.layer_types = ["full_attention"]
        self.weights = {
            name: model.checkpoint.dequantize(name) for name in model.checkpoint.tensors if name.startswith("mtp.")
        }
        self.layers = [self._layer(f"mtp.layers.{i}.") for i in range(model.config.mtp_layers)]

    def _layer(self, prefix: str) -> Qwen3_5DecoderLayer:
        layer = Qwen3_5DecoderLayer(self.config, 0).float().eval()
        layer.load_state_dict(
            {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        )
        return layer

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        module = Qwen3_5RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        module.load_state_dict({"weight": self.weights[f"mtp.{name}.weight"]})
        return module(x)

    @torch.no_grad()
    def drafts(self, text: list[int], depth: int, forced: tuple[int, ...] = ()) -> list[torch.Tensor]:
        """Logits [v] of drafts 1 … depth after a text, whose last token the target has not read. The likeliest are
        drafted, or those that are `forced`."""
        target, _ = oracle_hidden(self.reference, text[:-1])
        tokens, given, found = list(text), target[None], []
        slots = torch.arange(len(text) - 1)[None]
        for step in range(depth):
            embedded = self.reference.model.embed_tokens(torch.tensor([tokens[step + 1 :]]))
            both = [self._norm("pre_fc_norm_embedding", embedded), self._norm("pre_fc_norm_hidden", given)]
            x = torch.cat(both, -1) @ self.weights["mtp.fc.weight"].t()
            rotary = Qwen3_5TextRotaryEmbedding(self.config)(x, slots)
            mask = create_causal_mask(self.config, x, None, None, position_ids=slots)
            layer = self.layers[step % len(self.layers)]
            x = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=slots)
            x = x if isinstance(x, torch.Tensor) else x[0]
            normed = self._norm("norm", x)
            found.append(self.reference.lm_head(normed)[0, -1])
            tokens.append(forced[step] if step < len(forced) else int(found[-1].argmax()))
            if self.chained:
                given = normed if self.post_norm else x
        return found


def drafted(model, ids: list[list[int]], monkeypatch, **settings) -> tuple[list[list[int]], list]:
    """(outputs, and of every round of every prompt: (prompt, tokens there, drafts))."""
    seen, draft = [], Run._draft

    def spy(run: Run):
        drafts, probs = draft(run)
        seen.extend(zip(run.live, run.lengths.tolist(), drafts.tolist(), strict=True))
        return drafts, probs

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_draft", spy)
        out = generate(model, ids, **settings)
    return out.tokens, seen


@pytest.mark.parametrize("draft_hidden", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("chained", [True, False])
def test_drafts_are_those_of_the_definition(each, monkeypatch, chained, draft_hidden):
    """Every draft of every round up to two past the last layer, whatever was rejected before it."""
    model = dataclasses.replace(each, draft=dataclasses.replace(each.draft, chained=chained))
    ids = [model.encode(prompt) for prompt in PROMPTS[:4]]
    depth = model.config.mtp_layers + 2
    outputs, rounds = drafted(model, ids, monkeypatch, depth=depth, max_new_tokens=14, draft_hidden=draft_hidden)
    definition, kept = Definition(model, draft_hidden), set()
    for prompt, length, drafts in rounds:
        text = ids[prompt] + outputs[prompt]
        kept.add(next((i for i, draft in enumerate(drafts) if draft not in text[length + i : length + i + 1]), depth))
        for draft, logits in zip(drafts, definition.drafts(text[:length], depth), strict=True):
            near = logits.max() - logits[draft]
            assert near < 1e-3, (prompt, length, drafts)
    assert len(kept) > 2 and min(kept) == 0, "rounds that keep different numbers of drafts are the point"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_traces_are_the_runners_round_for_round(deep, policy):
    """Depths 1 to 8, past the last layer too, in one batch and in others; the output is plain decoding's."""
    settings = {"max_new_tokens": 16, "quant_policy": policy, "exact": True}
    plain = generate(deep, PROMPTS, depth=0, **settings).tokens
    found = trace(deep, PROMPTS, 8, **settings)
    assert found.outputs == plain
    assert found.hits[:, deep.config.mtp_layers].any() and not found.hits[:, 0].all()
    for depth in range(1, 9) if policy == "int4" else (2, 4, 8):
        run = generate(deep, PROMPTS, depth=depth, **settings)
        assert run.tokens == plain, depth
        assert run.per_prompt == found.acceptance().per_prompt(depth), depth
    apart = trace(deep, PROMPTS, 8, max_batch=3, **settings)
    assert (apart.hits == found.hits).all() and apart.top.tobytes() == found.top.tobytes()
    alone = generate(deep, PROMPTS, depth=5, max_batch=1, **settings)
    assert alone.tokens == plain and alone.per_prompt == found.acceptance().per_prompt(5)


@pytest.mark.parametrize("weights", [{"exclude": "none"}, {"exclude": "published"}, {"exclude": ["mtp.layers.1.*"]}])
def test_in_fp8(bundled, tmp_path, weights):
    model = load_model(write_deep(tmp_path, bundled, 3), model_format="fp8", **weights)
    settings = {"max_new_tokens": 16, "quant_policy": "int4", "draft_quant_policy": "fp8", "draft_hidden": "pre_norm"}
    found = trace(model, PROMPTS, 5, **settings)
    for depth in (2, 5):
        run = generate(model, PROMPTS, depth=depth, **settings)
        assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(depth)


def test_every_layer_has_a_calibrated_scale_of_its_own(deep):
    settings = {"max_new_tokens": 12, "quant_policy": "fp8:calibrated", "calibration": [PROMPTS[5]]}
    found = trace(deep, PROMPTS[:3], 5, **settings)
    run = generate(deep, PROMPTS[:3], depth=5, **settings)
    assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(5)
    policy = bound(deep, resolve_policy("fp8:calibrated"), "draft", [deep.encode(PROMPTS[5])])
    scales = [float(policy.scales_of(layer)[0]) for layer in range(3)]
    assert len(set(scales)) == 3
    caches = deep.draft_caches(5, 1, 256, policy)
    assert [cache.factors[0] for cache in caches] == [*scales, *scales[:2]]


def test_outputs_that_end_and_prompts_of_segments(deep, monkeypatch):
    free = generate(deep, PROMPTS, depth=0, max_new_tokens=24, ignore_eos=True).tokens
    ends = (free[1][11], free[2][0])
    ending = dataclasses.replace(deep, config=dataclasses.replace(deep.config, eos_token_ids=ends))
    monkeypatch.setattr(runner, "SEGMENT", 64)
    prompts = [*PROMPTS, PROMPTS[0] * 12]
    found = trace(ending, prompts, 6, max_new_tokens=24, quant_policy="int8")
    assert len(set(found.output_lengths.tolist())) > 2 and found.output_lengths[2] == 1
    for depth in (1, 4, 6):
        run = generate(ending, prompts, depth=depth, max_new_tokens=24, quant_policy="int8")
        assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(depth)


def test_caches_after_rejections_are_those_of_the_text_alone(deep):
    """To the last bit, whatever was drafted: they equal those of a run that never drafted so deep, and so never
    imagined the same."""
    policy = resolve_policy("int4")
    runs = []
    with torch.inference_mode():
        for depth in (4, 3):
            sampling = SamplingConfig(max_new_tokens=80, ignore_eos=True)
            run = Run(deep, [deep.encode(PROMPTS[0])], SpecConfig(depth=depth), sampling, policy, policy, True)
            run.prefill()
            while run.lengths[0] < 60:
                run.round()
            runs.append(run)
    accepted = [{record.accepted for record in run.records} for run in runs]
    assert len(accepted[0]) > 2 and accepted[0] != accepted[1]
    for step in range(3):
        # what the step before these rounds could know: token s + step + 1
        known = min(int(run.lengths[0]) - 1 - int(run.records[-1].emitted) for run in runs) - step - 1
        one, other = (run.state.draft[step] for run in runs)
        assert torch.equal(one.codes[..., :known, :], other.codes[..., :known, :]), step
        assert torch.equal(one.meta[..., :known, :], other.meta[..., :known, :]), step
    assert not torch.equal(runs[0].state.draft[0].codes, runs[0].state.draft[1].codes)


def test_layers_that_are_copies_are_one_module_used_at_every_depth(bundled, tmp_path):
    """With the same weights at every step, two layers and three are the same head."""
    found = [
        trace(load_model(write_deep(tmp_path / f"{n}", bundled, n, noise=0.0)), PROMPTS, 6, max_new_tokens=16)
        for n in (2, 3)
    ]
    assert (found[0].hits == found[1].hits).all() and found[0].top.tobytes() == found[1].top.tobytes()
    off = trace(load_model(write_deep(tmp_path / "off", bundled, 3)), PROMPTS, 6, max_new_tokens=16)
    assert off.top[:, :1].tobytes() == found[0].top[:, :1].tobytes(), "layer 0 is the same"
    assert off.top[:, 1:].tobytes() != found[0].top[:, 1:].tobytes()


def test_above_temperature_0_probabilities_are_the_definitions(deep):
    """Of the drafts that a trace takes for drawn, at every slot whose chain has a chance."""
    ids = deep.encode(PROMPTS[1])
    found = trace(deep, [ids], 3, temperature=1.0, draft_sampling="sampled", max_new_tokens=10, ignore_eos=True)
    output, definition = found.outputs[0], Definition(deep, "post_norm")
    for slot in range(9):
        # the chain is fed the output's own tokens
        after = tuple(output[slot + 1 : slot + 4])
        logits = definition.drafts(ids + output[: slot + 1], len(after), after)
        for j, (row, token) in enumerate(zip(logits, after, strict=True)):
            assert found.log_q[slot, j] == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-3)
            assert found.top[slot, j] == pytest.approx(float(row.log_softmax(-1).max()), abs=1e-3)
    assert found.log_q[0].std() > 0


def test_runs_above_temperature_0_are_the_traces_expectation(deep):
    """Rounds of 100 runs against 100 traced outputs."""
    ids = [deep.encode("The king said that")] * 100
    settings = {"max_new_tokens": 8, "ignore_eos": True, "draft_sampling": "sampled", "temperature": 0.8, "top_k": 12}
    expected = [s.rounds for s in trace(deep, ids, 3, seed=1, **settings).acceptance().per_prompt(3)]
    counted = [s.rounds for s in generate(deep, ids, depth=3, seed=5, **settings).per_prompt]
    mine, theirs = (torch.tensor(x, dtype=torch.float64) for x in (expected, counted))
    error = float(((mine.var() + theirs.var()) / 100) ** 0.5)
    assert abs(float(mine.mean() - theirs.mean())) < 3 * error
    assert float(theirs.mean()) < 6.5, "little is accepted"


def test_every_layer_is_the_drafts_in_plan_and_bytes(deep):
    n = deep.config.mtp_layers
    plan = deep.checkpoint.plan(model_format="fp8")
    inner = {
        m.name
        for m in plan.modules
        if m.part == "draft" and m.name.startswith(f"mtp.layers.{n - 1}.") and "norm" not in m.name
    }
    assert {name.rpartition(".")[2] for name in inner} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # fmt: skip
    names = [name for linear in deep.draft.linears() for name in linear.names]
    assert len(names) == len(set(names)) == 1 + 7 * n
    assert deep.draft.modules[0].fc is deep.draft.modules[1].fc
    c = deep.config
    each = 2 * c.draft_layers[0].rows.heads * c.draft_layers[0].rows.dim * 2
    account = generate(deep, "x", depth=1, max_new_tokens=2).memory
    assert deep.kv_bytes_per_token("none", "draft") == account["draft_kv_bytes_per_token"] == n * each
    assert account["layers"] == [0, 0, 0, each, *[each] * n]
    # a run holds a cache for every draft, and what a run will hold is said before loading
    for depth, count in ((1, 1), (3, 3), (5, 5)):
        caches = deep.draft_caches(depth, 1, 256, resolve_policy("none"))
        here = sum(cache.codes.nbytes for cache in caches)
        said = [memory(deep.checkpoint.path, depth=k).caches.token for k in (0, depth)]
        assert len(caches) == count and said[1] - said[0] == here // 256, depth


def test_other_exclusions_share_what_modules_share(deep):
    fp8 = deep.with_exclusions("published", model_format="fp8")
    other = fp8.with_exclusions(["mtp.layers.1.*"])
    first, second = other.draft.modules[:2]
    assert first.fc is second.fc and first.fc.rounded == (True,) and fp8.draft.modules[0].fc.rounded == (False,)
    assert first.layer.mlp.down.rounded == (True,) and second.layer.mlp.down.rounded == (False,)
    direct = load_model(deep.checkpoint.path, model_format="fp8", exclude=["mtp.layers.1.*"])
    runs = [generate(each, PROMPTS[:3], depth=4, max_new_tokens=12) for each in (other, direct)]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds


def test_a_layer_that_is_missing_is_named(tmp_path):
    folder = write_tiny(tmp_path, mtp_num_hidden_layers=2)
    assert not [f for f in open_checkpoint(folder).audit().findings if f.severity == "error"]
    (folder / "config.json").write_text((folder / "config.json").read_text().replace(
        '"mtp_num_hidden_layers": 2', '"mtp_num_hidden_layers": 3'))  # fmt: skip
    assert "fewer-head-layers" in {finding.kind for finding in open_checkpoint(folder).audit().findings}
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.2\..* is missing"):
        load_model(folder)
    assert open_checkpoint(folder).plan().by_name["mtp.layers.1.mlp.up_proj"].part == "draft"


@pytest.mark.slow
def test_with_kernels_interpreted(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    folder, prompts = write_tiny(tmp_path, mtp_num_hidden_layers=2, vocab_size=4), [[1, 2, 3, 1], [2]]
    found = trace(load_model(folder), prompts, 3, max_new_tokens=5, quant_policy="int4")
    run = generate(load_model(folder), prompts, depth=3, max_new_tokens=5, quant_policy="int4")
    assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(3)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    again = generate(load_model(folder), prompts, depth=3, max_new_tokens=5, quant_policy="int4")
    assert again.rounds == run.rounds and again.tokens == run.tokens
