"""A search for exclusions: planted weaknesses are found exactly, what is kept is read back, intervals are right."""

import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import mtplab
from mtplab import generate
from mtplab.checkpoint.convert.foresee import foreseen, never_fp8_anywhere
from mtplab.checkpoint.planted import plant
from mtplab.cli import main
from mtplab.decode import Cancelled
from mtplab.errors import CheckpointError, ConfigError
from mtplab.report import estimate_check, pareto, sensitivity_bars, sensitivity_table
from mtplab.study.exclusion_meter import ExclusionMeter, Measured, kl_change, length_change, relative_loss
from mtplab.study.exclusion_search import Better, search_exclusions
from mtplab.study.module_groups import module_groups
from mtplab.study.prompts import load_prompts
from mtplab.study.sensitivity import sensitivity
from mtplab.study.trace import trace
from tests.family_checkpoints import FAMILIES

PLANTED = ("model.layers.1.mlp.gate_proj", "mtp.fc")
SMALL = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def planted(bundled, tmp_path_factory):
    return plant(bundled, tmp_path_factory.mktemp("planted") / "two", modules=PLANTED)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def found(planted, kept):
    return search_exclusions(ExclusionMeter(planted.path, **SMALL, results=kept), steps=2, width=1)


def test_exactly_the_planted_modules_are_found(found, planted):
    """Two of 24 groups were planted, one in each part; keeping them, and nothing else, keeps the budgets."""
    assert found.exclude == sorted(planted.modules)
    worst = {part: [r for r in found.sensitivity.rows if r.group.part == part] for part in ("target", "draft")}
    by_kl = max(worst["target"], key=lambda row: row.kl.value)
    by_length = min(worst["draft"], key=lambda row: row.length.value)
    assert {*by_kl.group.modules, *by_length.group.modules} == set(planted.modules)
    assert not by_kl.kl.within_chance and not by_length.length.within_chance
    assert by_kl.kl.value > 10 * sorted(r.kl.value for r in worst["target"])[-2]


def test_the_list_is_taken_as_it_is(found, planted, tmp_path, capsys):
    exclude = ",".join(found.exclude)
    assert main(["quantize", str(planted.path), str(tmp_path / "out"), "--exclude", exclude]) == 0
    # what engines make of it was said before anything was written
    looks = foreseen(mtplab.open_checkpoint(planted.path), found.exclude)
    assert f"engines     {looks.sentence}\n" in capsys.readouterr().out
    plan = mtplab.open_checkpoint(tmp_path / "out").plan()
    high = [m.name for m in plan.modules if m.kind == "linear" and m.weight != "fp8"]
    assert high == [m.name for m in plan.modules if m.name in planted.modules]
    assert plan.loaded_nbytes() == found.recommended.nbytes


def test_a_second_search_measures_nothing_and_says_the_same(found, planted, kept):
    (file,) = kept.glob("exclusions-*.jsonl")
    lines = [line for line in file.read_bytes().split(b"\n") if line]
    with file.open("ab") as end:  # as a killed process leaves it
        end.write(lines[0][:40])
    meter = ExclusionMeter(planted.path, **SMALL, results=kept)
    again = search_exclusions(meter, steps=2, width=1)
    assert meter.computed == 0 and again.to_dict() == found.to_dict() and again.sentence() == found.sentence()
    # one set lost is one set measured again, to the same numbers
    file.write_bytes(b"\n".join([line for line in lines if line != lines[3]]))
    meter = ExclusionMeter(planted.path, **SMALL, results=kept)
    assert search_exclusions(meter, steps=2, width=1).to_dict() == found.to_dict() and meter.computed == 1


def test_other_settings_are_other_measurements(planted, kept):
    meter = ExclusionMeter(planted.path, **SMALL, depth=2, results=kept)
    assert meter.measured == {}
    assert meter.over(["Once upon a time", "def"]).measured == {}


def test_it_stops_when_asked_and_goes_on(planted, tmp_path):
    cancel = threading.Event()

    def stop(done, total, what):
        if done == 2:
            cancel.set()

    meter = ExclusionMeter(planted.path, "part", **SMALL, results=tmp_path, cancel=cancel)
    with pytest.raises(Cancelled):
        sensitivity(meter, stop)
    assert meter.computed == 2
    meter = ExclusionMeter(planted.path, "part", **SMALL, results=tmp_path)
    sensitivity(meter)
    assert meter.computed == 2  # of four in all: "all but a part" is the other part alone


