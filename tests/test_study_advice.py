"""Acceptance in, advice out: curves from every source, what pays, what was measured, and others' measurements."""

from __future__ import annotations

import json
import os

import pytest

import mtplab
from mtplab.errors import ConfigError
from mtplab.study.advice import MARGIN, advise, best_map
from mtplab.study.cost import ASSUMED, Setting, round_cost
from mtplab.study.curve import Curve
from mtplab.study.gpus import gpu
from mtplab.study.measured import constants_of, read_measured
from mtplab.study.model_sizes import weights
from mtplab.study.models_catalogue import model
from mtplab.study.published import POINTS, TOLERANCE, compare, markdown
from report_fakes import counted, row, rows

DENSE = Setting(model("Qwen3.5-27B"), weights("fp8"), gpu("H200"))
EXPERTS = Setting(model("Qwen3.5-35B-A3B"), weights("fp8"), gpu("L40S"))

# curves


def test_shares_become_lengths():
    by_position = Curve.of_positions([0.85, 0.7, 0.6])
    assert by_position.lengths == {0: 1, 1: 1.85, 2: pytest.approx(2.55), 3: pytest.approx(3.15)}
    # 0.85, then 0.7 / 0.85, then 0.6 / 0.7 of those that got there
    assert Curve.of_conditional([0.85, 0.7 / 0.85, 0.6 / 0.7]).lengths == pytest.approx(by_position.lengths)
    # a constant share c gives (1 − c^(k + 1)) / (1 − c) tokens
    rate = Curve.of_rate(0.8, 6)
    assert rate.length(6) == pytest.approx((1 - 0.8**7) / 0.2) and "assumed" in rate.source
    assert Curve.of_lengths([1.9, 2.7]).depths == (0, 1, 2)
    assert Curve.of_lengths({3: 3.28, 1: 1.9}).depths == (0, 1, 3)


def test_nothing_is_extrapolated():
    curve = Curve.of_lengths({1: 1.9, 3: 3.2})
    for depth in (2, 4):
        with pytest.raises(ConfigError, match=f"acceptance at depth {depth} is not known, only at 0, 1, 3"):
            curve.length(depth)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Curve.of_positions([0.5, 0.6]),
            r"position 2 is 0.6, above 0.5 at 1; expected shares that do not grow",
        ),
        (lambda: Curve.of_positions([]), "has 0 values; expected 1 to 64"),
        (lambda: Curve.of_positions([1.2]), "position 1 is 1.2; expected a share from 0 to 1"),
        (lambda: Curve.of_conditional([0.5, float("nan")]), "position 2 is nan; expected a share"),
        (lambda: Curve.of_rate(0.5, 0), "depths is 0; expected a whole number from 1"),
        (lambda: Curve.of_rate("0.5", 2), "position 1 is '0.5'; expected a share"),
        (lambda: Curve.of_lengths([3.0]), "length at depth 1 is 3.0; expected 1 to 2"),
        (lambda: Curve.of_lengths([0.9]), "length at depth 1 is 0.9; expected 1 to 2"),
        (lambda: Curve.of_lengths({-1: 1.0}), "depth -1 of the acceptance: expected a whole number from 0"),
        (lambda: Curve.of_lengths([]), "no acceptance: expected a value for at least depth 1"),
    ],
)
def test_acceptance_that_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_trace_gives_its_curve(bundled):
    loaded = mtplab.load_model(bundled)
    found = mtplab.trace(loaded, ["In the beginning", "def add(a, b):"], max_depth=3, max_new_tokens=12).acceptance()
    curve = Curve.of_acceptance(found)
    assert curve.depths == (0, 1, 2, 3) and curve.source == "traced on 2 prompts"
    assert curve.length(2) == found.length(2)


