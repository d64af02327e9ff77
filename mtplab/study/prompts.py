"""Prompts by domain, from files, folders, strings or token ids.

This module does not know any model; text becomes ids with the tokenizer file that lies beside a checkpoint.
A JSON Lines file has one prompt a line: `{"id": "...", "domain": "...", "text": "..."}`, where `id` and
`domain` may be missing (then the line number and the file's name); a .txt file is one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtplab.errors import CheckpointError, ConfigError, not_text, printable

__all__ = ["Prompt", "PromptSet", "bundled_prompts", "calibration_ids", "load_prompts", "tokenizer_encoder"]

# prompts are read whole; nobody writes this much by hand
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text`, or `ids` when the user gave token ids."""

    id: str
    domain: str
    text: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts under one label; never empty."""

    label: str
    prompts: tuple[Prompt, ...]

    @property
    def domains(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(prompt.domain for prompt in self.prompts))

    def narrowed(self, domains: Sequence[str] | None = None, limit: int | None = None) -> PromptSet:
        """Only these domains, and only the first `limit` prompts of each; the label says so.

        Raises `ConfigError` for a domain that is not in the set.
        """
        kept = self.prompts
        label = self.label
        names = [domains] if isinstance(domains, str) else domains
        domains = list(names) if isinstance(names, Iterable) else names
        if domains is not None and not (isinstance(domains, list) and all(isinstance(name, str) for name in domains)):
            raise ConfigError(f"domains is {names!r:.60}; expected names such as {', '.join(self.domains[:2])}")
        if domains:
            unknown = [name for name in domains if name not in self.domains]
            if unknown:
                raise ConfigError(
                    f"no domain {', '.join(map(repr, unknown))} in prompt set {self.label!r}; "
                    f"it has {', '.join(self.domains)}"
                )
            kept = tuple(prompt for prompt in kept if prompt.domain in domains)
            label += f" [{', '.join(domains)}]"
        if limit is not None:
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise ConfigError(f"a limit of {limit!r} prompts a domain; expected a whole number of at least 1")
            seen: dict[str, int] = {}
            first = []
            for prompt in kept:
                seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
                if seen[prompt.domain] <= limit:
                    first.append(prompt)
            if len(first) < len(kept):
                label += f" (first {limit} of each)"
            kept = tuple(first)
        return replace(self, label=label, prompts=kept)

    def encoded(self, encode: Any) -> tuple[tuple[int, ...], ...]:
        """Ids of every prompt, `encode(text) -> list[int]` doing the text. Raises `ConfigError` for none."""
        result = []
        for prompt in self.prompts:
            ids = prompt.ids if prompt.ids is not None else tuple(int(i) for i in encode(prompt.text))
            if not ids:
                raise ConfigError(f"prompt {prompt.id!r} of {self.label!r} has no tokens; give it some text")
            result.append(ids)
        return tuple(result)


def load_prompts(source: Any = None) -> PromptSet:
    """A prompt set from whatever the user has.

    Args:
        source: None (the bundled prompts); a `PromptSet`; a `Path`; a string, which is a file when it ends in
            .jsonl or .txt, a folder when it names one, else itself a prompt; or a list of strings, of lists
            of ids, or of `Prompt`.

    Raises:
        ConfigError: a file cannot be read or a line is not a prompt (file and line are named), or there are
        none.
    """
    if source is None:
        return bundled_prompts()
    if isinstance(source, PromptSet):
        return source
    if isinstance(source, str):
        source = Path(source) if _looks_like_path(source) else [source]
    if isinstance(source, Path):
        return _from_path(source)
    if isinstance(source, Iterable) and not isinstance(source, bytes | dict):
        prompts = tuple(_from_item(item, number) for number, item in enumerate(source))
        if not prompts:
            raise ConfigError("the list of prompts is empty; give at least one")
        return PromptSet(f"{len(prompts)} given prompt{'s' if len(prompts) > 1 else ''}", prompts)
    raise ConfigError(
        f"prompts are {type(source).__name__}; expected a file or folder, a string, or a list of strings or "
        "of lists of ids"
    )


def bundled_prompts() -> PromptSet:
    """The prompts that come with a checkout of mtplab (`data/prompts`)."""
    folder = Path(__file__).resolve().parents[2] / "data" / "prompts"
    if not folder.is_dir():
        raise ConfigError(
            "there are no bundled prompts beside this installation; give prompts= (a .jsonl file, a folder "
            "of them, or strings)"
        )
    return replace(_from_path(folder), label="bundled")


def calibration_ids(policies: Iterable[Any], encode: Any, texts: Any = None) -> tuple[tuple[int, ...], ...] | None:
    """Ids of the texts that calibrated cache policies take their scales from: `texts` (as `load_prompts` takes them),
    or the bundled prompts; None where none of the policies (names, numbers, None) is calibrated.

    Raises ConfigError for a policy that is none, and what `load_prompts` raises.
    """
    from mtplab.quant.policy import resolve_policy

    if not any(resolve_policy(policy).calibrated for policy in policies if policy is not None):
        return None
    return load_prompts(texts).encoded(encode)


def tokenizer_encoder(folder: Path) -> Any:
    """`encode(text) -> list[int]` from `folder/tokenizer.json`, no special tokens added.

    Raises `CheckpointError` when there is no readable tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no tokenizer beside the checkpoint; give the prompts as lists of ids")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # the library takes no path that is not UTF-8
    except Exception as problem:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer that can be read ({problem})") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _looks_like_path(text: str) -> bool:
    if "\n" in text or "\0" in text or len(text) > 1000:
        return False
    return text.endswith((".jsonl", ".txt")) or Path(text).is_dir()