def test_numbers_are_those_of_trace_and_quality(bundled, found, planted):
    from mtplab.study.quality import own_texts, quality

    meter = ExclusionMeter(planted.path, **SMALL)
    ids = meter.prompts
    model = mtplab.load_model(planted.path, model_format="fp8", exclude=["mtp.fc"])
    mine = meter.measure(["mtp.fc"])
    run = mtplab.generate(model, ids, depth=3, max_new_tokens=24, ignore_eos=True)
    assert mine.rounds == tuple(stats.rounds for stats in run.per_prompt)
    assert mine.tokens == tuple(stats.emitted for stats in run.per_prompt)
    found = trace(model, ids, 3, max_new_tokens=24, ignore_eos=True).acceptance()
    assert mine.length == (found.length(3), found.half_interval(3))
    reference = mtplab.load_model(planted.path)
    texts = own_texts(reference, ids, 24)
    told = quality(model, texts, reference, skip=[len(text) - 25 for text in texts], exact=True)
    assert len(told.kl) == 24 * len(ids)
    assert mine.mean_kl == pytest.approx((told.mean_kl, told.kl_interval()), abs=1e-12)
    assert mine.top1_agreement == told.top1_agreement
    assert meter.bf16.mean_kl == (0.0, 0.0) and meter.bf16.nbytes == reference.plan.loaded_nbytes()


def test_kl_adds_up_where_errors_are_independent_and_is_not_offered_elsewhere(bundled):
    """On the bundled model the sum of single KLs is the KL of all; a set's estimate is checked against measurement."""
    meter = ExclusionMeter(bundled, "layer", **SMALL)
    told = sensitivity(meter)
    assert told.additivity.holds and told.additivity.ratio == pytest.approx(1, abs=0.25)
    half = meter.groups[::2]
    assert told.estimated_kl(half) == pytest.approx(meter.measure(half).mean_kl.value, rel=0.35)
    assert told.estimated_kl(meter.groups) == 0
    # all in FP8, all but one layer of four, and the half: every set of two layers or more, and each of them is near
    pairs = told.estimates(meter.measured.values())
    assert len(pairs) == 6 and all(mine == pytest.approx(sum_, rel=0.35) for mine, sum_ in pairs)
    assert told.estimated_kl(["model.layers.0.mlp.down_proj"]) is None  # a part of a group
    assert replace(told, additivity=replace(told.additivity, ratio=2.0)).estimated_kl(half) is None
    # where a module is in no group, there is no sum to take
    assert sensitivity(ExclusionMeter(bundled, ["mtp.*"], **SMALL)).additivity is None


def point(excluded=(), nbytes=100, kl=(0.0,) * 4, tokens=(30.0,) * 4, rounds=(10.0,) * 4) -> Measured:
    return Measured(tuple(excluded), nbytes, tuple(kl), (10,) * 4, (10,) * 4, tuple(tokens), tuple(rounds), 1.0)


def test_changes_are_paired():
    """Prompts that differ among themselves and lose the same leave a small interval; chance is zero within it."""
    before, after = point(tokens=(20, 25, 30, 35)), point(tokens=(18, 22.5, 27, 31.5))
    change = length_change(after, before)
    assert change.value == pytest.approx(-0.275) and not change.within_chance
    assert change.error == pytest.approx(before.length.error / 10)
    loss = relative_loss(after, before)
    assert loss.value == pytest.approx(0.1) and loss.error == pytest.approx(0, abs=1e-12)
    same = length_change(before, before)
    assert same == (0.0, 0.0) and same.within_chance
    worse = kl_change(point(kl=(0.1, 0.2, 0.3, 0.4)), point(kl=(0.0, 0.1, 0.2, 0.3)))
    assert worse.value == pytest.approx(0.01) and worse.error == pytest.approx(0, abs=1e-12)
    # by hand: without text i, (Σ − kl_i) / 30 is left, of which the jackknife takes the spread, times t of 3 degrees
    left = (0.7 - np.array([0.1, 0.4, 0.0, 0.2])) / 30
    expected = 3.1824 * np.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum())
    assert point(kl=(0.1, 0.4, 0.0, 0.2)).mean_kl == pytest.approx((0.0175, expected))


