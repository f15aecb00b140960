"""An MLflow tracking server behind basic authentication, on the loopback, for the unmodified client of MLflow.

    with MlflowServer(user="ada", password="...") as server:
        os.environ["MLFLOW_TRACKING_URI"] = server.address

It answers the requests that a run makes (MLflow's REST API 2.0: experiments/get-by-name and create, runs/create,
log-batch and update) and keeps them; without the right credentials it answers 401.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_API = "/api/2.0/mlflow/"


class MlflowServer:
    """The server, from `with` to its end. calls: (endpoint, body) of each authenticated request; refused: others."""

    def __init__(self, user: str, password: str) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.refused: list[str] = []
        expected = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Requests are kept instead."""

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                endpoint = self.path.partition("?")[0].removeprefix(_API)
                if self.headers.get("Authorization") != expected:
                    outer.refused.append(endpoint)
                    return self._answer(401, {"error_code": "UNAUTHENTICATED", "message": "who are you"})
                outer.calls.append((endpoint, body))
                if endpoint == "experiments/get-by-name":
                    return self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"})
                info = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING", "start_time": 1}
                answers: dict[str, dict[str, Any]] = {
                    "experiments/create": {"experiment_id": "7"},
                    "runs/create": {"run": {"info": info, "data": {}}},
                    "runs/update": {"run_info": info},
                    "runs/get": {"run": {"info": info, "data": {}}},
                }
                return self._answer(200, answers.get(endpoint, {}))

            def _answer(self, status: int, data: dict[str, Any]) -> None:
                text = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.address = f"http://{self.host}"

    def metrics(self) -> list[tuple[str, float, int]]:
        """Every metric that was logged: name, value, step."""
        batches = [body for endpoint, body in self.calls if endpoint == "runs/log-batch"]
        return [(each["key"], each["value"], int(each["step"])) for body in batches for each in body.get("metrics", [])]

    def __enter__(self) -> "MlflowServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
