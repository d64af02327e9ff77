"""DeepSeek-V3: latent attention, experts in groups and the head are transformers', in BF16 and in FP8; runs stay
lossless."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from family_checkpoints import load_target, write_deepseek_v3, write_fp8
from family_checks import (
    PROMPTS,
    TOLERANCE,
    TREATMENTS,
    check_drafts,
    check_lossless,
    check_transformers_drafts,
    some_ids,
)
from family_definition import Definition
from family_suite import HeadBehindTheTarget, family_fixtures
from mtplab import generate, load_model, open_checkpoint, trace
from mtplab.cli import main
from mtplab.decode.peek import next_logits
from mtplab.kernels.fp8_reference import round_activation
from mtplab.models.choice import decodes_with_kernels
from mtplab.models.fields import Fields
from mtplab.models.rotary import frequencies
from mtplab.models.spec import MixtureSpec, Rotary
from mtplab.quant.experts import GroupedExperts
from test_mixture import _mixture
from test_models import run_passes
from tests.checkpoint_builders import CHECKPOINTS

IDS = some_ids(90)
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
# yarn and a query rank; neither; the halves of a head paired; all layers experts
SHAPES = {
    "published": {},
    "plain": {"q_lora_rank": None, "rope_scaling": None},
    "halves": {"rope_interleave": False},
    "experts": {"first_k_dense_replace": 0, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
}

each, folder, pair = family_fixtures("deepseek_v3", SHAPES)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """With a head of two layers."""
    folder = write_deepseek_v3(tmp_path_factory.mktemp("two"), heads=2)
    return load_model(folder), load_target(folder)


@pytest.fixture(scope="module")
def model(pair):
    return pair[0]


class TestDeepSeek(HeadBehindTheTarget):
    family, layout = "deepseek_v3", "DeepSeek-V3"
    norm, layer = theirs.DeepseekV3RMSNorm, theirs.DeepseekV3DecoderLayer
    prompt_seed = 6
    treatments = (*TREATMENTS, ("fp8", "int4"))
    rollbacks = ("none", "int4", "fp8")
    faults = (
        ("scoring_func", "softmax", "scoring_func is 'softmax'; expected 'sigmoid'"),
        ("topk_method", "greedy", "topk_method is 'greedy'; expected 'noaux_tc'"),
        ("attention_bias", True, "attention_bias is true; expected false"),
        ("num_key_value_heads", 2, "num_key_value_heads is 2; expected 4"),
        ("qk_rope_head_dim", 15, "qk_rope_head_dim is 15; expected an even number"),
        ("n_group", 3, "n_group is 3; expected"),
        ("topk_group", 5, "topk_group is 5; expected at most n_group, 4"),
        ("num_experts_per_tok", 5, "num_experts_per_tok is 5; expected at most 4"),
        ("kv_lora_rank", None, "kv_lora_rank is missing"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type is 'linear'; expected 'default' or 'yarn'"),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings is missing"),
        ("rope_scaling", {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 64}, "factor is 'x'"),
        ("rope_scaling", YARN | {"beta_fast": 1e-320}, "beta_fast is 1e-320, beta_slow 1.0"),
        ("rope_scaling", YARN | {"truncate": 1}, "truncate 1; expected turns"),
        ("rope_theta", 0.5, "rope_theta is 0.5; expected more than 1 with yarn"),
        ("num_nextn_predict_layers", -1, "num_nextn_predict_layers is -1; expected a whole number"),
    )

    def test_drafts_of_two_layers_are_those_of_the_definition(self, two):
        model, oracle = two
        check_drafts(model, Definition(oracle, self.heads_of(oracle, model.checkpoint.path)))
        check_lossless(model, "int8")

    def test_fp8_files_run(self, tmp_path):
        super().test_fp8_files_run(tmp_path)
        planned = open_checkpoint(tmp_path / "fp8").plan().by_name
        assert planned["model.layers.0.self_attn.kv_b_proj"].weight == "fp8"
        assert planned["model.layers.1.mlp.gate"].weight == planned["model.layers.3.eh_proj"].weight == "bf16"


def test_drafts_of_two_layers_are_transformers(two):
    check_transformers_drafts(*two)


def test_a_given_output_is_read_to_the_bits_of_decoding_it(model):
    """Passes of 64 tokens and of one: what the head is given of them is the same."""
    settings = {"max_depth": 3, "max_new_tokens": 40, "ignore_eos": True, "quant_policy": "int8"}
    outputs = trace(model, PROMPTS, **settings).outputs
    given, own = trace(model, PROMPTS, output=outputs, **settings), trace(model, PROMPTS, **settings)
    assert (given.hits == own.hits).all() and given.top.tobytes() == own.top.tobytes()
    assert own.hits.any()


@pytest.mark.parametrize("rope", [
    {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.8, "beta_fast": 16},
    {"factor": 8, "original_max_position_embeddings": 32, "truncate": False, "attention_factor": 1.3},
    {"original_max_position_embeddings": 1024, "mscale": 1.0},
])  # fmt: skip
def test_yarn_is_transformers(rope):
    given = {"type": "yarn", "factor": None} | rope
    config = DeepseekV3Config(rope_scaling=dict(given), rope_theta=10000.0, max_position_embeddings=8192)
    embedding = theirs.DeepseekV3RotaryEmbedding(config)
    fields = Fields({"rope_scaling": given, "rope_theta": 10000.0, "max_position_embeddings": 8192})
    yarn = fields.yarn(fields.rope()[2])
    assert yarn.attention == pytest.approx(embedding.attention_scaling, rel=1e-12)
    torch.testing.assert_close(
        frequencies(Rotary(64, 10000.0, yarn)), embedding.inv_freq, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_routing_is_transformers(groups, normalised):
    """Which experts, and with what weights; of scores that are equal too, and that are zero."""
    count, top_k, hidden = 12, 2, 16
    g = torch.Generator().manual_seed(groups[0])
    config = DeepseekV3Config(
        n_routed_experts=count, num_experts_per_tok=top_k, hidden_size=hidden, n_group=groups[0], topk_group=groups[1],
        norm_topk_prob=normalised, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = theirs.DeepseekV3TopkRouter(config)
    router.weight.data = torch.randn(count, hidden, generator=g)
    router.weight.data[3] = router.weight.data[2]
    router.weight.data[7:9] = router.weight.data[5]
    router.e_score_correction_bias.copy_(torch.randn(count, generator=g).mul(0.3))
    router.e_score_correction_bias[2:9] = 0.25
    router.weight.data[:, 0] = 1.0
    x = torch.randn(64, hidden, generator=g)
    x[:4, 0] = -1000.0
    block, _ = _mixture(experts=count, top_k=top_k, hidden=hidden, inner=8)
    block.spec = MixtureSpec(count, top_k, 8, 8, "sigmoid", normalised, 2.5, *groups)
    block.bias = router.e_score_correction_bias
    with torch.no_grad():
        logits, weights, chosen = router(x)
        mine, places = block._chosen(logits)
    theirs_by_expert, mine_by_expert = (
        torch.full((64, count), -1.0).scatter(1, at, w) for at, w in ((chosen, weights), (places, mine))
    )
    torch.testing.assert_close(mine_by_expert, theirs_by_expert, rtol=1e-6, atol=0)
    assert (weights[:4] == 0).all() and (weights[4:] > 0).all()
    ties = (logits.sigmoid() + block.bias).sort(-1).values.diff(dim=-1) == 0
    assert ties.any(-1).all()


@pytest.mark.parametrize("count", [9, 12, 16])
def test_sigmoids_of_a_row_do_not_depend_on_the_rows_beside_it(count):
    """About one value in fifty has other bits where a vectorised loop ends before it."""
    block, _ = _mixture(experts=count, top_k=3, hidden=72, inner=20)
    block.spec = MixtureSpec(count, count, 20, 20, "sigmoid")
    block.bias = torch.zeros(count)
    for seed in range(20):
        logits = 3 * torch.randn(136, count, generator=torch.Generator().manual_seed(seed))
        whole = torch.zeros_like(logits).scatter(1, *reversed(block._chosen(logits)))
        for start in range(0, 136, 8):
            alone = logits[start : start + 8]
            part = torch.zeros_like(alone).scatter(1, *reversed(block._chosen(alone)))
            assert torch.equal(part, whole[start : start + 8]), (seed, start)


def test_inputs_are_rounded_but_of_kv_b_proj(tmp_path):
    """transformers' model of the file's values, whose linear layers round their inputs where FP8 is. A value between
    two codes may fall to either side, so most are compared, not all."""
    folder = write_fp8("deepseek_v3", tmp_path, first_k_dense_replace=1, num_hidden_layers=1, heads=0)
    ckpt, reference = open_checkpoint(folder), load_target(tmp_path / "bf16")
    state = {name: ckpt.dequantize(name) for name in reference.state_dict()}
    reference.load_state_dict(state)
    model = load_model(folder)
    fp8 = [m.name for m in model.plan.modules if m.activation == "fp8"]
    assert len(fp8) == 8 and "model.layers.0.self_attn.kv_b_proj" in fp8

    mine = run_passes(model, IDS, [90], True)

    @torch.no_grad()
    def difference():
        return (mine - reference.model(torch.tensor([IDS])).last_hidden_state[0]).abs()

    def rounded(module, args):
        return (round_activation(args[0]),)

    plain = difference()
    for name in fp8:
        if "kv_b_proj" not in name:
            reference.get_submodule(name).register_forward_pre_hook(rounded)
    found = difference()
    reference.get_submodule("model.layers.0.self_attn.kv_b_proj").register_forward_pre_hook(rounded)
    every = difference()
    assert 20 * found.median() < min(plain.median(), every.median())


def test_quantised_here_it_is_what_the_release_quantises(tmp_path):
    folder = write_fp8("deepseek_v3", tmp_path / "release")
    assert main(["quantize", str(folder / "bf16"), str(tmp_path / "ours")]) == 0
    ours, published = (open_checkpoint(path).plan() for path in (tmp_path / "ours", folder))
    assert {m.name: m.weight for m in ours.modules} == {m.name: m.weight for m in published.modules}
    at_load = load_model(folder / "bf16", model_format="fp8")
    assert torch.equal(next_logits(load_model(tmp_path / "ours"), IDS), next_logits(at_load, IDS))


def test_kernels_interpreted_give_the_same(tmp_path, monkeypatch):
    """FP8 products of one matrix and of grouped experts; attention itself has no kernel."""
    folder = write_fp8("deepseek_v3", tmp_path, num_hidden_layers=2)
    expected = next_logits(load_model(folder), PROMPTS[0])
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    model = load_model(folder)
    assert isinstance(model.target.layers[1].mlp.experts, GroupedExperts)
    assert not decodes_with_kernels(model.config, model.dtype, model.device, [model.policy()])
    assert (next_logits(model, PROMPTS[0]) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["ds-v3-ragged-mtp", "ds-ue8m0-e8m0dtype"])
def test_files_in_the_releases_layout_run(name):
    model = load_model(CHECKPOINTS / name / "ckpt")
    assert model.config.family == "DeepSeek-V3, R1, V3.1"
    plain = generate(model, PROMPTS, depth=0, max_new_tokens=10).tokens
    if name == "ds-v3-ragged-mtp":
        assert generate(model, PROMPTS, depth=2, max_new_tokens=10).tokens == plain
    else:
        assert model.draft is None
    other = load_model(CHECKPOINTS / name / "ckpt", exclude=["*.self_attn.*"])
    varied = model.with_exclusions(["*.self_attn.*"])
    assert torch.equal(next_logits(other, IDS), next_logits(varied, IDS))
    assert not torch.equal(next_logits(other, IDS), next_logits(model, IDS))


def test_other_exclusions_make_latent_attention_again(model):
    fp8 = model.with_exclusions("published", model_format="fp8")
    mine, its = (each.target.layers[0].mixer for each in (fp8, model))
    assert mine.kv_b is not its.kv_b and mine.kv_norm is its.kv_norm
    ckpt_value = model.checkpoint.dequantize("model.layers.0.self_attn.kv_b_proj.weight")
    assert torch.equal(its.kv_b.weights()[0], ckpt_value)
    assert 0 < (mine.kv_b.weights()[0] - ckpt_value).abs().max() < 0.05
    back = fp8.with_exclusions(["*.kv_b_proj", "*.mlp.*", "lm_head"])
    direct = load_model(model.checkpoint.path, model_format="fp8", exclude=["*.kv_b_proj", "*.mlp.*", "lm_head"])
    assert torch.equal(next_logits(back, IDS), next_logits(direct, IDS))
    assert torch.equal(back.target.layers[0].mixer.kv_b.weights()[0], ckpt_value)


@pytest.mark.parametrize("fp8", [False, True])
def test_audit_finds_what_is_lost(tmp_path, fp8):
    folder = write_fp8("deepseek_v3", tmp_path / "x") if fp8 else write_deepseek_v3(tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    lost = (
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.5.down_proj", "model.layers.2.self_attn.kv_b_proj",
        "model.layers.2.mlp.shared_experts.gate_proj", "model.layers.3.shared_head.norm",
    )  # fmt: skip
    for name in lost:
        tensors.pop(f"{name}.weight")
        tensors.pop(f"{name}.weight_scale_inv", None)
    save_file(tensors, folder / "model.safetensors")
    findings = open_checkpoint(folder, lenient=True).audit().findings
    assert set(lost) <= {name for finding in findings if finding.severity == "error" for name in finding.tensors}
