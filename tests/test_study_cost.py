"""The cost of a round: every term against a calculation by hand, what must grow with what, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from mtplab.errors import ConfigError
from mtplab.study.cost import ASSUMED, BINDS, Constants, Setting, round_cost
from mtplab.study.gpus import GPUS, gpu
from mtplab.study.model_sizes import FORMATS, WEIGHTS, Attention, DeltaRule, Experts, ModelSizes, weights
from mtplab.study.models_catalogue import MODELS, model

H200 = gpu("H200")
# nothing but bytes and operations at the datasheet's rates
IDEAL = Constants(1, 1, 1, 1, 0, 0, 0, 0, 0)
# 2 layers, easy to follow by hand
SMALL = ModelSizes("small", 1024, 8192, Attention(8, 2, 128), 2, "made up", inner=4096)


def ideal(sizes: ModelSizes, kind: str = "bf16", tp: int = 1, **changes: object) -> Setting:
    return Setting(sizes, weights(kind), H200, tp, constants=IDEAL, **changes)


# sizes


def test_catalogue_models_weigh_what_their_names_and_files_say():
    """Parameters in names; bytes that publishers print: of the 2.4T's index in BF16, of the 27B's MTP head in FP8."""
    for name, billions in {
        "Qwen3.5-27B": 27, "Qwen3.5-35B-A3B": 35, "Qwen3.5-122B-A10B": 122, "Qwen3.5-397B-A17B": 397,
        "Qwen3.8-2.4T-A95B": 2420, "Qwen3-Next-80B-A3B": 80, "DeepSeek-V3": 671, "GLM-4.7": 355, "GLM-4.5-Air": 106,
        "MiMo-7B": 7.6,
    }.items():  # fmt: skip
        sizes = model(name)
        parts = sizes.parameters()
        total = sum(count for part, count in parts.items() if not part.startswith("draft"))
        total += sizes.hidden * sizes.vocabulary
        assert total == pytest.approx(1e9 * billions, rel=0.015), name
    for name, active in {"Qwen3.8-2.4T-A95B": 95, "DeepSeek-V3": 37, "GLM-4.7": 32}.items():
        assert model(name).active() == pytest.approx(1e9 * active, rel=0.03), name
    # 4,892,388,705,238 bytes in the index of the BF16 release
    assert weights("bf16").nbytes(model("Qwen3.8-2.4T-A95B")) == pytest.approx(4.8924e12, rel=1e-3)
    head = {part: count for part, count in model("Qwen3.8-27B").parameters().items() if part.startswith("draft")}
    assert sum(count * weights("fp8").of(part).nbytes for part, count in head.items()) == pytest.approx(
        455 << 20, rel=2e-3
    )


def test_parameters_by_hand():
    parts = SMALL.parameters()
    assert parts["mixer"] == 2 * (1024 * (8 + 2 * 2) * 128 + 8 * 128 * 1024)
    assert parts["mlp"] == 2 * 3 * 1024 * 4096 and parts["head"] == 1024 * 8192 and parts["experts"] == 0
    assert parts["draft_fc"] == 2 * 1024**2 and parts["draft_mixer"] == parts["mixer"] / 2
    gated = Attention(8, 2, 128, gate=True)
    assert sum(gated.parameters(1024).values()) - sum(SMALL.attention.parameters(1024).values()) == 8 * 128 * 1024
    # DeepSeek-V3's attention: q_a 1536, kv_a 512 + 64, q_b 1536 → 128 · 192, kv_b 512 → 128 · 256, out 128 · 128 → 7168
    mla = sum(model("DeepSeek-V3").attention.parameters(7168).values())
    assert mla == 7168 * (1536 + 576) + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    rule = DeltaRule(2, 4, 64, 32)
    assert rule.parameters(256) == {"qkvz, ba": 256 * (2 * 128 + 2 * 128 + 8), "out": 4 * 32 * 256}
    assert rule.state_bytes() == 4 * 4 * 64 * 32


def test_distinct_experts_match_a_draw():
    """Uniform routing, simulated: top 8 of 64, for one token to many."""
    draw, experts = random.Random(0), Experts(64, 8, 1)
    assert experts.touched(1) == pytest.approx(8)
    for tokens in (2, 5, 16):
        seen = [len({e for _ in range(tokens) for e in draw.sample(range(64), 8)}) for _ in range(2000)]
        assert experts.touched(tokens) == pytest.approx(sum(seen) / len(seen), rel=0.01)
    assert experts.touched(10_000) == pytest.approx(64)


def test_cache_bytes():
    grouped, latent = model("Qwen3.5-27B").attention, model("DeepSeek-V3").attention
    assert grouped.cache_bytes("none") == 2 * 4 * 256 * 2 == 2 * grouped.cache_bytes("fp8")
    assert grouped.cache_bytes("int4") == 2 * 4 * (128 + 4)
    # 4 KV heads on 8 ranks: each holds one
    assert grouped.cache_bytes("none", 2) == 2 * 2 * 256 * 2 and grouped.cache_bytes("none", 8) == 2 * 256 * 2
    assert latent.cache_bytes("none") == latent.cache_bytes("none", 8) == 576 * 2
    assert latent.cache_bytes("fp8") == 576
    assert grouped.cache_bytes("turboquant") == 4 * (128 + 4 + 64 + 2)
    assert grouped.cache_bytes("int8/int4") == 4 * (256 + 4 + 128 + 4) and latent.cache_bytes("fp8:calibrated") == 576
    with pytest.raises(ConfigError, match="turboquant stores K and V apart, and latent attention keeps one row"):
        latent.cache_bytes("turboquant")
    with pytest.raises(ConfigError, match="int8@3 keeps layers unquantised, .* use int8"):
        ideal(SMALL, cache="int8@3")
    for policy in ("turboquant", "int8/turboquant"):
        with pytest.raises(ConfigError, match="nothing of the time that turboquant's rotation takes; use none, int4"):
            ideal(SMALL, cache=policy)
    assert ideal(SMALL, cache="fp8:calibrated/int8").fits(1, 1, 0)


# terms, by hand


def test_plain_decoding_reads_the_weights_once():
    """At the datasheet's rate: every weight, the activations of one row, the cache and the logits, over 4.8 TB/s."""
    cost = round_cost(ideal(SMALL), 1, 100, 0)
    h = 1024
    rows = 2 * 2 * h * 2 * 2 + (h + 2 * 4096 + h + 4096) * 2 * 2
    parts = SMALL.parameters()
    assert cost.parts["weights"] == pytest.approx((2 * (parts["mixer"] + parts["mlp"]) + rows) / 4.8e12)
    assert cost.parts["head"] == pytest.approx((2 * parts["head"] + 2 * (h + 8192) + 8 * 8192) / 4.8e12)
    assert cost.parts["cache"] == pytest.approx(2 * 100 * 2 * 2 * 128 * 2 / 4.8e12)
    assert cost.draft == cost.parts["latency"] == cost.parts["link"] == cost.parts["host"] == 0
    assert cost.seconds == pytest.approx(sum(cost.parts.values()))


