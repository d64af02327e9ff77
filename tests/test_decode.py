"""The runner: lossless over depths, policies, exclusions and batches; rollback without a trace; counts that add up."""

from __future__ import annotations

import dataclasses
import functools
import threading

import pytest
import torch

from mtplab import Cancelled, ConfigError, generate, load_model
from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.runner import Run
from mtplab.decode.stats import AcceptanceStats, RoundRecord
from mtplab.models.cache import DeltaState
from mtplab.quant.policy import POLICIES, resolve_policy
from oracle import oracle, oracle_greedy
from tiny import write_shallow, write_tiny

# ragged on purpose: 1 to 75 tokens, one longer than a chunk
PROMPTS = [
    "def main(argv):\n    import os",
    "In the beginning God created",
    "import sys\n\nclass Foo:\n    def __init__(self",
    "And the LORD spake unto Moses, saying,",
    "x",
    "The following functions are defined by this module:\n\n" * 4,
    "Lo,",
    "0",
]
EXCLUSIONS = {
    "published": {"model_format": "fp8"},
    "draft in BF16": {"model_format": "fp8", "draft_exclude": ["mtp.*"]},
    "everything but mlp": {"model_format": "fp8", "exclude": ["*attn*", "mtp.fc"]},
}


@pytest.fixture(scope="module")
def model(bundled):
    return load_model(bundled)


@pytest.fixture(scope="module", params=list(EXCLUSIONS))
def variant(request, bundled):
    """The bundled model in FP8 under one exclusion set."""
    return load_model(bundled, **EXCLUSIONS[request.param])


def plain_decoding(model, prompt: str, n: int, policy: str) -> list[int]:
    """Greedy decoding written down independently of the runner's rounds: one prompt, one token a pass."""
    run_policy = resolve_policy(policy)
    ids = model.encode(prompt)
    from mtplab.models.passes import PassMaker

    capacity = 512
    passes, caches = PassMaker(model.config, capacity, model.dtype, model.device), None
    caches = model.target_caches(1, capacity, run_policy)
    width = -(-len(ids) // 64) * 64
    tokens = torch.zeros(1, width, dtype=torch.long)
    tokens[0, : len(ids)] = torch.tensor(ids)
    out: list[int] = []
    with torch.inference_mode():
        run = passes.make(torch.arange(width)[None], width, True, torch.tensor([len(ids)]))
        hidden = model.target(tokens, run, caches)[len(ids) - 1 : len(ids)]
        while True:
            padded = torch.nn.functional.pad(hidden, (0, 0, 0, 7))
            token = int(model.target.logits(model.target.normed(padded))[0].argmax())
            out.append(token)
            if len(out) == n or token in model.config.eos_token_ids:
                return out
            at = len(ids) + len(out) - 1
            run = passes.make(torch.tensor([[at]]), at + 1, True)
            hidden = model.target(torch.tensor([[token]]), run, caches)[:1]


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(POLICIES))
def test_lossless(variant, policy):
    """Depths 1…8 × five cache policies × three exclusion sets × batch 1 and 8, ragged prompts: token for token."""
    n = 16
    expected = [plain_decoding(variant, p, n, policy) for p in PROMPTS]
    assert generate(variant, PROMPTS, depth=0, max_new_tokens=n, quant_policy=policy).tokens == expected
    for depth in range(1, 9):
        out = generate(variant, PROMPTS, depth=depth, max_new_tokens=n, quant_policy=policy)
        assert out.tokens == expected, f"batch 8, depth {depth}"
        i = depth % len(PROMPTS)  # every prompt alone once, at a depth of its own
        alone = generate(variant, [PROMPTS[i]], depth=depth, max_new_tokens=n, quant_policy=policy)
        assert alone.tokens == [expected[i]], f"batch 1, depth {depth}"


def test_depths_9_to_16(model):
    expected = generate(model, PROMPTS, depth=0, max_new_tokens=32).tokens
    for depth in (9, 12, 16):
        assert generate(model, PROMPTS, depth=depth, max_new_tokens=32).tokens == expected


def test_greedy_equals_transformers(model):
    reference = oracle(model.checkpoint.path)
    ids = [model.encode(p) for p in PROMPTS]
    expected = [oracle_greedy(reference, i, 40) for i in ids]
    assert generate(model, ids, depth=3, max_new_tokens=40, ignore_eos=True).tokens == expected


