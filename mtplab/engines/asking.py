"""A point's prompts put to one server, and what it counted meanwhile.

Prompts of a domain go together, as many at once as was asked for, with a look at the server's figures before and after;
one by one where only one may be under way. A group of which a request broke, or whose figures cannot be trusted, is
measured anew, for its count is not to be known. Everything ends within its limits, in a notebook's event loop or out
of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.config import SamplingConfig
from mtplab.engines.accounts import caught_up, counts_between, impossible, lost, traffic
from mtplab.engines.clean import Cleaner
from mtplab.engines.client import Broken, Client, PutOff, Refused
from mtplab.engines.engine import Answer, Engine, NotAnAnswer
from mtplab.engines.figures import FiguresFull, FiguresReset, Look, look, samples_of
from mtplab.engines.loop import OutOfTime, in_loop
from mtplab.engines.measured import Counts, Measured, Share
from mtplab.engines.serving import Progress
from mtplab.engines.settings import Limits
from mtplab.errors import MtplabError

__all__ = ["Asked", "Server"]

_POLL = 0.05  # seconds between two looks that wait for something
_LOOK = 30.0  # seconds of one look
_STILL = 1.0  # seconds in which counts that do not move are taken for all there is
_PAUSE = 0.25  # seconds between two attempts at a group, doubled with each


@dataclass(frozen=True)
class Asked:
    """How far a measurement is, in tokens asked for."""

    tokens_done: int
    tokens_total: int


class Server:
    """A server that answers, of an engine that is known (`Running`).

    Args:
        address, model: where it is, and what it calls its model.
        key: of its API, None where it asks for none.
        facts: of it, for the rows' provenance; JSON-ready, no address among them.
    """

    def __init__(
        self, address: str, engine: Engine, model: str, limits: Limits, key: str | None, facts: dict[str, Any]
    ):
        self.address, self.engine, self.model, self.limits, self._key = address, engine, model, limits, key
        self.facts = facts

    def alive(self) -> bool:
        """As far as is known without asking it."""
        return True

    def close(self) -> None:
        """Nothing is held between measurements."""

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        domains: Sequence[str],
        depth: int,
        sampling: SamplingConfig,
        cancel: Any,
        on_progress: Callable[[Progress], None] | None,
    ) -> Measured:
        """All prompts at the server's depth (`serving.Running`)."""
        work = _Measurement(self, self._key, prompts, domains, depth, sampling, on_progress)
        try:
            return in_loop(work.run, cancel, self.limits.point)
        except FiguresFull as problem:
            raise FiguresFull(f"{self.engine.title}: {problem}; {self._anew()}") from None
        except OutOfTime as problem:
            raise OutOfTime(f"{self.engine.title}: {problem}, the limit of a point") from None
        except MtplabError as problem:
            raise self.cleaner().error(problem) from None

    def _anew(self) -> str:
        if self.facts.get("attached", True):
            return "start the server anew"
        return "it is started anew for the next point; sweep again for this one"

    def cleaner(self, paths: tuple[str, ...] = ()) -> Cleaner:
        """What makes an error of this server's fit for a row."""
        secrets = () if self._key is None else (self._key,)
        return Cleaner(self.engine.title, self.address, secrets, paths)


@dataclass(frozen=True)
class _Group:
    """What one group of prompts gave."""

    answers: list[Answer]
    shares: list[Share]
    seconds: float
    remarks: list[str]