def test_dominance_is_beyond_chance():
    def better(nbytes, kl, kl_error, length, length_error):
        from mtplab.study.exclusion_meter import Change

        return Better(point(), nbytes, Change(kl, kl_error), Change(length, length_error)).dominates

    assert better(-1, 0.1, 0.2, -0.1, 0.2)  # smaller, and no other difference is shown
    assert better(0, -0.3, 0.2, -0.1, 0.2)
    assert not better(0, -0.1, 0.2, 0.1, 0.2)
    assert not better(1, -0.3, 0.2, 0.5, 0.2)
    assert not better(-1, 0.3, 0.2, 0.5, 0.2)
    assert not better(-1, -0.3, 0.2, -0.5, 0.2)


def test_a_budget_that_chance_leaves_open_is_not_called_kept(found):
    wide, kl, loss = replace(found, al_budget=1.0, kl_budget=1.0), found.recommended.mean_kl, found.loss
    assert wide.sure and "Smallest that keeps the budgets: " in wide.sentence() and "Whether" not in wide.sentence()
    assert loss.error > 0 and kl.error > 0
    whether = "Whether {} keeps its budget cannot be told from "
    of_loss, of_kl = whether.format("the loss of acceptance"), whether.format("KL")
    for budgets, says in (
        ({"al_budget": loss.value}, [of_loss]),
        ({"kl_budget": kl.value}, [of_kl]),
        ({"al_budget": loss.value, "kl_budget": kl.value}, [of_kl, of_loss]),
    ):
        said = replace(wide, **budgets).sentence()
        assert "Smallest that is not shown to break a budget: " in said
        assert [each for each in (of_kl, of_loss) if each in said] == says


def test_what_would_settle_an_open_budget_follows_from_the_interval(found):
    """The half interval of n prompts is h: n (h / budget)² of them see a loss as large as the budget."""
    count, loss = len(found.recommended.rounds), found.loss
    budget = loss.error / 3 if loss.value <= loss.error / 3 + loss.error else loss.value
    said = next(s for s in replace(found, al_budget=budget, kl_budget=1.0).sentences() if s.startswith("Whether"))
    needed = int(re.search(r"over about ([0-9,]+) prompts as long", said)[1].replace(",", ""))
    exact = count * (loss.error / budget) ** 2
    assert exact <= needed * (1 + 1e-9) and needed <= 1.1 * exact + 1
    told = float(re.search(r"from a budget of ([0-9.]+) % on they tell", said)[1]) / 100
    assert loss.value + loss.error <= told <= 1.1 * (loss.value + loss.error)
    assert replace(found, al_budget=told, kl_budget=1.0).sure, "what it names is true"


def test_the_front_is_what_nothing_beats(found):
    for axis, cost in (("kl", lambda p: p.mean_kl.value), ("length", lambda p: -p.length.value)):
        front = {p.excluded for p in found.front(axis)}
        for p in found.points:
            beaten = any(
                q.nbytes <= p.nbytes and cost(q) <= cost(p) and (q.nbytes, cost(q)) != (p.nbytes, cost(p))
                for q in found.points
            )
            assert beaten == (p.excluded not in front) or any(
                (q.nbytes, cost(q)) == (p.nbytes, cost(p)) for q in found.points if q is not p
            )
    assert sum(record["on_kl_front"] for record in found.to_records()) == len(found.front())


def test_figures_say_what_they_show(found):
    bars, front = sensitivity_bars(found.sensitivity), pareto(found)
    assert "24 groups" in bars.alt and "model.layers.1.mlp.gate_proj+up_proj" in bars.alt and "mtp.fc" in bars.alt
    assert f"{len(found.points)} sets" in front.alt and "recommended" in front.alt
    check = estimate_check(replace(found, sensitivity=replace(found.sensitivity, additivity=None)))
    assert "sums are no estimate" in check.alt
    assert sensitivity_table(found.sensitivity).count("<tr>") == 25
    assert bars.png[:4] == front.png[:4] == b"\x89PNG"