def caches_after(run: Run) -> list[list[torch.Tensor]]:
    """Per layer what the caches hold of row 0: keys and values up to its length, or the delta rule's state."""
    length = int(run.lengths[0]) - 1
    out = []
    for cache in run.state.target:
        if isinstance(cache, DeltaState):
            out.append([cache.conv[0], cache.recurrent[: cache.heads]])
        else:
            held = [x[:, 0, :, :length] for part in cache.parts for x in part.held]
            out.append([x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in held])
    return out


def new_run(model, prompts, depth, policy, n=64, **spec) -> Run:
    from mtplab.config import SamplingConfig, SpecConfig

    run_policy = resolve_policy(policy)
    ids = [model.encode(p) if isinstance(p, str) else p for p in prompts]
    sampling = SamplingConfig(max_new_tokens=n, ignore_eos=True)
    return Run(model, ids, SpecConfig(depth=depth, **spec), sampling, run_policy, run_policy, True)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", ["none", "int4", "fp8_e4m3", "turboquant"])
def test_state_after_rejection_equals_replayed_state(model, policy, batch):
    """After rounds with rejections, every cache equals that of a run which only ever saw the accepted tokens."""
    with torch.inference_mode():
        prompts = PROMPTS[1 : batch + 1]
        speculative = new_run(model, prompts, 4, policy, n=150)
        speculative.prefill()
        for _ in range(12):
            speculative.round()
        accepted = {r.accepted for r in speculative.records if r.prompt == 0}
        assert len(accepted) > 2 and min(accepted) < 3, "rounds that keep different numbers of drafts are the point"
        plain = new_run(model, prompts[:1], 0, policy, n=150)
        plain.prefill()
        while plain.lengths[0] < speculative.lengths[0]:
            plain.round()
    assert plain.tokens[0] == speculative.tokens[0]
    for layer, (mine, replayed) in enumerate(zip(caches_after(speculative), caches_after(plain), strict=True)):
        for a, b in zip(mine, replayed, strict=True):
            assert torch.equal(a, b), f"layer {layer}"


def test_draft_cache_after_rejection_equals_replayed_state(model):
    """The head's cache holds true-target entries only: it equals a fresh read of the accepted tokens."""
    with torch.inference_mode():
        run = new_run(model, PROMPTS[:1], 4, "int8")
        run.prefill()
        for _ in range(5):
            run.round()
        read = int(run.lengths[0]) - 2 - int(run._unread.last[0])  # slots before this one have been re-read
        replay = new_run(model, [model.encode(PROMPTS[0]) + run.tokens[0]], 1, "int8")
        replay.prefill()
    (mine,), (fresh,) = run.state.draft, replay.state.draft
    # the prompt's chunked pass and decoding's recurrent one differ in the last bits of the target's hidden states
    torch.testing.assert_close(mine.values[..., :read, :], fresh.values[..., :read, :], rtol=0, atol=0.05)
    prompt = len(model.encode(PROMPTS[0]))
    assert torch.equal(mine.codes[..., :prompt, :], fresh.codes[..., :prompt, :])


def test_eos_ends_a_sequence_and_comes_last(model):
    free = generate(model, PROMPTS, depth=0, max_new_tokens=40, ignore_eos=True).tokens
    eos = free[1][17]
    import dataclasses

    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(eos,)))
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    assert len(set(map(len, expected))) > 1, "the end comes at the same place everywhere"
    for depth in (0, 3, 8):
        out = generate(ending, PROMPTS, depth=depth, max_new_tokens=40)
        assert out.tokens == expected
        for stats, row in zip(out.per_prompt, out.tokens, strict=True):
            assert stats.emitted == len(row) - 1, "the prompt's first token belongs to no round"
            assert stats.emitted - stats.rounds <= stats.accepted <= stats.emitted


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_counts_add_up(model, depth):
    out = generate(model, PROMPTS, depth=depth, max_new_tokens=33)
    stats = out.stats
    assert stats.rounds == len(out.rounds) and stats.drafted == depth * stats.rounds
    assert stats.emitted == sum(len(t) - 1 for t in out.tokens)
    assert len(stats.per_position) == len(stats.conditional) == depth
    assert sum(stats.accepted_per_position) == stats.accepted
    assert stats.acceptance_length == stats.emitted / stats.rounds
    assert stats.per_position == sorted(stats.per_position, reverse=True)
    counters = stats.counters()
    assert counters["num_drafts"] == stats.rounds and counters["num_accepted_tokens"] == stats.accepted
    if depth == 0:
        assert stats.acceptance_length == 1.0


