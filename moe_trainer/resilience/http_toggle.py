"""An on/off switch that a user flips over HTTP during a run: `curl http://HOST:PORT/` (`--straggler-ctrlr-port`).

Every request flips the switch and is answered with the new state. There is no password: a client that reaches the
port can flip the switch and nothing else.
"""

import logging
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 5.0  # requests are served one after the other


class _Server(TCPServer):
    allow_reuse_address = True


class HttpToggle:
    """Listens on a port of all interfaces, in a thread. If the port cannot be opened, the state never changes.

    Port 0 chooses a free one; the answer calls what is switched `name`.
    """

    def __init__(self, name: str, port: int, on: bool):
        self.on, self.port = on, None
        self._server: _Server | None = None
        try:
            self._server = _Server(("", port), self._make_handler(name))
        except (OSError, OverflowError) as error:
            logger.warning("%s stays %s: cannot open control port %d (%s)", name, self.state, port, error)
            return
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name=f"switch of {name}", daemon=True
        ).start()

    @property
    def state(self) -> str:
        return "on" if self.on else "off"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _make_handler(self, name: str) -> type[BaseHTTPRequestHandler]:
        toggle = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S

            def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
                if self.path != "/":  # a browser also requests an icon
                    self.send_error(404)
                    return
                toggle.on = not toggle.on
                text = f"{name} is {toggle.state}\n".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *values: object) -> None:
                """Log nothing: the run's log shows when the change takes effect."""

        return Handler
