"""A server from a loaded model to its end: `serve` in Python, `Server` for who ends it otherwise.

Puts a port and a service together; knows neither HTTP nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtplab.decode.settings import Prompts
from mtplab.models import Model
from mtplab.quant.policy import QuantPolicy
from mtplab.server.handler import Handler
from mtplab.server.listener import Listener
from mtplab.server.service import Service

__all__ = ["Server", "serve"]

# seconds that answers have to reach their clients once nothing runs any more
_FAREWELL = 2.0


class Server:
    """A service that listens, until `stop`. `url` is where, `service` what answers, `name` the model's in requests."""

    def __init__(self, service: Service, listener: Listener, api_key: str | None = None):
        self.service, self.name, self.url = service, service.name, listener.url
        self._listener = listener
        listener.start(service, Handler, api_key)

    def stop(self, within: float | None = None) -> bool:
        """Ends what waits or runs, after its current round, and closes every connection. `within`: seconds to wait for
        that at most, the round be over or not. Returns whether it was."""
        self.service.stop(wait=within is None)
        answered = self._listener.stop(_FAREWELL if within is None else within)
        # a client that left has no answer to wait for, but what it asked for may still run
        return answered and self.service.idle(within or 0)


@contextmanager
def serve(
    model: Model,
    depth: int = 3,
    *,
    quant_policy: str | int | QuantPolicy | None = None,
    draft_quant_policy: str | int | QuantPolicy | None = None,
    calibration: Prompts | None = None,
    seed: int = 0,
    exact: bool | None = None,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
) -> Iterator[Server]:
    """Serve a loaded model over HTTP while the block runs, from threads of this process: a study server (see the room).

    Args:
        depth, quant_policy, draft_quant_policy, calibration, exact: of every request, as `generate` has them.
        seed: of requests that give none.
        name: what requests call the model; the name of the checkpoint's folder if None.
        port: 0 takes a free one; `.url` of what is yielded says which.
        api_key: if not None, asked of requests for completions, models and token ids.

    Leaving the block ends what is still being answered, after its current round. Raises ConfigError for settings that
    the model cannot be run with and for a port that cannot be had.

        with serve(model, depth=3) as server:
            requests go to server.url + "/v1/completions"
    """
    service = Service(
        model,
        depth,
        quant_policy=quant_policy,
        draft_quant_policy=draft_quant_policy,
        calibration=calibration,
        seed=seed,
        exact=exact,
        name=name,
    )
    server = Server(service, Listener(host, port), api_key)
    try:
        yield server
    finally:
        server.stop()