def test_many_rows_are_bound_by_arithmetic():
    """8192 rows in BF16: 2 · rows · parameters over 989 TFLOP/s; FP8 takes half of it."""
    parts = SMALL.parameters()
    operations = 2 * 8192 * (parts["mixer"] + parts["mlp"])
    for kind, rate in (("bf16", 989e12), ("fp8", 1979e12)):
        cost = round_cost(ideal(SMALL, kind), 8192, 1, 0)
        assert cost.parts["weights"] == pytest.approx(operations / rate)
        assert cost.arithmetic["weights"] == cost.parts["weights"] and "arithmetic" in cost.words("weights")
    assert round_cost(ideal(SMALL), 1, 1, 0).arithmetic["weights"] == 0


def test_attention_of_many_queries_is_bound_by_arithmetic():
    """One sequence of 10,000 with 64 queries: 4 · heads · head_dim · context · queries over 989 TFLOP/s."""
    wide = replace(SMALL, attention=Attention(64, 1, 128))
    cost = round_cost(ideal(wide), 1, 10_000, 63)
    target = 2 * 64 * 4 * 64 * 128 * 10_000 / 989e12
    # and the head's own layer, once for all queries; its further steps have one query each, and memory bounds them
    assert cost.arithmetic["cache"] == pytest.approx(1.5 * target)