NAMES = {
    **dict.fromkeys(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"), "target"),
    **dict.fromkeys((f"model.layers.1.mlp.experts.{i}.{p}_proj" for i in (0, 1) for p in ("up", "down")), "target"),
    **dict.fromkeys(("model.layers.1.mlp.gate", "model.layers.1.mlp.shared_expert_gate"), "target"),
    "lm_head": "head",
    **dict.fromkeys(("mtp.fc", "mtp.layers.0.self_attn.q_proj"), "draft"),
}


class Fake:
    """A checkpoint of names: each module is 100 bytes, 60 in FP8."""

    path, quantization = "fake", None

    def plan(self, exclude=None, model_format=None):
        fp8 = model_format == "fp8"
        made = [
            SimpleNamespace(name=n, part=p, weight="fp8" if fp8 else "bf16", loaded_nbytes=60 if fp8 else 100)
            for n, p in NAMES.items()
        ]
        return SimpleNamespace(modules=made, by_name={m.name: m for m in made})


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [
        (
            "fused",
            {
                "model.layers.0.self_attn.q_proj+k_proj+v_proj": 2,
                "model.layers.1.mlp.experts.*": 4,
                "mtp.fc": 1,
                "mtp.layers.0.self_attn.q_proj": 1,
            },
        ),
        ("layer", {"model.layers.0.*": 2, "model.layers.1.*": 4, "mtp.fc": 1, "mtp.layers.0.self_attn.q_proj": 1}),
        ("part", {"*": 6, "*(draft)": 2}),
        (["*.0.*q_proj", "lm_head"], dict.fromkeys([n for n in NAMES if "q_proj" in n or n == "lm_head"], 1)),
    ],
    ids=str,
)  # fmt: skip
def test_groups(grouping, expected):
    groups = module_groups(Fake(), grouping)
    sizes = {g.name + ("(draft)" if (g.name, g.part) == ("*", "draft") else ""): len(g.modules) for g in groups}
    assert sizes == expected
    assert all(g.nbytes == 40 * len(g.modules) for g in groups)
    assert [g.part for g in groups if "mtp" in g.modules[0]] == ["draft"] * sum("mtp" in g.modules[0] for g in groups)


def test_a_portable_list_loads_everywhere(bundled):
    """The modules that SGLang and lmdeploy build in BF16 unasked; with them kept no engine goes wrong."""
    source = mtplab.open_checkpoint(bundled)
    keep = never_fp8_anywhere(source)
    parts = {name.rpartition(".")[2] for name in keep}
    assert parts == {"in_proj_a", "in_proj_b", "fc"} and len(keep) == 7
    assert "wrong" in foreseen(source, "none").sentence
    assert {item.worst for item in foreseen(source, keep).looks} == {"right"}
    meter = ExclusionMeter(bundled, "part", keep=keep, prompts=["The", "In"], max_new_tokens=4)
    assert sorted(meter.all_fp8.excluded) == keep and not {*keep} & {n for g in meter.groups for n in g.modules}
    assert meter.bf16.mean_kl.value == 0 and sensitivity(meter).additivity.ratio == pytest.approx(1)
    with pytest.raises(ConfigError, match="keep: 'mtp.norm'"):
        ExclusionMeter(bundled, keep=["mtp.norm"])


def test_a_head_behind_the_targets_layers_has_kinds_of_its_own(tmp_path):
    """Its modules are named as the target's are, and a name stands for one group."""
    ckpt = mtplab.open_checkpoint(FAMILIES["step3p7"](tmp_path / "step"))
    for grouping in ("kind", "layer", "fused"):
        groups = module_groups(ckpt, grouping)
        assert len({group.name for group in groups}) == len(groups)
    found = {group.name: group for group in module_groups(ckpt, "kind")}
    assert found["model.layers.*.self_attn.q_proj"].part == "target"
    assert found["model.layers.5+6+7.self_attn.q_proj"].part == "draft"
    assert len(found["model.layers.5+6+7.self_attn.q_proj"].modules) == 3
    never = ("moe.gate", "shared_head.output", "lm_head")
    assert not [name for group in found.values() for name in group.modules if name.endswith(never)]


def test_layers_of_a_head_with_another_name_are_layers(tmp_path):
    ckpt = mtplab.open_checkpoint(FAMILIES["mimo"](tmp_path / "mimo"))
    assert "model.mtp_layers.0.*" in {group.name for group in module_groups(ckpt, "layer")}


def test_kinds_go_over_all_layers(bundled):
    names = {g.name: len(g.modules) for g in module_groups(mtplab.open_checkpoint(bundled), "kind")}
    assert names["model.layers.*.mlp.down_proj"] == 4 and names["model.layers.*.linear_attn.out_proj"] == 3
    assert sum(names.values()) == 39 and len(module_groups(mtplab.open_checkpoint(bundled), "module")) == 39


