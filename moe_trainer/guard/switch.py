"""A switch that is flipped from outside while a run goes on: `curl http://HOST:PORT/` (`--straggler-ctrlr-port`).

Whatever asks is answered with the new state. There is no password: who can reach the port can flip it, and can do nothing else.
"""

import logging
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for one request; they are served one after the other


class _Server(TCPServer):
    allow_reuse_address = True


class Switch:
    """Listens on a port of all interfaces, in a thread of its own. on: the present state.

    name: what it switches, for the answer. port 0: one that is free. A port that cannot be had is told, and the switch stays as it is.
    """

    def __init__(self, name: str, port: int, on: bool):
        self.on = on
        self.port: int | None = None
        self._server: _Server | None = None
        try:
            self._server = _Server(("", port), self._handler(name))
        except (OSError, OverflowError) as error:
            logger.warning("%s stays %s: port %d of its switch cannot be opened (%s)", name, self.state, port, error)
            return
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name=f"switch of {name}", daemon=True).start()

    @property
    def state(self) -> str:
        return "on" if self.on else "off"

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _handler(self, name: str) -> type[BaseHTTPRequestHandler]:
        switch = self

        class Flip(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

            def do_GET(self) -> None:
                if self.path != "/":  # a browser also asks for an icon
                    self.send_error(404)
                    return
                switch.on = not switch.on
                text = f"{name} is {switch.state}\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *values: object) -> None:
                """Say nothing: the run's own log tells when the change takes effect."""

        return Flip