def test_states_are_read_once_and_kept_for_every_draft():
    sizes = replace(SMALL, delta=DeltaRule(4, 8, 128, 128), delta_layers=6)
    one = 6 * 5 * 8 * 128 * 128 * 4 / 4.8e12  # 5 sequences
    for depth in (0, 1, 4):
        assert round_cost(ideal(sizes), 5, 10, depth).parts["state"] == pytest.approx((2 + depth) * one)
    assert round_cost(ideal(sizes, state_number=2), 5, 10, 1).parts["state"] == pytest.approx(1.5 * one)


def test_a_draft_reads_its_layer_and_the_output_head():
    """Depth 1 adds one pass of the MTP head over two slots; every further depth one over one slot."""
    costs = [round_cost(ideal(SMALL), 1, 10, depth) for depth in range(4)]
    parts = SMALL.parameters()
    own = 2 * (parts["draft_fc"] + parts["draft_mixer"] + parts["draft_mlp"] + parts["head"]) / 4.8e12
    for before, cost in pairwise(costs):
        assert cost.draft - before.draft == pytest.approx(own, rel=0.01)
    assert costs[2].parts["head"] - costs[1].parts["head"] == pytest.approx(2 * parts["head"] / 4.8e12, rel=0.02)


def test_a_head_with_a_layer_per_depth_reads_the_last_slots_again_at_every_step():
    """Depth 3: three passes over 6 slots a sequence, each of one layer, the projection and the output head."""
    deep, h, rows = replace(SMALL, draft_layers=3), 1024, 5 * 6
    parts, one = deep.parameters(), SMALL.parameters()
    for part in ("draft_mixer", "draft_mlp"):
        assert parts[part] == 3 * one[part]
    assert parts["draft_fc"] == one["draft_fc"] and parts["mixer"] == one["mixer"]
    step = 2 * (one["draft_fc"] + one["draft_mixer"] + one["draft_mlp"])  # BF16
    step += 2 * rows * (3 * h + 2 * 2 * h + (h + 2 * 4096) + (h + 4096))  # what its products read and write
    step += 2 * one["head"] + 2 * 5 * (h + 8192) + 8 * 5 * 8192  # the output head, a slot a sequence
    step += 5 * 10 * 2 * 2 * 128 * 2  # the cache
    assert round_cost(ideal(deep), 5, 10, 3).draft == pytest.approx(3 * step / 4.8e12)
    assert round_cost(ideal(deep), 5, 10, 1).draft == pytest.approx(round_cost(ideal(SMALL), 5, 10, 1).draft)
    assert round_cost(ideal(deep), 5, 10, 0).seconds == round_cost(ideal(SMALL), 5, 10, 0).seconds
    more = ideal(deep).held_bytes(2, 100, 3) - ideal(SMALL).held_bytes(2, 100, 3)
    assert more == 2 * 2 * (one["draft_mixer"] + one["draft_mlp"]) + 2 * 100 * 2 * 2 * 2 * 128 * 2


def test_the_output_head_serves_every_slot_when_verifying_and_one_a_sequence_when_drafting():
    h, v, read = 1024, 8192, 2 * 1024 * 8192

    def head(rows: int) -> float:  # its weights, rows of hidden and of logits, float32 logits written and read
        return (read + 2 * rows * (h + v) + 8 * rows * v) / 4.8e12

    assert round_cost(ideal(SMALL), 16, 10, 2).parts["head"] == pytest.approx(head(48) + 2 * head(16))


def test_experts_work_for_every_token_they_are_given():
    """65536 tokens that take 4 experts each: 2 · 65536 · 4 · 3 · 1024 · 512 operations a layer over 989 TFLOP/s."""
    sizes = replace(SMALL, inner=0, experts=Experts(64, 4, 512))
    cost = round_cost(ideal(sizes), 65536, 10, 0)
    assert cost.arithmetic["experts"] == pytest.approx(2 * 2 * 65536 * 4 * 3 * 1024 * 512 / 989e12)


def test_operations_of_attention():
    """A query and a key of 576 numbers, a value of 512, for each of 128 heads; or twice head_dim for each of 24."""
    assert model("DeepSeek-V3").attention.operations(1000) == 2 * 128 * 1000 * (576 + 512)
    assert model("Qwen3.5-27B").attention.operations(1000) == 2 * 24 * 1000 * (256 + 256)