@pytest.mark.parametrize("grouping", ["nothing.like.it", [], ["*.q_proj", "mtp.*"], 3])
def test_groups_that_are_refused(bundled, grouping):
    with pytest.raises(ConfigError, match="groups"):
        module_groups(mtplab.open_checkpoint(bundled), grouping)


def test_what_is_refused(bundled, bundled_fp8, capsys):
    with pytest.raises(CheckpointError, match="Give the checkpoint that this one"):
        ExclusionMeter(bundled_fp8)
    with pytest.raises(ConfigError, match="depth"):
        ExclusionMeter(bundled, depth=0)
    meter = ExclusionMeter(bundled, "part", prompts=["The", "In"], max_new_tokens=4)
    for wrong in ({"al_budget": 2}, {"kl_budget": -1}, {"kl_budget": float("nan")}, {"width": 0}, {"steps": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            search_exclusions(meter, **wrong)
    with pytest.raises(ConfigError, match=r"no linear module"):
        meter.measure(["model.norm"])
    assert main(["exclude", str(bundled), "--al-budget", "half"]) == 2
    assert "expected a share such as 0.5%" in capsys.readouterr().err


def test_the_command_says_what_to_type_next(bundled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--groups", "part", "--limit", "1", "--max-new-tokens", "8", "--kl-budget", "0.0001"]
    assert main(["exclude", str(bundled), *options]) == 0
    out = capsys.readouterr().out
    kept = out.rsplit("--exclude ", 1)[1].strip().split(",")
    target = module_groups(mtplab.open_checkpoint(bundled), "part")[0]
    assert kept == sorted(target.modules) and f"mtplab quantize {bundled} OUT --exclude" in out
    assert "On 4 other prompts" in out
    assert main(["exclude", str(bundled), *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exclude"] == kept and told["kl_budget"] == 0.0001 and len(told["sensitivity"]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-new-tokens", "1"], "max_new_tokens is 1; expected a whole number of at least 2"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--al-budget", "200%"], "al_budget is 2.0; expected a number from 0 to 1"),
        (["--kl-budget", "-1"], "kl_budget is -1.0"),
        (["--kl-budget", "nan"], "kl_budget is nan"),
        (["--steps", "0"], "steps is 0"),
        (["--depth", "17"], "depth is 17"),
    ],
)
def test_the_command_refuses_before_it_loads_anything(bundled, tmp_path, capsys, monkeypatch, options, says):
    monkeypatch.setattr("mtplab.models.load_model", None)
    assert main(["exclude", str(bundled), "--results", str(tmp_path / "r"), *options]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_a_quantised_cache_is_in_every_measurement_but_the_reference(bundled):
    """The texts are what the BF16 model writes, whatever the cache; a calibrated policy finds its scales, and which
    texts those are from tells measurements apart; a policy that fits no layer is refused before any is made."""
    settings = {"prompts": ["In the beginning", "def main():"], "max_new_tokens": 12}
    plain = ExclusionMeter(bundled, **settings)
    meters = {name: ExclusionMeter(bundled, **settings, quant_policy=name) for name in ("int4", "fp8:calibrated")}
    assert all(meter.texts == plain.texts for meter in meters.values())
    quantised = generate(plain.model, plain.prompts, 0, 1.0, 0, 12, quant_policy="turboquant", ignore_eos=True)
    assert [text[-12:] for text in plain.texts] != quantised.tokens, "the cache shows in what is written"
    kl = [meter.bf16.mean_kl.value for meter in (plain, meters["fp8:calibrated"], meters["int4"])]
    assert 0 == kl[0] < kl[1] < kl[2]
    with pytest.raises(ConfigError, match="int8@0 keeps layer 0 unquantised, which has no KV cache"):
        ExclusionMeter(bundled, **settings, quant_policy="int8@0")


def test_calibration_texts_tell_kept_measurements_apart(bundled, tmp_path, monkeypatch):
    settings = {"prompts": ["In the beginning"], "max_new_tokens": 12, "results": tmp_path}
    policies = ("int8", "fp8:calibrated")
    before = [ExclusionMeter(bundled, **settings, quant_policy=name).settings_hash for name in policies]
    shorter = load_prompts().narrowed(limit=1)
    monkeypatch.setattr("mtplab.study.prompts.bundled_prompts", lambda: shorter)
    after = [ExclusionMeter(bundled, **settings, quant_policy=name).settings_hash for name in policies]
    assert before[0] == after[0] and before[1] != after[1]