class _Measurement:
    """One point at one depth."""

    def __init__(
        self,
        server: Server,
        key: str | None,
        prompts: Sequence[Sequence[int]],
        domains: Sequence[str],
        depth: int,
        sampling: SamplingConfig,
        on_progress: Callable[[Progress], None] | None,
    ):
        self.server, self.key, self.prompts, self.depth, self.sampling = server, key, prompts, depth, sampling
        self.on_progress = on_progress
        self.total = len(prompts) * sampling.max_new_tokens
        self.done = 0
        self.given_up = False  # whether a request was that the server may have gone on with
        alone = server.limits.concurrency == 1
        self.groups: dict[Any, list[int]] = {}
        for p, domain in enumerate(domains):
            self.groups.setdefault(p if alone else domain, []).append(p)

    async def run(self) -> Measured:
        server, limits = self.server, self.server.limits
        found = []
        async with Client(server.address, self.key, limits.concurrency, limits.request, limits.attempts) as client:
            async with Client(server.address, self.key, 1, min(_LOOK, limits.request), limits.attempts) as looking:
                for members in self.groups.values():
                    found.append(await self._group(members, client, looking))
        both = zip(self.groups.values(), found, strict=True)
        answers = {p: answer for members, each in both for p, answer in zip(members, each.answers, strict=True)}
        ids = [answers[p].ids for p in range(len(self.prompts))]
        return Measured(
            engine=server.engine.name,
            version=server.facts.get("version"),
            shares=tuple(share for each in found for share in each.shares),
            outputs=None if None in ids else tuple(ids),
            seconds=sum(each.seconds for each in found),
            remarks=tuple(dict.fromkeys(remark for each in found for remark in each.remarks)),
            facts={**server.facts, "concurrency": limits.concurrency, "counted": self._counted(found)},
        )

    def _counted(self, found: list[_Group]) -> str:
        return "prompt by prompt" if all(len(x.prompts) == 1 for each in found for x in each.shares) else "by domain"

    async def _group(self, members: list[int], client: Client, looking: Client) -> _Group:
        """A group, again where it must be."""
        attempts = self.server.limits.attempts
        for attempt in range(1, attempts + 1):
            done = self.done
            try:
                group = await self._once(members, client, looking)
            except PutOff as problem:
                raise MtplabError(str(problem)) from None
            except (Broken, FiguresReset) as problem:
                self.done = done
                if attempt == attempts:
                    again = f", {attempts} times in all" if attempts > 1 else ""
                    raise MtplabError(f"{problem}{again}") from None
                self.given_up = True
                await asyncio.sleep(min(5.0, _PAUSE * 2**attempt))
                await self._settled(looking)
                continue
            if not group.remarks or attempt == attempts:
                return group
            self.done = done
        raise AssertionError("every attempt returns or raises")

    async def _once(self, members: list[int], client: Client, looking: Client) -> _Group:
        engine = self.server.engine
        before = await self._quiet(looking)
        under_way = bool(before.busy)
        began = time.monotonic()
        answers = await self._answers(members, client)
        seconds = time.monotonic() - began
        counted = await self._counted_since(before, answers, looking)
        others = traffic(counted, answers)
        busy = others is not None or under_way
        own = self._own(answers, counted, busy)
        shares = self._shares(members, answers, counted, own, busy)
        for share in shares:
            why = impossible(share.counts, self.depth)
            if why is not None:
                raise Broken(f"{engine.title}'s counts cannot be right: {why}")
        mine = sum(share.counts.rounds or 0 for share in shares)
        remarks = list(filter(None, [lost(engine, counted, answers, self.depth)]))
        if busy:
            what = f"others had {others} of it" if others is not None else "others had requests under way"
            effect = "which the answers' own counts leave out"
            if not own and self.depth:
                effect = "whose drafts cannot be told from these, so acceptance is not known: measure while it is quiet"
                effect += f", or start it with {engine.answers_flag}" if engine.answers_flag else ""
            if self.given_up:
                what += ", or a request of these that was given up and asked again"
            remarks.append(f"other traffic on the server during the run: {what}, {effect}")
        elif own and self.depth and not _agree(engine, counted.rounds, mine):
            raise Broken(
                f"{engine.title} counted {counted.rounds} rounds meanwhile, its answers {mine}: the server's figures "
                "and its answers are not of the same requests"
            )
        return _Group(answers, shares, seconds, remarks)

    def _own(self, answers: list[Answer], counted: Look, busy: bool) -> bool:
        """Whether the answers' own counts are taken: not where they are without positions, and the server's figures
        have them of these requests alone."""
        if any(answer.counts is None for answer in answers):
            return False
        return busy or counted.per_position is None or all(answer.counts.per_position is not None for answer in answers)

    def _shares(
        self, members: list[int], answers: list[Answer], counted: Look, own: bool, busy: bool
    ) -> list[Share]:
        """Prompt by prompt from the answers' `own` counts, else the group's, where it is of these requests alone."""
        whole = counts_between(self.server.engine, counted, answers, self.depth)
        if self.depth and own:
            return [Share((p,), answer.counts) for p, answer in zip(members, answers, strict=True)]
        if not self.depth:
            tokens = [max(0, answer.completion_tokens - 1) for answer in answers]
            return [Share((p,), Counts(n, n, 0, 0, ())) for p, n in zip(members, tokens, strict=True)]
        if busy:
            whole = Counts(whole.tokens, None, None, None, None)
        return [Share(tuple(members), whole)]

    async def _answers(self, members: list[int], client: Client) -> list[Answer]:
        gate = asyncio.Semaphore(self.server.limits.concurrency)

        async def one(p: int) -> Answer:
            async with gate:
                answer = await self._ask(p, client)
            self.done += self.sampling.max_new_tokens
            if self.on_progress is not None:
                self.on_progress(Asked(min(self.done, self.total), self.total))
            return answer

        tasks = [asyncio.ensure_future(one(p)) for p in members]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # one that fails must not leave the others at it
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, p: int, client: Client) -> Answer:
        engine, ids = self.server.engine, self.prompts[p]
        body = engine.request(self.server.model, ids, self.sampling, self.sampling.seed + p)
        given = await client.post(engine.completions_path, body)
        try:
            answer = engine.answer(given, self.depth)
        except NotAnAnswer as problem:
            raise Broken(f"{self.server.address}{engine.completions_path}: no completion: {problem}") from None
        if answer.prompt_tokens != len(ids):
            raise Refused(
                f"{engine.title} read {answer.prompt_tokens} tokens of a prompt of {len(ids)}: it does not take ids as "
                "they are"
            )
        if answer.completion_tokens > self.sampling.max_new_tokens:
            raise Refused(
                f"{engine.title} gave {answer.completion_tokens} tokens; {self.sampling.max_new_tokens} were asked for"
            )
        return answer

    async def _look(self, client: Client) -> Look:
        engine = self.server.engine
        status, text = await client.get(engine.metrics_path)
        if status != 200:
            raise Broken(f"{self.server.address}{engine.metrics_path}: status {status}; expected the server's metrics")
        try:
            return look(engine.figures, samples_of(text, engine.prefixes))
        except FiguresFull:
            raise
        except MtplabError as problem:  # half an answer, say
            raise Broken(f"{self.server.address}{engine.metrics_path}: {problem}") from None

    async def _quiet(self, client: Client) -> Look:
        """The figures once nobody's request is under way, or after waiting for that as long as figures may lag."""
        ends = time.monotonic() + self.server.engine.lag
        while True:
            found = await self._look(client)
            if not found.busy or time.monotonic() > ends:
                return found
            await asyncio.sleep(_POLL)

    async def _settled(self, client: Client) -> None:
        """Waits until what was given up has ended, or for as long as a request and its count may take: some servers go
        on with it and would count it among what is asked next. Where none says what is under way, until its counts are
        still for a moment."""
        ends = time.monotonic() + self.server.limits.request + self.server.engine.lag
        before, still = None, time.monotonic()
        while time.monotonic() < ends:
            try:
                found = await self._look(client)
            except Broken:
                return  # the next attempt says so
            if found.busy is not None and not found.busy:
                return
            if found != before:
                before, still = found, time.monotonic()
            elif found.busy is None and time.monotonic() - still > _STILL:
                return
            await asyncio.sleep(_POLL)

    async def _counted_since(self, before: Look, answers: list[Answer], client: Client) -> Look:
        """What was counted since, once all of it is there."""
        engine = self.server.engine
        ends = time.monotonic() + engine.lag
        while True:
            counted = (await self._look(client)).since(before)
            if caught_up(counted, answers):
                return counted
            if time.monotonic() > ends:
                tokens = sum(answer.completion_tokens for answer in answers)
                if counted.busy and (counted.generation_tokens or 0) >= tokens:
                    return counted  # others are at it still
                raise Broken(
                    f"{engine.title} shows {counted.requests} requests and {counted.generation_tokens} tokens "
                    f"{engine.lag:g} s after {len(answers)} requests of {tokens} tokens were answered"
                )
            await asyncio.sleep(_POLL)


def _agree(engine: Engine, counted: int | None, answered: int) -> bool:
    """Whether a server's rounds can be those of its answers, among which are steps that some engines do not count."""
    if counted is None:
        return True
    return counted <= answered if engine.figures.plain_steps else counted == answered