def test_experts_are_read_as_they_are_touched():
    sizes = replace(SMALL, inner=0, experts=Experts(64, 4, 512))
    one = 3 * 1024 * 512 * 2
    for batch, depth in ((1, 0), (1, 3), (8, 1)):
        cost = round_cost(ideal(sizes), batch, 10, depth)
        reads = 2 * 64 * (1 - (60 / 64) ** (batch * (depth + 1)))
        if depth:  # the head's own layer routes too: first all slots, then one a sequence
            reads += 64 * (1 - (60 / 64) ** (batch * (depth + 1))) + (depth - 1) * 64 * (1 - (60 / 64) ** batch)
        assert cost.parts["experts"] == pytest.approx(reads * one / 4.8e12, rel=0.02)


def test_an_exchange_takes_its_latency_and_its_bytes():
    """A ring moves 2 · (n − 1) / n of a BF16 row; two exchanges a layer and one for the output head."""
    eight = Setting(SMALL, weights("bf16"), H200, 8, constants=replace(IDEAL, link_latency=1e-5, pcie_latency=1e-4))
    moved = 2 * 7 / 8 * 2 * 4 * 1024 / 450e9
    assert round_cost(eight, 4, 10, 0).parts["link"] == pytest.approx((2 * 2 + 1) * (1e-5 + moved))
    assert round_cost(replace(eight, tp=1), 4, 10, 0).parts["link"] == 0
    slow = replace(eight, gpu=gpu("L40S"))
    assert round_cost(slow, 4, 10, 0).parts["link"] == pytest.approx(5 * (1e-4 + moved * 450 / 32))


def test_ranks_share_the_bytes():
    one, four = (round_cost(ideal(SMALL, tp=tp), 1, 1000, 2) for tp in (1, 4))
    for part in ("weights", "head"):
        assert four.parts[part] == pytest.approx(one.parts[part] / 4)
    # 2 KV heads on 4 ranks: each reads one, half of all
    assert four.parts["cache"] == pytest.approx(one.parts["cache"] / 2)


def test_latencies_are_counted_by_kernel():
    """A layer: qkv, attention, out, gate and up, down; 5 small ones. Head: product, choice; 3 small. One at entry."""
    counted = Setting(SMALL, weights("bf16"), H200, constants=replace(IDEAL, product_latency=1.0, small_latency=1e-3))
    assert round_cost(counted, 1, 10, 0).parts["latency"] == pytest.approx(2 * 5 + 2 + 1e-3 * (2 * 5 + 3 + 1))
    draft = round_cost(counted, 1, 10, 1).draft
    assert draft == pytest.approx(1 + 5 + 2 + 1e-3 * (3 + 5 + 3), rel=1e-4)


def test_constants_scale_what_they_name():
    plain = round_cost(ideal(SMALL), 1, 1000, 1)
    for name, part in (("bandwidth", "weights"), ("cache_bandwidth", "cache")):
        half = replace(ideal(SMALL), constants=replace(IDEAL, **{name: 0.5}))
        assert round_cost(half, 1, 1000, 1).parts[part] == pytest.approx(2 * plain.parts[part])
    busy = replace(ideal(SMALL), constants=replace(IDEAL, host=0.5))
    assert round_cost(busy, 1, 1000, 1).seconds == pytest.approx(plain.seconds + 0.5)


def test_four_bits_run_at_the_rate_there_is():
    assert gpu("B200").rate("fp4") == 9000 and H200.rate("fp4") == H200.bf16
    assert FORMATS["nvfp4"].nbytes == 0.5625 and FORMATS["fp8"].nbytes == 1 + 4 / 16384


# what must hold for every model and GPU


