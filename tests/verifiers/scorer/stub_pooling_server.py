"""A server on this machine that speaks the API of vLLM's pooling models: requests are checked by vLLM's own schemas, and
replies are made by them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pydantic import TypeAdapter, ValidationError


class StubPoolingServer:
    """Answers while the `with` block runs. `numbers(path, request)` gives the logits, score or embedding of a text."""

    def __init__(self, numbers, statuses=(), most=None):
        from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest, ClassificationResponse
        from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest, EmbeddingResponse
        from vllm.entrypoints.pooling.scoring.protocol import ScoreRequest, ScoreResponse

        self.schemas = {
            "/classify": (TypeAdapter(ClassificationRequest), ClassificationResponse),
            "/score": (TypeAdapter(ScoreRequest), ScoreResponse),
            "/v1/embeddings": (TypeAdapter(EmbeddingRequest), EmbeddingResponse),
        }
        self.numbers = numbers
        self.statuses = list(statuses)
        """Statuses of the first replies, before it answers."""
        self.most = most
        """Characters that it takes."""
        self.requests = []
        self.keys = []

    def __enter__(self):
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.keys.append(self.headers.get("Authorization"))
                status, row = stub.reply(self.path, body)
                data = json.dumps(row).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def reply(self, path, body):
        """The status and JSON of a reply."""
        self.requests.append((path, body))
        if self.statuses:
            return self.statuses.pop(0), {"error": {"message": "a scripted failure"}}
        request, response = self.schemas[path]
        try:
            asked = request.validate_python(body)
        except ValidationError as error:
            return 400, {"error": {"message": str(error)}}
        # Pydantic takes a field that it does not know; vLLM's models keep it aside.
        if asked.model_extra:
            return 400, {"error": {"message": f"unknown fields {sorted(asked.model_extra)}"}}
        if self.most is not None and len(json.dumps(body)) > self.most:
            return 400, {"error": {"message": f"This model's maximum context length is {self.most} tokens."}}
        numbers = self.numbers(path, body)
        row = {"index": 0}
        if path == "/classify":
            row |= {"label": None, "probs": numbers, "num_classes": len(numbers)}
        elif path == "/score":
            row |= {"score": numbers[0]}
        else:
            row |= {"embedding": numbers}
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return 200, response(id="1", model="rm", data=[row], usage=usage).model_dump(mode="json")