def test_stats_definitions():
    kept_and_emitted = [(3, 4), (1, 2), (0, 1), (2, 2)]
    stats = AcceptanceStats.of(3, [RoundRecord(0, 5, 3, kept, emitted) for kept, emitted in kept_and_emitted])
    assert stats.acceptance_length == 9 / 4
    assert stats.per_position == [3 / 4, 2 / 4, 1 / 4]
    assert stats.conditional == [3 / 4, 2 / 3, 1 / 2]


def test_stats_without_a_round_or_an_acceptance():
    """None where there is nothing to divide by, everywhere alike."""
    none = AcceptanceStats.of(2, [])
    assert (none.acceptance_length, none.per_position, none.conditional) == (None, [None] * 2, [None] * 2)
    refused = AcceptanceStats(2, 5, 10, 0, 5, (0, 0))
    assert (refused.per_position, refused.conditional) == ([0.0, 0.0], [0.0, None])


def test_totals_add_counts_not_shares():
    whole = AcceptanceStats(1, 1, 1, 1, 2, (1,)) + AcceptanceStats(1, 9, 9, 0, 9, (0,))
    assert whole == AcceptanceStats(1, 10, 10, 1, 11, (1,))
    assert whole.acceptance_length == 1.1  # a mean of the two lengths would say 1.5
    with pytest.raises(AssertionError, match="depths 1 and 2"):
        whole + AcceptanceStats.of(2, [])