@pytest.mark.parametrize("name", MODELS)
def test_more_work_takes_no_less_time(name):
    setting = Setting(MODELS[name], weights("fp8"), H200)
    for values in ([(b, 2048, 2) for b in (1, 2, 8, 64, 512)], [(4, c, 2) for c in (1, 100, 4096, 1 << 17)],
                   [(4, 2048, k) for k in range(9)]):  # fmt: skip
        costs = [round_cost(setting, *value) for value in values]
        for one, more in pairwise(costs):
            assert all(more.parts[key] >= one.parts[key] for key in BINDS)
            assert more.seconds > one.seconds
    # a round over twice the sequences never takes more than twice as long
    assert round_cost(setting, 32, 2048, 2).seconds <= 2 * round_cost(setting, 16, 2048, 2).seconds
    assert round_cost(setting, 1, 2048, 2).seconds < 3 * round_cost(setting, 1, 2048, 0).seconds


def test_a_faster_gpu_and_smaller_weights_take_less():
    sizes = model("Qwen3.5-27B")
    by_gpu = [round_cost(Setting(sizes, weights("fp8"), gpu(name)), 8, 4096, 3).seconds for name in
              ("B200", "H200", "H100", "RTX 5090", "L40S", "Arc Pro B60")]  # fmt: skip
    assert by_gpu == sorted(by_gpu)
    by_weights = [round_cost(Setting(sizes, weights(kind), gpu("B200")), 1, 4096, 3).seconds for kind in
                  ("nvfp4", "fp8", "bf16")]  # fmt: skip
    assert by_weights == sorted(by_weights)


def test_every_preset_runs_on_every_gpu():
    for card, kind in product(GPUS.values(), WEIGHTS.values()):
        cost = round_cost(Setting(model("Qwen3.5-35B-A3B"), kind, card, 2, "int4"), 2, 300, 2)
        assert 0 < cost.draft < cost.seconds < 1 and cost.binds in BINDS


def test_what_fits():
    """27B in FP8 are 29.9 GB and more on a 32 GB card; 16 layers and the head keep 4 KiB a token and layer in BF16."""
    setting = Setting(model("Qwen3.5-27B"), weights("fp8"), gpu("H200"))
    assert not replace(setting, gpu=gpu("RTX 5090")).fits(1, 1, 0) and setting.fits(1, 2048, 8)
    assert setting.held_bytes(1, 1001, 0) - setting.held_bytes(1, 1, 0) == 17 * 4096 * 1000
    state = 48 * 48 * 128 * 128 * 4
    assert setting.held_bytes(3, 1, 2) - setting.held_bytes(3, 1, 0) == 2 * 3 * state
    assert replace(setting, tp=2).held_bytes(1, 1, 0) < setting.held_bytes(1, 1, 0) / 1.99


# refusals


@pytest.mark.parametrize("value", [-1, 1.5, True, "4", None, 1 << 40])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_numbers_out_of_range_are_refused(at, value):
    numbers = [1, 100, 1]
    numbers[at] = value
    with pytest.raises(ConfigError, match=f"{('batch', 'context', 'depth')[at]} is .*; expected a whole number from"):
        round_cost(ideal(SMALL), *numbers)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="tp is 3; expected a divisor of the 8 attention heads of small"):
        ideal(SMALL, tp=3)
    with pytest.raises(ConfigError, match="tp is 0; expected a whole number from 1"):
        ideal(SMALL, tp=0)
    with pytest.raises(ConfigError, match="unknown quant_policy 'int3'"):
        ideal(SMALL, cache="int3")
    with pytest.raises(ConfigError, match="weights 'fp7': expected one of bf16, fp8"):
        weights("fp7")
    for name in ("Qwen3.5-28B", 3, None):
        with pytest.raises(ConfigError, match=r"is not in the catalogue; it has Qwen3.5-27B.*give its checkpoint"):
            model(name)
    assert model("deepseek-r1") == model("DeepSeek-V3")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"speed": 1}, "constant 'speed' is unknown; expected some of bandwidth"),
        ({"bandwidth": 0}, "bandwidth is 0; expected a share above 0"),
        ({"compute": 1.2}, "compute is 1.2; expected a share"),
        ({"host": -1e-3}, "host is -0.001; expected seconds from 0 to 1"),
        ({"host": float("nan")}, "host is nan; expected seconds"),
        ({"link_latency": "fast"}, "link_latency is 'fast'; expected seconds"),
        ({"bandwidth": True}, "bandwidth is True; expected a share"),
    ],
)
def test_constants_out_of_range_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        Constants.of(values)
    assert Constants.of({}) == ASSUMED
