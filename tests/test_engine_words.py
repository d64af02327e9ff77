"""What a server or a program repeats of a key, an address or a path is in no error and in no row."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mtplab
from fake_engine import FakeEngine
from mtplab.engines import Attach, Limits
from mtplab.engines.attach import attach
from mtplab.engines.clean import Cleaner, hides, key_of
from mtplab.engines.client import MAX_SAID
from mtplab.errors import ConfigError, MtplabError

KEY = 'sk-Se"cret/0123\\4567'
HOME = "/".join(("", "home", "alice"))
QUICK = Limits(request=5.0, point=20.0, attempts=1)


def swept(bundled, folder, fault, key=KEY):
    """(the row of a sweep on a server with this fault, all that was written of it, the server's address)."""
    with FakeEngine(3, fault=lambda engine, number, handler: fault(handler) or True, key=key) as engine:
        settings = Attach(addresses=(engine.url,), limits=QUICK)
        (row,) = mtplab.sweep(bundled, [[1, 2]], depths=[3], max_new_tokens=9, results=folder, engine=settings).rows
    return row, (folder / "rows.jsonl").read_text(), engine.url


SAYS = {
    # where an error is cut, half a key would be left
    "cut": lambda handler: handler.send(400, "x" * (MAX_SAID - 15) + KEY),
    "in JSON": lambda handler: handler.send(400, {"error": {"message": "x" * (MAX_SAID - 15) + KEY}}),
    "no JSON": lambda handler: handler.send(200, "y" * 70 + KEY),
    "a value": lambda handler: handler.send(200, {"choices": [{"text": [KEY]}], "usage": {}}),
    "a count": lambda handler: handler.send(
        200, {"choices": [{"text": ""}], "usage": {"prompt_tokens": 2, "completion_tokens": "z" * 30 + KEY}}
    ),
    "escaped": lambda handler: handler.send(400, "".join(f"\\u{ord(sign):04X}" for sign in KEY)),
    "in a URL": lambda handler: handler.send(500, "".join(f"%{ord(sign):02x}" for sign in KEY)),
}


@pytest.mark.parametrize("says", SAYS.values(), ids=list(SAYS))
def test_no_part_of_a_key_gets_into_a_row(says, bundled, tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLAB_API_KEY", KEY)
    row, written, _ = swept(bundled, tmp_path, says)
    assert row.error
    escaped = json.dumps(KEY)[1:-1]
    for start in range(len(escaped) - 6):
        assert escaped[start : start + 7] not in written
    assert "\\u00" not in row.error and "%73" not in row.error


def test_no_part_of_a_key_gets_into_an_error_of_attaching(monkeypatch):
    monkeypatch.setenv("MTPLAB_API_KEY", KEY)
    with FakeEngine(key="another", fault=None) as engine:
        engine.metrics = "# TYPE a counter\na " + "1" * 60 + KEY + "\n"
        for key in ("another", KEY):
            engine.key = key
            with pytest.raises(MtplabError) as found:
                attach(Attach(addresses=(engine.url,), limits=QUICK))
            assert "Se" not in str(found.value) and "0123" not in str(found.value)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=4), st.text(max_size=9))
def test_a_key_is_seen_in_every_form(key, around):
    import urllib.parse

    hide = hides([key])
    forms = [key, json.dumps(key)[1:-1], repr(key)[1:-1], urllib.parse.quote(key), urllib.parse.quote(key, safe="")]
    forms += ["".join(f"\\u{ord(sign):04x}" for sign in key)]
    for form in forms:
        assert "…" in hide(f"{around}{form}{around}") and hide(form) == "…"


def test_a_key_that_no_header_takes_is_refused_and_not_repeated(monkeypatch):
    for key in ("sk-secret\nX-More: 1", "sk-sécret"):
        monkeypatch.setenv("MTPLAB_API_KEY", key)
        with pytest.raises(ConfigError, match="MTPLAB_API_KEY holds signs") as found:
            key_of("MTPLAB_API_KEY")
        assert "sk-" not in str(found.value)
    monkeypatch.setenv("MTPLAB_API_KEY", "sk-secret\n")
    assert key_of("MTPLAB_API_KEY") == "sk-secret"


# addresses and paths


def test_no_address_gets_into_a_row(bundled, tmp_path, monkeypatch):
    monkeypatch.delenv("MTPLAB_API_KEY", raising=False)

    def says(handler):
        handler.send(500, f"Server at {handler.headers['Host']}, forwarded for http://10.1.2.3:80/x")

    row, written, url = swept(bundled, tmp_path, says, key=None)
    assert "status 500 (Server at vLLM, forwarded for …/x)" in row.error
    assert url.removeprefix("http://") not in written and "10.1.2.3" not in written


@pytest.mark.parametrize(
    ("said", "cleaned"),
    [
        ("https://GPU-7.corp:8000/p/v1/completions: no", "vLLM /v1/completions: no"),
        ("at gpu-7.corp:8000 and GPU-7.CORP.", "at vLLM and vLLM."),
        ("at gpu-7.corporation", "at gpu-7.corporation"),
        ("tcp://10.0.0.7:29500, 0.0.0.0:8000, localhost:80, [::1]:9", "…, …, …, …"),
        ("vLLM 0.32.0 at depth 3 of 1.2.3", "vLLM 0.32.0 at depth 3 of 1.2.3"),
        ('File "/opt/venv/lib/vllm/x.py", line 3', 'File "…/x.py", line 3'),
        ("in /models of mine/Qwen/config.json", "in …/Qwen/config.json"),
        (f"{HOME} and {HOME}/t.jinja, file://{HOME}/a", "… and …/t.jinja, …/a"),
        ("vLLM /v1/completions, 3/tmp and /metrics", "vLLM /v1/completions, 3/tmp and /metrics"),
        ("~/a and a/home/b", "~/a and a/home/b"),
    ],
)
def test_addresses_and_paths_are_seen(said, cleaned):
    cleaner = Cleaner("vLLM", "https://gpu-7.corp:8000/p", (), ("/models of mine/Qwen", "m", "/"))
    assert cleaner.text(said) == cleaned
    assert cleaner.text(cleaned) == cleaned
    assert cleaner.text(f"{Path.home()}, {Path.home()}/a") == "…, …/a"