def _from_path(path: Path) -> PromptSet:
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise ConfigError(f"{path}: no .jsonl file in this folder; one JSON object with a text per line")
    elif path.exists():
        files = [path]
    else:
        raise ConfigError(f"{path}: no such file or folder of prompts")
    prompts = tuple(prompt for file in files for prompt in _from_file(file))
    return PromptSet(printable(path.stem if path.is_file() else path.name or str(path)), prompts)


def _from_file(path: Path) -> list[Prompt]:
    try:
        if not path.is_file():  # a pipe would wait for a writer, a device never ends
            raise ConfigError(f"{path}: not a regular file; expected a file of prompts")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; expected a file of at most {MAX_BYTES}")
        raw = path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror})") from None
    stem = printable(path.stem)  # names of prompts are written to files
    if path.suffix == ".txt":
        text = _utf8(raw, str(path))
        if not text.strip():
            raise ConfigError(f"{path}: is empty; expected a prompt")
        return [Prompt(stem, stem, text)]
    prompts = []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        text = _utf8(line, where).strip().removeprefix("\ufeff")
        if text:
            prompts.append(_from_line(text, where, stem, number))
    if not prompts:
        raise ConfigError(f"{path}: no prompt in this file; expected one JSON object with a text per line")
    return prompts


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{where}: not UTF-8 at byte {problem.start}; save the file as UTF-8") from None


def _from_line(text: str, where: str, stem: str, number: int) -> Prompt:
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError: no JSON, or a number of thousands of digits
        raise ConfigError(f"{where}: not JSON ({problem}); expected an object with a text") from None
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: a JSON {type(item).__name__}; expected an object with a text")
    prompt = item.get("text")
    if not isinstance(prompt, str) or not prompt:
        found = "is missing" if "text" not in item else f"is {json.dumps(prompt)[:40]}"
        raise ConfigError(f"{where}: text {found}; expected a non-empty string")
    labels = {}
    for key, default in (("id", f"{stem}-{number}"), ("domain", stem)):
        labels[key] = item.get(key, default)
        if not isinstance(labels[key], str) or not labels[key]:
            found = json.dumps(labels[key])[:40]
            raise ConfigError(f"{where}: {key} is {found}; expected a non-empty string")
    _legal_text((prompt, *labels.values()), where)
    return Prompt(labels["id"], labels["domain"], prompt)


def _legal_text(texts: Iterable[str], where: str) -> None:
    # "\ud800" is legal JSON and no legal text: no tokenizer takes it and no file can hold it
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as problem:
            raise ConfigError(f"{where}: half a surrogate pair at character {problem.start}") from None


def _from_item(item: Any, number: int) -> Prompt:
    where = f"prompt {number}"
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        if not item:
            raise ConfigError(f"{where} is an empty string; give it some text")
        fault = not_text(item)
        if fault is not None:
            raise ConfigError(f"{where} {fault}")
        return Prompt(f"prompt-{number}", "given", item)
    ids = item.tolist() if hasattr(item, "tolist") else item
    if isinstance(ids, list | tuple) and ids and all(type(i) is int and i >= 0 for i in ids):
        return Prompt(f"prompt-{number}", "given", ids=tuple(ids))
    raise ConfigError(f"{where} is {str(item)[:40]!r}; expected a string or a non-empty list of token ids")