def test_seconds_are_those_of_passes(model, monkeypatch):
    """On a clock that only these steps move: caches, texts and the caller's own doings are no decoding."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def lasting(seconds, do):
        def slow(*arguments, **settings):
            clock[0] += seconds
            return do(*arguments, **settings)

        return slow

    for owner, name, seconds in (
        *[(Run, "prefill", 10.0), (Run, "round", 1.0)],
        *[(Run, "__init__", 1e3), (type(model), "decode", 1e4)],
    ):
        monkeypatch.setattr(owner, name, lasting(seconds, getattr(owner, name)))
    rounds = []

    def follow(progress):
        rounds.append(progress.rounds)
        clock[0] += 1e5

    out = generate(model, PROMPTS[:3], depth=2, max_new_tokens=12, max_batch=2, on_round=follow)
    assert out.seconds == clock[0] > 2 * 1e3 + 3 * 1e4 + 1e5, "every step was gone through"
    assert (out.prefill_seconds, out.decode_seconds) == (20.0, rounds[-1])
    assert out.tokens_per_second == out.stats.emitted / rounds[-1]


def test_max_batch_and_order_change_nothing(model):
    whole = generate(model, PROMPTS, depth=3, max_new_tokens=20)
    apart = generate(model, PROMPTS, depth=3, max_new_tokens=20, max_batch=3)
    assert apart.tokens == whole.tokens and apart.per_prompt == whole.per_prompt
    backwards = generate(model, PROMPTS[::-1], depth=3, max_new_tokens=20)
    assert backwards.tokens == whole.tokens[::-1]
    assert {r.prompt for r in whole.rounds} == set(range(len(PROMPTS)))


def test_a_prompt_longer_than_a_segment(model):
    long = [(i * 37) % 2000 + 1 for i in range(1100)]
    expected = generate(model, [long], depth=0, max_new_tokens=12).tokens
    assert generate(model, [long, [5, 6]], depth=4, max_new_tokens=12).tokens[0] == expected[0]
    reference = oracle(model.checkpoint.path)
    assert expected[0] == oracle_greedy(reference, long, 12)


def test_fast_arithmetic_agrees_or_says_where(model):
    """exact=False may part from exact=True only at a near-tie; on this model and these prompts it does not."""
    exact = generate(model, PROMPTS, depth=3, max_new_tokens=40)
    fast = generate(model, PROMPTS, depth=3, max_new_tokens=40, exact=False)
    assert fast.tokens == exact.tokens


def test_compiled_passes_are_not_exact(model):
    with pytest.raises(ConfigError, match="compile and exact are both true"):
        generate(model, "x", compile=True, exact=True)


def test_draft_inherits_the_targets_policy_and_can_differ(model):
    inherited = generate(model, PROMPTS[:1], depth=2, max_new_tokens=4, quant_policy="int8").memory
    assert (inherited["quant_policy"], inherited["draft_quant_policy"]) == ("int8", "int8")
    apart = generate(model, PROMPTS[:1], depth=2, max_new_tokens=4, quant_policy="int8", draft_quant_policy="none")
    assert apart.memory["draft_quant_policy"] == "none"


def test_draft_policy_reaches_the_drafts_cache_only(model):
    run_policy, draft_policy = resolve_policy("none"), resolve_policy("int4")
    run = new_run(model, PROMPTS[:1], 2, "none")
    run = Run(model, run.prompts, run.spec, run.sampling, run_policy, draft_policy, True)
    kinds = {c.policy.name for c in run.state.target if not isinstance(c, DeltaState)}
    assert kinds == {"none"} and run.state.draft[0].policy.name == "int4"


def test_a_headless_checkpoint_decodes_plainly(tmp_path):
    model = load_model(write_tiny(tmp_path, mtp_num_hidden_layers=0))
    out = generate(model, [[1, 2, 3]], depth=0, max_new_tokens=5)
    assert out.memory["draft_kv_bytes_per_token"] == 0 and len(out.memory["layers"]) == 2


def test_memory_account(model):
    memory = generate(model, PROMPTS[:1], depth=1, max_new_tokens=4, quant_policy="int8").memory
    config = model.checkpoint.config
    heads, d = config["num_key_value_heads"], config["head_dim"]
    token = 2 * heads * (d + 2 * 2)  # codes, then scale and zero in BF16
    assert memory["kv_bytes_per_token"] == token * config["layer_types"].count("full_attention")
    assert memory["draft_kv_bytes_per_token"] == token
    assert memory["layers"] == [0, 0, 0, token, token]
    plain = generate(model, PROMPTS[:1], depth=1, max_new_tokens=4).memory
    assert plain["kv_bytes_per_token"] == 2 * heads * d * 2


@pytest.mark.parametrize("policy", list(POLICIES))
def test_memory_account_equals_what_is_allocated(model, policy):
    run = new_run(model, PROMPTS[:2], 2, policy)
    (cache,) = run.state.draft
    held = sum(x.nbytes for part in cache.parts for x in part.held)
    if policy == "none":  # computed and held in float32 here, in the checkpoint's BF16 on file
        held //= 2
    assert held == model.kv_bytes_per_token(policy, "draft") * 2 * cache.capacity


def test_progress_and_cancel(model):
    seen = []
    generate(model, PROMPTS[:2], depth=2, max_new_tokens=10, on_round=seen.append)
    assert seen[-1].tokens_done == seen[-1].tokens_total == 20
    assert [p.rounds for p in seen] == list(range(1, len(seen) + 1))
    event = threading.Event()
    with pytest.raises(Cancelled):
        generate(model, PROMPTS, depth=2, max_new_tokens=200, on_round=lambda p: event.set(), cancel=event)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"prompts": []}, "non-empty list"),
        ({"prompts": [""]}, "prompt 0 is empty"),
        ({"prompts": [[1, 99999]]}, "prompt 0 has token id 99999; expected 0 to 2047"),
        ({"depth": 17}, "depth is 17"),
        ({"depth": -1}, "depth is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"quant_policy": "int3"}, "unknown quant_policy 'int3'"),
        ({"draft_sampling": "beam"}, "draft_sampling is 'beam'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": 1.5}, "max_batch is 1.5"),
        ({"depth": 2.0}, "depth is 2.0"),
        ({"depth": True}, "depth is True"),
        ({"exact": "no"}, "exact is 'no'"),
        ({"prompts": [[1.7, 2.9]]}, "list of token ids"),
        ({"prompts": [["12", "13"]]}, "list of token ids"),
        ({"prompts": [[5] * 4090]}, "prompt 0 has 4090 tokens.*max_position_embeddings of 4096"),
    ],
)
def test_faults_are_named(model, arguments, said):
    with pytest.raises(ConfigError, match=said):
        generate(model, **({"prompts": ["x"]} | arguments))


def test_a_model_without_a_head_says_so(model):
    import dataclasses

    headless = dataclasses.replace(model, draft=None)
    with pytest.raises(ConfigError, match=r"has no MTP head.*use depth=0"):
        generate(headless, "x", depth=1)
    assert generate(headless, "x", depth=0, max_new_tokens=3).tokens


def test_settings_say_what_ran(bundled, bundled_fp8):
    out = generate(load_model(bundled_fp8, draft_exclude="none"), "a", max_new_tokens=2)
    assert out.settings["spec"]["exclude"] == "none"
    assert out.settings["exact"] is True
    half = generate(load_model(bundled, dtype="bfloat16"), "a", max_new_tokens=2)
    assert half.settings["exact"] is False, "the promise is for float32 on a CPU"


def test_a_draft_policy_of_its_own_stays(bundled):
    """Given at load, the draft's policy holds in every run, also where it equals the target's default."""
    own = load_model(bundled, quant_policy="int8", draft_quant_policy="int8")
    memory = generate(own, "a", max_new_tokens=2, quant_policy="int4").memory
    assert (memory["quant_policy"], memory["draft_quant_policy"]) == ("int4", "int8")
    follows = load_model(bundled, quant_policy="int8")
    assert generate(follows, "a", max_new_tokens=2, quant_policy="int4").memory["draft_quant_policy"] == "int4"


def test_int4_wants_pairs(tmp_path):
    odd = load_model(write_tiny(tmp_path, head_dim=17, rope_parameters={"partial_rotary_factor": 0.25}))
    with pytest.raises(ConfigError, match="head_dim is 17; use int8"):
        generate(odd, [[1, 2]], depth=1, max_new_tokens=2, quant_policy="int4")
    assert generate(odd, [[1, 2]], depth=1, max_new_tokens=2, quant_policy="int8").tokens


@pytest.mark.slow
@pytest.mark.xdist_group("torch.compile")
def test_compiled_passes_agree_in_a_batch_that_shrinks(bundled, tmp_path):
    """torch.compile reads whole buckets of the cache under a mask: the same tokens and, but for a near-tie, rounds, of
    two prompts and of the one that is left when the other has ended."""
    model = load_model(write_shallow(tmp_path / "shallow", bundled))
    free = generate(model, PROMPTS[:2], depth=0, max_new_tokens=40, ignore_eos=True).tokens
    ends = next(token for token in free[1][5:] if token not in free[0])
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(ends,)))
    eager = generate(ending, PROMPTS[:2], depth=1, max_new_tokens=40, exact=False)
    assert 5 < len(eager.tokens[1]) < 20 and len(eager.tokens[0]) == 40, "one ends early, one does not"
    assert 0 < eager.stats.accepted < eager.stats.drafted, "rounds that differ are the point"
    compiled = generate(ending, PROMPTS[:2], depth=1, max_new_tokens=40, compile=True)
    assert compiled.tokens == eager.tokens and compiled.per_prompt == eager.per_prompt


def next_logits_after(model, policy: str, compiled: bool) -> torch.Tensor:
    """Of one token after a prompt, from a run's own pass."""
    run = Run(
        model, [model.encode(PROMPTS[1])], SpecConfig(depth=0), SamplingConfig(max_new_tokens=40),
        resolve_policy(policy), resolve_policy(policy), exact=False, compiled=compiled,
    )  # fmt: skip
    with torch.inference_mode():
        run.prefill()
        return run.steps.verify(torch.tensor([[300]]), torch.from_numpy(run.lengths - 1), int(run.lengths[0]))[2][0, 0]


@pytest.mark.slow
@pytest.mark.xdist_group("torch.compile")
def test_compiled_passes_of_two_models_are_kept_apart(model, bundled, monkeypatch):
    """Same shapes, other arithmetic: what was compiled for one model or policy never serves another. Which serves whom
    is decided before a backend gets anything, so the one that compiles nothing will do."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    rounded = load_model(bundled, **EXCLUSIONS["everything but mlp"])
    settings = [(model, "none"), (rounded, "none"), (model, "int4"), (model, "none")]
    eager = [next_logits_after(*setting, compiled=False) for setting in settings]
    compiled = [next_logits_after(*setting, compiled=True) for setting in settings]

    def apart(a, b):
        return float((a - b).abs().max())

    assert min(apart(eager[0], other) for other in eager[1:3]) > 0.05, "no difference to confuse"
    assert [apart(*pair) for pair in zip(eager, compiled, strict=True)] == pytest.approx([0] * 4, abs=0.01)
