"""Files side by side: numbers against a calculation by hand, what is called chance, and every way to show it."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from scipy import stats

import mtplab
from mtplab.cli import main
from mtplab.errors import ConfigError
from mtplab.report.comparison_page import comparison_page
from mtplab.report.table import Table
from mtplab.report.text import in_markdown, one_line
from mtplab.study.rowfile import rows_of_source
from tests.report_fakes import counted, row, rows, write_results

HOSTILE = "</script><script>alert(1)</script>|`*_[x](http://evil.test)@all www.evil.test\n# \u202e\x1b[31m<img src=x>"


# how a row says that there is no result
FAILED = {"error": "no memory", "acceptance_length": None, "by_domain": {}, "point": "none"}


def sample(seed, depth=2, n=20):
    """(tokens, rounds) of n prompts that differ: a little more than half of the drafts are right."""
    draw = np.random.default_rng(seed)
    rounds = draw.integers(12, 30, n)
    share = draw.normal(0.6, 0.12, n).clip(0.1, 0.9)
    return [int(t) for t in np.round(rounds * (1 + depth * share))], [int(r) for r in rounds]


def by_hand(base, other):
    """(difference, ± of the 95 % interval) over prompts, each left out in turn."""
    (t0, r0), (t1, r1) = (np.array(each, dtype=float) for each in (base, other))
    n = len(r0)

    def without(i):
        return np.delete(t1, i).sum() / np.delete(r1, i).sum() - np.delete(t0, i).sum() / np.delete(r0, i).sum()

    each = [without(i) for i in range(n)]
    spread = math.sqrt((n - 1) / n * sum((value - np.mean(each)) ** 2 for value in each))
    return t1.sum() / r1.sum() - t0.sum() / r0.sum(), stats.t.ppf(0.975, n - 1) * spread


def shifted(tokens, rounds, seed, less):
    """The same prompts with about `less` tokens a round fewer, not all alike."""
    draw = np.random.default_rng(seed)
    fewer = [int(t - round(r * less * draw.uniform(0.6, 1.4))) for t, r in zip(tokens, rounds, strict=True)]
    return [max(t, r) for t, r in zip(fewer, rounds, strict=True)], rounds


def words(comparison):
    """What it prints, wherever its lines are broken."""
    return " ".join(str(comparison).split())


def study(policy="none", **changes):
    changes = {"point": policy, "quant_policy": policy, "draft_quant_policy": policy, "n_prompts": 20, **changes}
    return [row(0, **changes), *(counted(*sample(depth, depth), depth, **changes) for depth in (1, 2, 3, 4))]


def worse(base, depth, less=0.4):
    """`base` with its row of one depth worse, on the same prompts."""
    part = next(each for each in base if each.depth == depth).by_domain["all"]
    tokens, rounds = shifted(part.prompt_tokens, part.prompt_rounds, 5, less)
    return [
        counted(tokens, rounds, depth, point=each.point)
        if each.depth == depth
        else each
        for each in base
    ]


def test_a_difference_is_that_of_a_calculation_by_hand():
    base = study()
    found = mtplab.compare(base, worse(base, 3), names=["before", "after"])
    (against,) = found.against
    point = next(point for point in against.points if point.pair.depth == 3)
    parts = [side.by_domain["all"] for side in (point.pair.base, point.pair.other)]
    value, error = by_hand(*((part.prompt_tokens, part.prompt_rounds) for part in parts))
    assert point.difference == pytest.approx(value) and point.change.error == pytest.approx(error, rel=1e-3)
    assert point.beyond and point.holds and point.change.paired
    assert [p.pair.depth for p in against.compared] == [3], "what is equal prompt by prompt needs no explanation"
    said = words(found)
    assert f"{point.difference:+.2f} ± {error:.2f}".replace("-", "−") in said
    assert "1 of 1 difference lies outside chance" in said and "largest loss" in said
    assert "compared prompt by prompt" in said and "3 further points are equal, prompt by prompt" in said
    assert found.to_dict()["against"][0]["beyond_chance_holm"] == 1
    assert repr(found) == "Comparison('after' against 'before': 5 points, 1 beyond chance)"


def test_other_prompts_are_not_paired_and_it_is_said():
    base, other = study(), study(prompt_set="others")
    (against,) = mtplab.compare(base, other).against
    assert not any(point.change.paired for point in against.points if point.pair.depth)
    assert "did not run the same prompts" in words(mtplab.compare(base, other))
    for point in against.points[1:]:
        part = point.pair.base.by_domain["all"]
        alone = by_hand(([1] * 20, [1] * 20), (part.prompt_tokens, part.prompt_rounds))[1]
        assert point.change.error == pytest.approx(math.sqrt(2) * alone, rel=1e-3)


def test_one_in_twenty_is_told_from_what_holds():
    """Forty comparisons without any difference, and one true loss among them."""
    draw = np.random.default_rng(3)
    base, other = [], []
    for at in range(40):
        tokens, rounds = sample(at)
        noisy = [int(max(r, t + draw.integers(-5, 6))) for t, r in zip(tokens, rounds, strict=True)]
        base.append(counted(tokens, rounds, 2, exclude=f"mtp.{at}"))
        other.append(counted(noisy, rounds, 2, exclude=f"mtp.{at}"))
    tokens, rounds = sample(99)
    base.append(counted(tokens, rounds, 2, exclude="lost"))
    other.append(counted(*shifted(tokens, rounds, 1, 0.8), 2, exclude="lost"))
    (against,) = mtplab.compare(base, other).against
    held = [point.pair.settings["exclusions"] for point in against.points if point.holds]
    beyond = [point for point in against.points if point.beyond]
    assert held == ["lost"] and 2 <= len(beyond) <= 6, "by chance some of 40 lie outside, and do not hold"
    said = words(mtplab.compare(base, other))
    assert f"{len(beyond)} of 41 differences lie outside chance one by one, where about 2" in said
    assert "1 still does with all looked at" in said and "** beyond chance" in said


def test_what_cannot_be_compared_has_no_interval():
    bare = [each.model_copy(update={"by_domain": {}}) for each in study()]
    (against,) = mtplab.compare(bare, study()).against
    assert all(point.change is None and not point.beyond for point in against.points)
    assert "No interval can be told" in str(mtplab.compare(bare, study()))
    assert mtplab.compare(bare, study()).to_dict()["against"][0]["points"][1]["beyond_chance"] is None


def test_every_number_of_a_row_is_set_side_by_side():
    quality = {"reference_perplexity": 7.5, "quality_text": "own:1"}
    before = {"kl": 0.001, "kl_error": 0.0005, "top1_agreement": 0.99, "perplexity": 7.5}
    now = {"kl": 0.25, "kl_error": 0.02, "top1_agreement": 0.9, "perplexity": 8.25, "tokens_per_second": 50.0}
    base = [counted(*sample(1), 2, kv_bytes_per_token=256, **before, **quality)]
    other = [counted(*sample(1), 2, kv_bytes_per_token=72, **now, **quality)]
    found = mtplab.compare(base, other, names=["a", "b"])
    text = found.to_text(positions=True)
    told = ("0.00100 ±0.00050", "0.250 ±0.020", "99.0 %", "90.0 %", "7.50 ×1.000", "8.25 ×1.100")
    for shown in (*told, "384 B", "200 B", "52 %"):
        assert shown in text, shown
    assert "KL from the unquantised target was 0.00100 ± 0.00050 and is 0.250 ± 0.020 nats per token" in words(found)
    assert "Tokens per second" in text
    apart = [other[0].model_copy(update={"quality_text": "own:2"})]
    assert "over different texts, and do not compare" in words(mtplab.compare(base, apart))
    assert "KL from the unquantised target is the same" in words(mtplab.compare(base, base))
    assert "Rounds in which drafts 1…j were all accepted" in text and "The same in both: weights" in text
    (point,) = found.to_dict()["against"][0]["points"]
    assert (point["kl_baseline"], point["kl_this"], point["tokens_per_second_this"]) == (0.001, 0.25, 50.0)
    frame = found.to_frame()
    assert list(frame["kl_this"]) == [0.25] and list(frame["name"]) == ["b"] and frame["KV cache"][0] == "unquantised"


def test_a_target_that_broke_is_said_whatever_its_acceptance(tmp_path, capsys):
    sound = {"perplexity": 8.0, "reference_perplexity": 8.0, "kl": 0.001, "quality_text": "own:1"}
    base = [each.model_copy(update=sound) for each in study()]
    broken = [each.model_copy(update={"kl": 3.0, "perplexity": 160.0}) for each in base]
    found = mtplab.compare(base, broken, names=["base", "new"])
    assert "⚠ new broke the target, and its acceptance says nothing" in words(found)
    assert "KL of 3.00 nats per token" in words(found) and "⚠ 3.00" in str(found)
    assert found.to_dict()["against"][0]["broken_targets"] == 5
    assert "broke" not in words(mtplab.compare(broken, broken)) and "broke" not in words(mtplab.compare(broken, base))
    folders = [str(write_results(tmp_path / name, each)) for name, each in (("base", base), ("new", broken))]
    assert main(["compare", *folders, "--fail-below", "9"]) == 1
    assert "new: 5 of 5 points have a broken target" in capsys.readouterr().err


def test_what_no_row_has_has_no_table():
    plain = [each.model_copy(update={"seconds": None, "tokens_per_second": None}) for each in study()]
    text = mtplab.compare(plain, plain).to_text(positions=True)
    assert "KL" not in text and "Tokens per second" not in text and "Bytes as deployed" not in text
    assert "all 4 points with drafts are equal" in text
    assert "Settings, checkpoint, versions and machine are the same" in text


def test_failed_rows_and_rows_without_partner_are_listed():
    base = study() + study("int8")
    failed = row(2, n_prompts=20).model_copy(update={**FAILED, "error": f"no memory {HOSTILE}"})
    other = [failed if each.depth == 2 else each for each in study()]
    found = mtplab.compare(base, other, names=["base", "new"])
    text = str(found)
    assert "no memory" in text and "5 rows of base have no partner" in words(found)
    assert re.search(r"in +exclusions +KV cache +depths\n", text)
    assert re.search(r"base +published +int8 +0, 1, 2, 3, 4", text)
    (against,) = found.against
    assert [pair.depth for pair in against.newly_failed()] == [2] and len(against.points) == 4
    assert "\x1b" not in text and "\u202e" not in text


def test_nothing_in_common_says_what_to_do(tmp_path, capsys):
    base, other = study() + study("int8"), study("int4")
    text = words(mtplab.compare(base, other))
    assert "0 points matched" in text and "KV cache (unquantised, int8 against int4)" in text and "depth alone" in text
    for name, each in (("a", base), ("b", other)):
        write_results(tmp_path / name, each)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "no row matches one of a" in capsys.readouterr().err


def test_three_files_and_their_names(tmp_path):
    for name in ("x/page.rows.json", "y/page.rows.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("".join(each.to_json() + "\n" for each in study()))
    folder = write_results(tmp_path / "page", study())
    paths = [tmp_path / "x/page.rows.json", tmp_path / "y/page.rows.json", folder]
    found = mtplab.compare(*paths)
    assert [source.name for source in found.sources] == ["page", "y/page", f"{tmp_path.name}/page"]
    assert len(found.against) == 2 and len({source.name for source in found.sources}) == 3
    assert [s.name for s in mtplab.compare(study(), study(), names=["old", None]).sources] == ["old", "rows 2"]


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((), {}, "0 sources to compare"),
        (([row()],), {}, "1 source to compare"),
        (([row()], []), {}, "source 2 is"),
        (([row()], 5), {}, "source 2 is 5"),
        (([row()], [row()]), {"names": ["a"]}, "expected 2 names"),
        (([row()], [row()]), {"names": ["a", ""]}, "expected 2 names"),
        (([row()], "nowhere"), {}, "nowhere: does not exist"),
        (([row()], [row()]), {"by": "hue"}, "no setting 'hue'"),
    ],
)
def test_wrong_use_is_refused(arguments, options, says):
    with pytest.raises(ConfigError, match=says):
        mtplab.compare(*arguments, **options)


# Markdown and text


def test_markdown_takes_nothing_for_markup():
    made = in_markdown(HOSTILE)
    assert "\n" not in made and "\x1b" not in made and "\u202e" not in made
    assert not re.search(r"(?<!\\)[|`*_\[\]<>#]", made)
    assert not any(live in made for live in ("http://", "@all", "www.e"))
    table = Table(HOSTILE, ["a", HOSTILE], [[HOSTILE, "1"], ["b", "2"]], note=HOSTILE).to_markdown()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)


def test_a_table_of_text_is_aligned_and_its_lines_are_short():
    made = Table("T", ["name", "n"], [["x" * 500, "1"], ["b\nc", "22"]]).to_text().splitlines()
    assert len({len(line) for line in made[2:5]}) == 1 and max(map(len, made)) < 60
    assert one_line("a" * 50 + "b" * 50, 21) == "a" * 10 + "…" + "b" * 10 and made[-1].startswith("b c ")


# the command


@pytest.fixture
def folders(tmp_path):
    base = study()
    return [str(write_results(tmp_path / name, each)) for name, each in (("base", base), ("new", worse(base, 3)))]


def test_the_gate_fails_where_a_loss_is_beyond_chance_and_large(folders, tmp_path, capsys):
    lost = -mtplab.compare(*folders).against[0].points[3].difference
    assert main(["compare", *folders]) == 0
    assert main(["compare", *folders, "--fail-below", f"{lost - 0.01}"]) == 1
    assert "new: 1 of 5 points lost more than that, beyond chance" in capsys.readouterr().err
    assert main(["compare", *folders, "--fail-below", f"{lost + 0.01}"]) == 0
    assert main(["compare", *reversed(folders), "--fail-below", "0"]) == 0, "a gain is no loss"
    failed = [*study()[:4], row(4, n_prompts=20).model_copy(update=FAILED)]
    new = write_results(tmp_path / "failed", failed)
    assert main(["compare", folders[0], str(new), "--fail-below", "1"]) == 1
    assert "failed: 1 of 5 points failed" in capsys.readouterr().err
    bare = write_results(tmp_path / "bare", [each.model_copy(update={"by_domain": {}}) for each in study()])
    assert main(["compare", folders[0], str(bare), "--fail-below", "1"]) == 2
    assert "none can be told from chance" in capsys.readouterr().err
    for wrong in ("nan", "-1", "inf"):
        assert main(["compare", *folders, "--fail-below", wrong]) == 2


def test_what_goes_to_stdout_is_what_was_asked_for(folders, tmp_path, capsys):
    page = tmp_path / "out" / "page.html"
    assert main(["compare", *folders, "--json", "-o", str(page)]) == 0
    done = capsys.readouterr()
    found = json.loads(done.out)
    assert found["baseline"]["name"] == "base" and found["against"][0]["points"][3]["beyond_chance_holm"] is True
    assert str(page) in done.err and page.is_file()
    assert main(["compare", folders[0], f"other={folders[1]}", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("### other against base\n")
    assert main(["compare", *folders, "--json", "--markdown"]) == 2
    assert main(["compare", folders[0], "=x"]) == 2 and main(["compare", folders[0]]) == 2
    capsys.readouterr()
    # the page of a comparison holds rows of two files: which one is meant?
    assert main(["compare", folders[0], str(page)]) == 2
    assert "comparison of several files; give one of" in capsys.readouterr().err


def test_a_hostile_file_names_itself_and_is_inert(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text('[{"' + HOSTILE.replace("\n", " ").replace("\x1b", "\\u001b") + '": 1}]', encoding="utf-8")
    assert main(["compare", str(bad), str(bad)]) == 2
    err = capsys.readouterr().err
    assert str(bad) in err and "\x1b" not in err and "\u202e" not in err and err.count("\n") == 1
    long = [each.model_copy(update={"exclude_label": HOSTILE * 2000, "checkpoint": HOSTILE}) for each in study()]
    folder = write_results(tmp_path / "long", long)
    assert main(["compare", str(folder), f"{HOSTILE[:60]}={folder}", "--positions"]) == 0
    done = capsys.readouterr()
    assert "\x1b" not in done.out + done.err and "\u202e" not in done.out + done.err
    assert max(map(len, done.out.splitlines())) < 250


# the page


def test_the_page_is_one_small_file_with_everything_in_it():
    base = rows(depths=range(5))
    found = mtplab.compare(base, rows(depths=range(5), policies=("none", "int8", "fp8_e4m3")), names=["old", "new"])
    text = comparison_page(found)
    assert len(text) < 1_000_000 and "new against old" in text and ">What changed" in text
    assert "Without a partner" in text
    assert text.count("<iframe ") == 1 and 'alt="Line chart, acceptance length of new less that of old' in text
    assert 'href="#against-1"' in text
    assert "<table" in found._repr_html_() and "<script" not in found._repr_html_()


def test_a_report_can_be_compared_with_the_folder_it_came_from(tmp_path):
    folder = write_results(tmp_path / "r", study())
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert sorted(rows_of_source(tmp_path / "page.html"), key=lambda r: r.depth) == rows_of_source(folder)
    (against,) = mtplab.compare(folder, tmp_path / "page.html").against
    assert len(against.points) == 5 and not against.compared and not against.differences