def test_rows_of_one_setting_give_their_curve():
    study = rows(policies=("none", "int8"), excludes=("published",))
    curve = Curve.of_rows(study, quant_policy="int8")
    assert curve.depths == (0, 1, 2, 3, 4) and "measured by a sweep" in curve.source
    assert curve.length(3) == next(r.acceptance_length for r in study if r.depth == 3 and r.quant_policy == "int8")
    with pytest.raises(
        ConfigError, match="rows of 2 settings are left.*choose: quant_policy int8, draft.*; quant_policy none"
    ):
        Curve.of_rows(study)
    with pytest.raises(ConfigError, match="no finished row of quant_policy int4 has rounds"):
        Curve.of_rows(study, quant_policy="int4")
    with pytest.raises(ConfigError, match="the rows hold depth 0 only"):
        Curve.of_rows([row(depth=0)])
    with pytest.raises(ConfigError, match="rows of 2 settings are left.* choose: max_new_tokens 32; max_new_tokens 64"):
        Curve.of_rows([row(1), row(1, max_new_tokens=64)])
    better = counted([90, 90], [40, 40], 2)
    with pytest.raises(ConfigError, match="two rows of one setting have 2.25 and 2.5 tokens a round at depth 2"):
        Curve.of_rows([better, counted([100, 100], [40, 40], 2)])
    assert Curve.of_rows([better, better.model_copy(update={"method": "trace"})]).length(2) == 2.25


# advice


def test_speed_is_tokens_over_time():
    curve = Curve.of_lengths([1.8, 2.4])
    found = advise(DENSE, curve, 8, 4096)
    for line in found.lines:
        cost = round_cost(DENSE, 8, 4096, line.depth)
        assert line.cost == cost and line.tokens_per_second == pytest.approx(8 * line.length / cost.seconds)
        assert line.speedup == pytest.approx(line.length * found.lines[0].cost.seconds / cost.seconds)
        assert line.ratio == pytest.approx(cost.seconds / found.lines[0].cost.seconds)
    assert found.lines[0].speedup == 1 and found.best is max(found.lines, key=lambda line: line.speedup)


def test_more_acceptance_never_wants_less_depth():
    best = [advise(DENSE, Curve.of_rate(rate, 8), 16).best for rate in (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)]
    depths = [line.depth for line in best]
    assert depths == sorted(depths) and depths[0] == 0 and depths[-1] == 8
    assert [line.speedup for line in best] == sorted(line.speedup for line in best)


def test_drafts_that_are_never_accepted_never_pay():
    for setting in (DENSE, EXPERTS):
        found = advise(setting, Curve.of_rate(0.0, 4))
        assert not found.pays and found.best.depth == 0 and all(line.speedup < 1 for line in found.lines[1:])


def test_where_it_loses_it_says_why():
    found = advise(EXPERTS, Curve.of_rate(0.3, 4), 16, 2048)
    line = found.lines[1]
    first, upshot, basis = found.sentences
    assert upshot.startswith(
        f"MTP loses here because a round at depth 1 takes {line.ratio:.2f} times as long as plain decoding's"
    )
    more = line.cost.parts["experts"] - found.lines[0].cost.parts["experts"]
    assert f"{more * 1e3:.2f} go to the experts' products" in upshot
    assert "tokens/s" in first and basis.startswith(
        "Acceptance: 0.3 assumed at every position. Times are a roofline model's"
    )


def test_where_it_pays_it_says_how_much_and_what_is_alike():
    found = advise(DENSE, Curve.of_lengths([1.90, 2.68, 3.28, 3.79]), 64, 4096)
    upshot = found.sentences[1]
    assert f"Depth {found.best.depth} pays most: {found.best.speedup:.2f} times plain decoding" in upshot
    others = [line.depth for line in found.lines if line.speedup * MARGIN > found.best.speedup and line != found.best]
    assert others and " or ".join(map(str, others)) in upshot
    assert found.best.depth == 4 or "known no deeper" not in upshot
    first = advise(DENSE, Curve.of_lengths([1.90]), 1, 4096)
    assert first.best.depth == 1 and first.sentences[1].endswith("Acceptance is known no deeper: more may pay better.")
    assert "with fp8 weights on H200 SXM, KV cache unquantised, batch 1" in first.sentences[0]
    close = advise(DENSE, Curve.of_lengths([1.12]))
    assert close.best.speedup < MARGIN and "within what the model can tell from no gain" in close.sentences[1]


