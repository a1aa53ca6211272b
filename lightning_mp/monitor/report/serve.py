"""The same page, served on this machine while the run goes on; it asks for news every few seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lightning_mp.errors import Fault, PlanError
from lightning_mp.monitor.report.load import FILES
from lightning_mp.monitor.report.page import RunDirs, find_runs, load_runs, news, plotly_script, render

HOST = "127.0.0.1"
PORT = 8765


def serve(run_dirs: RunDirs, port: int, say: Callable[[str], None]) -> None:
    """Serve the report until Ctrl-C; ``say`` gets the address. Raises what :class:`ReportServer` raises."""
    with ReportServer(run_dirs, port) as server:
        try:
            say(server.url)
            server.serve_forever()
        except KeyboardInterrupt:
            return


class ReportServer(ThreadingHTTPServer):
    """Serves the report on ``run_dirs`` at ``url`` until it is closed; ``port=0`` takes any free port.

    Raises:
        PlanError: a folder holds no run, or the port cannot be had.
        MissingExtraError: plotly is not installed.
    """

    daemon_threads = True

    def __init__(self, run_dirs: RunDirs, port: int = PORT) -> None:
        self._folders = find_runs(run_dirs)
        self._lock = Lock()
        self._version, self._news = "", b""
        plotly_script()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            fix = "--port 0 takes any that is free"
            fault = Fault(f"port {port}: {error.strerror}", "a free port of this machine", fix)
            raise PlanError([fault], "report") from None
        self.url = f"http://{HOST}:{self.server_port}/"

    def page(self) -> bytes:
        """The whole page."""
        return render(load_runs(self._folders), live=True).encode("utf-8", errors="replace")

    def news(self, seen: str) -> bytes | None:
        """The page's content as JSON, ``None`` where it is what ``seen`` names already."""
        with self._lock:
            version = self._stamp()
            if version != self._version:
                content = {**news(load_runs(self._folders)), "version": version}
                self._version, self._news = version, json.dumps(content, allow_nan=False).encode()
            return None if seen == self._version else self._news

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def _stamp(self) -> str:
        """Changes whenever a file of a run does."""
        found = ["files"]
        for path in (folder / name for folder in self._folders for name in FILES):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append(f"{path.name}.{stat.st_mtime_ns:x}.{stat.st_size:x}")
        return "-".join(found)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]  this handler has no other

    def do_GET(self) -> None:
        """Answer the page and its news; there is nothing else."""
        asked = urlsplit(self.path)
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            # Another site's name that was made to point here: its pages must not read this run.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"not under this name\n")
        elif asked.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page())
        elif asked.path == "/data.json":
            news = self.server.news(parse_qs(asked.query).get("seen", [""])[0])
            if news is None:
                self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._answer(HTTPStatus.OK, "application/json", news)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"nothing here\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)
