"""The command line: exit codes, one-line failures, pure JSON, inert text, tables, reading back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from mtplab import cli_sweep
from mtplab.cli import main
from mtplab.cli_common import depth_list, exclusion, names, numbers
from mtplab.cli_report import _value, join_parameters
from mtplab.errors import ConfigError, MtplabError


@pytest.fixture
def command(repo):
    """Runs `mtplab` as a process of its own, from the checkout's root."""

    def run(*arguments: str, code: int = 0, **options) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "mtplab.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=repo,
            timeout=120,
            **options,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    return run


@pytest.mark.parametrize("name", [[], ["generate"], ["sweep"], ["quantize"], ["report"]], ids=" ".join)
def test_help_teaches(name, capsys):
    assert main([*name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples" in text
    assert len(re.findall(r"^    mtplab ", text, re.MULTILINE)) >= 3
    assert main([*name, "-h"]) == 0


def test_help_and_version_import_nothing_heavy():
    code = (
        "import sys\nfrom mtplab.cli import main\nmain(sys.argv[1:])\n"
        "print([m for m in ('torch', 'matplotlib', 'tokenizers', 'pydantic', 'ipywidgets') if m in sys.modules])"
    )
    for flag, needed in (("--help", "[]"), ("--version", "['pydantic']")):
        done = subprocess.run([sys.executable, "-c", code, flag], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == needed, flag


def test_version(command):
    assert re.match(r"mtplab \d+\.\d+\S* \(python 3\.\d+\.\d+, torch \d", command("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["swep"], "No such command 'swep'"),
        (["sweep"], "Missing argument 'PATH'"),
        (["sweep", "x", "--no-such-option"], "--no-such-option"),
        (["sweep", "x", "--seed", "one"], "--seed"),
        (["sweep", "{tiny}", "--depths", "8-0"], "runs backwards"),
        (["sweep", "{tiny}", "--depths", "0-17"], "a depth is 17"),
        (["sweep", "{tiny}", "--quant-policy", "int3"], "int3"),
        (["sweep", "{tiny}", "--temperature", "warm"], "'warm'"),
        (["sweep", "{tiny}", "--exclude", "no.such.*"], "no.such"),
        (["sweep", "{tiny}", "--domain", "nowhere"], "no domain 'nowhere'"),
        (["sweep", "{tiny}", "--prompts", "missing.jsonl"], "missing.jsonl: no such file"),
        (["sweep", "/no/such/folder"], "/no/such/folder"),
        (["sweep", "{tiny}/config.json"], "config.json"),
        (["generate", "{tiny}"], "--prompt TEXT"),
        (["generate", "{tiny}", "--prompt", ""], "prompt 0 is an empty string"),
        (["generate", "{tiny}", "--prompt", "x", "--depth", "17"], "17"),
        (["generate", "{tiny}", "--prompt", "x", "--top-p", "0"], "top_p"),
        (["generate", "{tiny}", "--prompt", "x", "--device", "abacus"], "abacus"),
        (["generate", "{tiny}", "--prompt", "x", "--device", "cpu:7"], "device is 'cpu:7'"),
        (["sweep", "{tiny}", "--device", "cpu:7"], "device is 'cpu:7'"),
        (["sweep", "{tiny}", "--quant-policy", "int8,"], "--quant-policy 'int8,': an empty name"),
        (["sweep", "{tiny}", "--draft-quant-policy", "int8,,none"], "--draft-quant-policy 'int8,,none': an empty"),
        (["sweep", "{tiny}", "--exclude", "mtp.*,"], "--exclude 'mtp.*,': an empty name"),
        (["sweep", "{tiny}", "--temperature", "0,"], "--temperature '0,': an empty name"),
        # an empty string, as an unset variable leaves it, for every option that takes text
        *[(["generate", "", "--prompt", "x"], "'PATH': an empty path"), (["sweep", " "], "'PATH': an empty path")],
        *[(["report", ""], "'NOTEBOOK|RESULTS': an empty path"), (["report", "x.ipynb", "-o", ""], "an empty path")],
        *[(["report", "x.ipynb", "-p", "", ""], "expected a name and a value")],
        *[
            (["generate", "{tiny}", "--prompt", "x", option, ""], says)
            for option, says in (
                ("--prompts", "'--prompts': an empty path"),
                ("--exclude", "--exclude '': an empty name"),
                ("--quant-policy", "quant_policy ''"),
                ("--draft-quant-policy", "quant_policy ''"),
                ("--draft-sampling", "draft_sampling is ''"),
                ("--model-format", "model_format is ''"),
                ("--device", "device is ''"),
            )
        ],
        *[
            (["sweep", "{tiny}", option, ""], says)
            for option, says in (
                ("--depths", "--depths ''"),
                ("--quant-policy", "--quant-policy '': an empty name"),
                ("--draft-quant-policy", "--draft-quant-policy '': an empty name"),
                ("--exclude", "--exclude '': an empty name"),
                ("--draft-exclude", "--draft-exclude '': an empty name"),
                ("--temperature", "--temperature '': an empty name"),
                ("--prompts", "'--prompts': an empty path"),
                ("--domain", "no domain ''"),
                ("--model-format", "model_format is ''"),
                ("--device", "device is ''"),
                ("--results", "'--results': an empty path"),
            )
        ],
        (["generate", "{tiny}", "--prompt", "caf\udce9"], "prompt 0 is not valid UTF-8: byte 0xe9 at character 3"),
        (["generate", "/no/caf\udce9", "--prompt", "a"], r"/no/caf\xe9: expected a checkpoint folder"),
        (["sweep", "{tiny}", "--exclude", "m\udce9"], "which is not valid UTF-8: byte 0xe9 at character 1"),
        (["report", "/no/such.ipynb"], "/no/such.ipynb"),
        (["report", "x.ipynb", "-p", "3", "4"], "-p '3=4'"),
        (["report", "x.ipynb", "--execution-timeout", "0"], "--execution-timeout is 0"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_code_2(arguments, says, bundled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("{tiny}", str(bundled)) for word in arguments]) == 2
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mtplab: ")
    assert err.count("\n") == 1
    assert says in err


def test_without_a_command_the_help_is_on_stderr(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, "Usage: mtplab" in err) == ("", True)


@pytest.mark.parametrize(
    ("problem", "code", "says"),
    [
        (MtplabError("it did not work\nat all"), 1, "mtplab: it did not work\\nat all\n"),
        (ConfigError("no\x1b[31mred"), 2, "mtplab: no\\x1b[31mred\n"),
        (RuntimeError("boom"), 1, "mtplab: RuntimeError: boom (unexpected; MTPLAB_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 1, "mtplab: stopped\n"),
    ],
    ids=["mtplab", "config", "unexpected", "interrupt"],
)
def test_failures_leave_as_one_inert_line(problem, code, says, bundled, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise problem

    monkeypatch.delenv("MTPLAB_DEBUG", raising=False)
    monkeypatch.setattr("mtplab.study.sweep", fail)
    assert main(["sweep", str(bundled)]) == code
    assert capsys.readouterr().err.lstrip("\n") == says


def test_what_is_too_long_to_read_is_cut_in_the_middle(bundled, capsys):
    path = "/no/" + "long/" * 600 + "name.jsonl"
    assert main(["sweep", str(bundled), "--prompts", path]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mtplab: /no/long/") and "…" in err
    assert err.endswith("long/name.jsonl: no such file or folder of prompts\n") and len(err) < 300
    assert main(["sweep", str(bundled), *["--domain", "two words " * 500]]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mtplab: no domain 'two words") and len(err) < 1250 and err.count("\n") == 1
    assert "; it has " in err, "what to do about it stays"
    short = "/no/" + "d/" * 100 + "name.jsonl"
    assert main(["sweep", str(bundled), "--prompts", short]) == 2
    assert short in capsys.readouterr().err


def test_a_warning_is_one_line_without_source(command, bundled, tmp_path):
    """A wreck among the results is set aside: a warning for a library's user, one line here."""
    arguments = ["sweep", bundled, "--depths", "0", "--limit", "1", "--max-new-tokens", "2", "--results", tmp_path]
    command(*arguments)
    (point,) = tmp_path.glob("*.json")
    point.write_text("no json")
    warned, finished = command(*arguments).stderr.splitlines()
    assert warned.startswith(f"mtplab: warning: {point}: not a readable result (")
    assert warned.endswith(", to be computed again") and "warnings.warn" not in warned
    assert finished.startswith("mtplab: 1/1 rows, ")


def test_unexpected_errors_can_be_looked_into(bundled, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("boom")

    monkeypatch.setenv("MTPLAB_DEBUG", "1")
    monkeypatch.setattr("mtplab.study.sweep", fail)
    with pytest.raises(RuntimeError, match="boom"):
        main(["sweep", str(bundled)])


SWEEP = ["--depths", "0-2", "--quant-policy", "none,int8", "--limit", "1", "--max-new-tokens", "6"]


def test_sweep_prints_a_table_and_reads_it_back(command, bundled, tmp_path):
    arguments = ["sweep", bundled, *SWEEP, "--exclude", "published", "--exclude", "mtp.*", "--results", tmp_path]
    first, second = command(*arguments), command(*arguments)
    # no terminal, no bar: a line for each point that was computed, and none for what is read back
    said = first.stderr.splitlines()
    assert [line.split("finished: ")[1] for line in said] == [
        f"{exclude} · {cache}" for exclude in ("published", "mtp.*") for cache in ("unquantised", "int8")
    ]
    assert said[1].startswith("mtplab: 6/12 rows, ") and second.stderr == ""
    table = first.stdout.split("\n\ncomputed")[0]
    assert "computed 12, read back 0" in first.stdout
    assert "computed 0, read back 12" in second.stdout
    assert second.stdout.split("\n\ncomputed")[0] == table
    lines = table.splitlines()
    judged = ["KL, nats", "top-1", "perplexity"]
    assert re.split(" {2,}", lines[2]) == ["exclusions", "KV cache", "KV B/token", *judged, "d=0", "d=1", "d=2"]
    assert [line.split()[:2] for line in lines[4:8]] == [
        [exclude, cache] for exclude in ("published", "mtp.*") for cache in ("unquantised", "int8")
    ]
    cells = [re.split(" {2,}", line)[3:] for line in lines[4:8]]
    shapes = (r"\d+\.\d+ ±\d+\.?\d*", r"\d+\.\d %", r"\d+\.\d ×\d\.\d+", r"1\.00", r"\d\.\d\d( ±\d\.\d\d)?")
    assert all(re.fullmatch(*pair) for line in cells for pair in zip(shapes, line, strict=False)), cells
    assert "KL (from the unquantised target" in lines[8] and "± is half a 95 % interval over prompts" in lines[9]


def test_sweep_holds_an_fp8_file_against_its_original_or_says_that_it_cannot(bundled, bundled_fp8, tmp_path, capsys):
    arguments = ["sweep", bundled_fp8, "--depths", "1", "--limit", "1", "--max-new-tokens", "6", "--results", tmp_path]
    codes, said = [], []
    for more in ([], ["--reference", bundled], ["--no-quality"], ["--reference", bundled_fp8]):
        codes.append(main([str(each) for each in (*arguments, *more)]))
        said.append(capsys.readouterr())
    alone, beside, without = (each.out for each in said[:3])
    assert codes == [0, 0, 0, 2] and "is quantised; expected the checkpoint in BF16" in said[3].err
    assert "no unquantised reference: give the BF16 checkpoint (--reference PATH" in alone
    assert re.search(r"published +unquantised +– +– ", alone)
    assert re.search(r"published +unquantised +\d\.\d+ ±", beside) and "computed 0, read back 1" in beside
    assert "perplexity" not in without and "read back 1" in without


def test_sweep_json_is_pure(command, bundled, tmp_path):
    document = json.loads(command("sweep", bundled, *SWEEP, "--json", "--results", tmp_path).stdout)
    assert (document["computed"], document["read_back"], document["notes"]) == (6, 0, [])
    assert [row["depth"] for row in document["rows"]] == [0, 1, 2] * 2
    assert all(row["schema"] == 3 and 0 <= row["kl"] < 0.1 and row["error"] is None for row in document["rows"])


def test_a_failed_point_gives_code_1_and_the_table(bundled, tmp_path, capsys, monkeypatch):
    def load(path, **settings):
        raise RuntimeError("no memory")

    monkeypatch.setattr("mtplab.models.load_model", load)
    assert main(["sweep", str(bundled), *SWEEP, "--results", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert [line.split("finished: ")[1] for line in err.splitlines()] == [
        "as stored · unquantised failed",
        "as stored · int8 failed",
    ]
    assert "failed: as stored · unquantised · T 0 · depth 0: RuntimeError: no memory" in out
    assert "computed 2, read back 0, failed 2" in out


def test_ctrl_c_keeps_what_is_done(bundled, repo, tmp_path):
    arguments = [
        "sweep",
        str(bundled),
        "--depths",
        "0-16",
        "--method",
        "run",
        "--limit",
        "3",
        "--max-new-tokens",
        "64",
        "--results",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "mtplab.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repo,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    until = time.monotonic() + 90
    while not list(tmp_path.glob("*.json")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, (out, err)
    assert "cancelled before the rest" in out
    assert err == "mtplab: stopping after this round; Ctrl-C again stops at once\n"
    (point,) = tmp_path.glob("*.json")
    assert 1 <= len(json.loads(point.read_text())["rows"]) < 17


def test_a_reader_that_leaves_is_no_failure(repo, bundled, tmp_path):
    line = (
        f"{sys.executable} -m mtplab.cli sweep {bundled} --depths 0 --limit 1 --max-new-tokens 2 --json "
        f"--results {tmp_path} | head -c 10; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=repo, timeout=120)
    assert done.returncode == 0
    assert re.fullmatch(r"mtplab: 1/1 rows, .*", done.stderr.strip())


def test_the_bar_follows_the_sweeps_own_estimate(monkeypatch, capsys):
    from mtplab.study.progress import SweepProgress

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with cli_sweep._bar() as follow:
        follow(SweepProgress(3, 9, 3, 0, 0, "evil\x1b[2J · depth 3", 0.5, 4.0, 75.0))
    err = capsys.readouterr().err
    assert "3/9 rows, 1 min 15 s to go · evil\\x1b[2J · depth 3" in err


def test_lists():
    assert depth_list("0-3") == (0, 1, 2, 3)
    assert depth_list("5, 1,2-3") == (5, 1, 2, 3)
    assert names("-x", ["none,int8", "fp8"]) == ["none", "int8", "fp8"]
    assert numbers("--temperature", ["0,0.7"]) == [0.0, 0.7]
    assert exclusion("-x", "as-stored") is None
    assert exclusion("-x", "published") == "published"
    assert exclusion("-x", "mtp.*, lm_head", "x") == ["mtp.*", "lm_head", "x"]
    for bad in ("", "1-", "-3", "a", "1,,2", "0-99999999"):
        with pytest.raises(ConfigError):
            depth_list(bad)


def test_parameters_of_a_notebook():
    words = ["report", "n.ipynb", "-p", "depth", "3", "--parameter", "label=a b", "-p", "x", "-1", "-o", "f"]
    assert join_parameters(words) == [
        *["report", "n.ipynb", "-p", "depth=3", "--parameter", "label=a b", "-p", "x=-1", "-o", "f"]
    ]
    assert join_parameters(["sweep", "-p", "a", "b"]) == ["sweep", "-p", "a", "b"]
    read = {text: _value(text) for text in ("3", "0.5", "True", "true", "None", "null", "[1, 2]", "int8", "1e999")}
    assert read == {
        **{"3": 3, "0.5": 0.5, "True": True, "true": True, "None": None, "null": None, "[1, 2]": [1, 2]},
        **{"int8": "int8", "1e999": "1e999"},
    }


def test_report_passes_what_it_was_given(monkeypatch, capsys, tmp_path):
    seen = {}

    def render(notebook, parameters, output, execution_timeout, on_progress):
        for step in ((0, 3, "one"), (1, 3, "one"), (1.5, 3, "12 of 28"), (2, 3, "two"), (3, 3, "done")):
            on_progress(*step)  # no terminal: each part once as it begins
        seen.update(notebook=str(notebook), parameters=parameters, timeout=execution_timeout)
        return tmp_path / "page.html"

    monkeypatch.setattr("mtplab.report.html.render_report", render)
    assert main(["report", "n.ipynb", "-p", "depths", "[0, 4]", "-p", "label", "x", "--execution-timeout", "9"]) == 0
    assert seen == {"notebook": "n.ipynb", "parameters": {"depths": [0, 4], "label": "x"}, "timeout": 9}
    begun = "".join(f"mtplab: cell {cell} of 3 · {part}\n" for cell, part in ((1, "one"), (3, "two"), (3, "done")))
    assert capsys.readouterr() == (f"{tmp_path / 'page.html'}\n", begun)
    assert main(["report", "n.ipynb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "page.html"), "parameters": {}}