def test_what_does_not_fit_is_said_and_never_advised():
    tight = Setting(model("Qwen3.5-27B"), weights("bf16"), gpu("RTX 5090"))
    found = advise(tight, Curve.of_rate(0.9, 2))
    assert not found.pays and "does not fit: each GPU would hold" in found.sentences[0] and len(found.sentences) == 2
    # each draft keeps a state of 151 MB a sequence: plain decoding fits where drafting does not
    batch = next(b for b in range(1, 999) if not DENSE.fits(b, 2048, 1))
    edge = advise(DENSE, Curve.of_rate(0.9, 2), batch, 2048)
    assert DENSE.fits(batch, 2048, 0) and edge.best.depth == 0 and "No depth above 0 fits" in edge.sentences[1]


def test_the_map_is_the_advice_cell_by_cell():
    curve = Curve.of_rate(0.7, 5)
    cells = best_map(DENSE, curve, (1, 32, 512), (1024, 32768))
    assert [[cell.batch for cell in line] for line in cells] == [[1, 1], [32, 32], [512, 512]]
    for cell in (cells[0][0], cells[0][1], cells[1][0]):
        best = advise(DENSE, curve, cell.batch, cell.context).best
        assert (cell.depth, cell.speedup) == (best.depth, best.speedup)
    assert cells[2][1].depth is None
    with pytest.raises(ConfigError, match="0 batches and 1 contexts; expected at least one of each"):
        best_map(DENSE, curve, (), (1,))


def test_advice_is_plain_data():
    found = json.loads(json.dumps(advise(DENSE, Curve.of_rate(0.7, 2)).to_dict(), allow_nan=False))
    assert [line["depth"] for line in found["depths"]] == [0, 1, 2] and found["gpu"] == "H200 SXM"
    for line in found["depths"]:
        assert sum(line["parts"].values()) == pytest.approx(line["round_seconds"])


# measured constants


def bench(**changes):
    """A document as `mtplab.bench kernels` writes it, of two products and two kernels."""

    def line(name, n, k, m, seconds, gbytes=None, tflops=None):
        return {"name": name, "n": n, "k": k, "m": m, "seconds": seconds, "gbytes": gbytes, "tflops": tflops}

    found = [
        line("block scales", 34816, 5120, 16, [4e-5, 4e-5, 4e-5], 3840.0, 20.0),
        line("torch.matmul BF16", 34816, 5120, 16, [9e-5, 9e-5, 9e-5], 3600.0, 10.0),
        line("quantise + block scales", 34816, 5120, 16, [3e-5, 3e-5, 3e-5], 4700.0, 20.0),
        line("block scales", 34816, 5120, 4096, [1e-3, 1e-3, 1e-3], 300.0, 0.6 * 1979),
        line("block scales", 2112, 7168, 4, [7e-6, 8e-6, 9e-6], 1920.0, 20.0),
        line("DeepGEMM", 2112, 7168, 4, None),
        line("attend 4 over 4096 in none", 0, 0, 0, [1e-4, 1e-4, 1e-4], 2400.0),
        line("delta rule, 4 tokens", 0, 0, 0, [1e-4, 1e-4, 1e-4], 3360.0),
    ]
    return {"machine": {"gpu": "NVIDIA H200"}, "limits": {}, "rows": found, **changes}


def test_measured_constants_replace_the_models():
    constants, how = constants_of(bench(), gpu("H200"), "k.json")
    # of 4.8 TB/s: the best contestant's 3.84; of 1979 TFLOP/s 60 %; 2.4 and 3.36 TB/s
    assert constants.bandwidth == pytest.approx(0.8) and constants.compute == pytest.approx(0.6)
    assert constants.cache_bandwidth == pytest.approx(0.5) and constants.state_bandwidth == pytest.approx(0.7)
    # 8 µs at 1.92 TB/s are 15.4 MB, which take 4 µs at 3.84
    assert constants.product_latency == pytest.approx(4e-6)
    assert constants.small_latency == ASSUMED.small_latency
    assert set(how) == {"bandwidth", "compute", "cache_bandwidth", "state_bandwidth", "product_latency"}
    setting = Setting(DENSE.sizes, DENSE.weights, DENSE.gpu, constants=constants, measured=how)
    basis = advise(setting, Curve.of_rate(0.5, 1)).basis
    assert "not measured, but for" in basis and "bandwidth (k.json on NVIDIA H200)" in basis


def test_a_few_numbers_are_enough(tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"bandwidth": 0.7}')
    constants, how = read_measured(file, gpu("H200"))
    assert constants.bandwidth == 0.7 and list(how) == ["bandwidth"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([1], "holds list; expected an object"),
        ({"speed": 3}, "constant 'speed' is unknown"),
        (bench(machine={"gpu": "NVIDIA B200"}), "measured on 'NVIDIA B200'; expected H200 SXM"),
        (bench(machine={"gpu": "NVIDIA H200 NVL"}), "measured on 'NVIDIA H200 NVL'"),
        (bench(machine=None), "measured on None"),
        (bench(rows=[]), "no row in it has a time"),
        (bench(rows=[{"name": 1}]), "are not those of mtplab.bench kernels"),
        (bench(rows=3), "are not those of mtplab.bench kernels"),
    ],
)
def test_what_measured_nothing_is_refused(document, words):
    with pytest.raises(ConfigError, match=words):
        constants_of(document, gpu("H200"))


def test_files_that_hold_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json: .*the file is missing. Give what"):
        read_measured(tmp_path / "none.json", gpu("H200"))
    (tmp_path / "text").write_text("not json")
    (tmp_path / "deep").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("text", "expected JSON"), ("deep", "nested too deep"), ("pipe", "not a regular file")):
        with pytest.raises(ConfigError, match=f"{words}.*Give what `python -m mtplab.bench kernels"):
            read_measured(tmp_path / name, gpu("H200"))


# others' measurements


def test_published_points_are_met_or_explained():
    """Within 25 %, or the point says why; what explains nothing is no excuse."""
    found = compare()
    assert len(found) >= 30 and len({one.point.source for one in found}) >= 8
    for one in found:
        assert (abs(one.deviation) > TOLERANCE) == bool(one.point.why), (one.point, one.deviation)
        assert one.point.source.startswith("https://")
    speedups = [abs(one.deviation) for one in found if one.point.depth]
    assert sum(off <= TOLERANCE for off in speedups) >= 14


def test_r1_on_eight_b200_has_its_best_depth_where_it_was_measured():
    """Published: 1.78 2.25 2.28 2.21 2.15, best at 3. The model has 3 and 4 alike, and all five within 8 %."""
    points = [one for one in compare() if one.point.model == "DeepSeek-R1" and one.point.depth]
    assert all(abs(one.deviation) < 0.08 for one in points)
    curve = Curve.of_lengths({one.point.depth: one.point.length for one in points})
    found = advise(Setting(model("DeepSeek-R1"), weights("nvfp4-experts"), gpu("B200"), 8), curve)
    assert 3 in found.alike and found.best.depth in (3, 4)


def test_the_page_holds_what_the_model_says_now(repo):
    """docs/depth.md carries the table of `mtplab advise --check`, number by number."""
    assert markdown(compare()) in (repo / "docs" / "depth.md").read_text(encoding="utf-8")
    assert len({p.why for p in POINTS if p.why}) <= 10  # letters are left for the reasons
