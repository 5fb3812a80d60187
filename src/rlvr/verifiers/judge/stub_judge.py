"""A judge for tests: a server on this machine that speaks the API of chat endpoints, with scripted replies and faults.

with StubJudge(lambda request: request.verdict("yes" if "4" in request.fenced["response"] else "no")) as stub:
    verifier = {"name": "judge", "urls": stub.url, "model": "stub"}
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_FENCED = re.compile(r"^<<<BEGIN (\w+) (\w+)>>>\n(.*?)\n<<<END \1 \2>>>$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"<<<BEGIN name (\w+)>>>")
FAULTS = (500, 503, 0)
"""Statuses of failures, in turn; 0: the connection is closed without a reply."""


@dataclass(frozen=True)
class StubRequest:
    """A request as the stub received it."""

    body: Mapping[str, Any]
    key: str
    """The key that came with it."""

    @property
    def text(self) -> str:
        """The last message."""
        return str(self.body["messages"][-1]["content"])

    @property
    def code(self) -> str:
        """The code of the request's fences, as the system message gives it."""
        found = _CODE.search(str(self.body["messages"][0]["content"]))
        return found[1] if found else ""

    @property
    def fenced(self) -> dict[str, str]:
        """The texts between fences with that code, by name."""
        return {name: text for name, code, text in _FENCED.findall(self.text) if code == self.code}

    @property
    def outside(self) -> str:
        """The last message without them."""
        return _FENCED.sub(lambda match: "" if match[2] == self.code else match[0], self.text)

    def verdict(self, what: str) -> str:
        """A reply whose verdict is `what`, with the code."""
        return f"I have read it.\nVerdict {self.code}: {what}"

    @property
    def letters(self) -> dict[str, str]:
        """Label -> the letter that the request asks for in its place, with `read: probability`; else nothing."""
        line = self.text.rpartition("\n")[2]
        if not line.startswith("Reply with one letter only"):
            return {}
        meant = line.removesuffix(".").partition(": ")[2]
        return {label: letter for letter, label in (one.split(" for ", 1) for one in meant.split(", "))}

    def probabilities(self, of: Mapping[str, float]) -> dict[str, Any]:
        """A reply whose first token is each of these labels with this probability, the likeliest being said."""
        letters = self.letters
        tokens = [{"token": letters.get(label, label), "logprob": math.log(p)} for label, p in of.items() if p]
        likeliest = max(of, key=of.__getitem__)
        said = {"token": letters.get(likeliest, likeliest), "logprob": math.log(of[likeliest])}
        message = {"role": "assistant", "content": said["token"]}
        return {"message": message, "logprobs": {"content": [{**said, "top_logprobs": tokens}]}}


Answer = str | Mapping[str, Any]
"""The text of a reply, or its whole `choices[0]`."""


class StubJudge:
    """Answers requests on a port of this machine, each on a thread of its own, while the `with` block runs.

    `answer` is one text for all, a list of texts in turn, or a function of the request; it is called after `delay`
    seconds. A share `fail` of the requests gets an error status or none, a share `hang` gets no reply until the end;
    which ones, the seed and the number of the request decide. `retry_after` is sent with failures.
    """

    def __init__(
        self,
        answer: Answer | Sequence[str] | Callable[[StubRequest], Answer] = "yes",
        *,
        fail: float = 0.0,
        hang: float = 0.0,
        delay: float = 0.0,
        retry_after: float | None = None,
        seed: int = 0,
    ) -> None:
        self.answer = answer
        self.fail = fail
        self.hang = hang
        self.delay = delay
        self.retry_after = retry_after
        self.seed = seed
        self.requests: list[StubRequest] = []
        """All that came, in order."""
        self.failed = 0
        self.hung = 0
        self.most_at_once = 0
        self.error: Exception | None = None
        """The first error of the function `answer`; the `with` block raises it at its end."""
        self._at_once = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> StubJudge:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="stub-judge")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if self.error is not None and kind is None:
            raise self.error

    @property
    def url(self) -> str:
        """The url for a judge's `urls`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def reply(self, body: Mapping[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of a reply; status 0: none."""
        request = StubRequest(body, key)
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            drawn = random.Random(f"{self.seed}/{number}").random()
            if drawn < self.hang:
                self.hung += 1
                self._over.wait()
                return 0, {}
            time.sleep(self.delay)
            if drawn < self.hang + self.fail:
                with self._lock:
                    self.failed += 1
                    return FAULTS[self.failed % len(FAULTS)], {"error": {"message": "a scripted failure"}}
            return 200, self._completion(request, number)
        # The test's own mistake: a status that is not tried again, and the exception at the end of the block.
        except Exception as error:
            self.error = self.error or error
            return 400, {"error": {"message": repr(error)}}
        finally:
            with self._lock:
                self._at_once -= 1

    def _completion(self, request: StubRequest, number: int) -> dict[str, Any]:
        answer: Any = self.answer
        if callable(answer):
            answer = answer(request)
        elif not isinstance(answer, (str, Mapping)):
            answer = answer[number % len(answer)]
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if isinstance(answer, str):
            choice["message"] = {"role": "assistant", "content": answer}
        else:
            choice |= answer
        words = sum(len(str(message["content"]).split()) for message in request.body["messages"])
        said = len(str(choice["message"].get("content")).split())
        return {
            "object": "chat.completion",
            "choices": [choice],
            "usage": {"prompt_tokens": words, "completion_tokens": said},
        }


class _Server(ThreadingHTTPServer):
    stub: StubJudge
    daemon_threads = True
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        """Answer one request."""
        stub = self.server.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        status, row = stub.reply(body, key)
        if not status or not self.path.endswith("/v1/chat/completions"):
            self.close_connection = True
            return
        data = json.dumps(row).encode()
        self.send_response(status)
        if status != 200 and stub.retry_after is not None:
            self.send_header("Retry-After", f"{stub.retry_after:g}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def handle(self) -> None:
        """Serve a connection; one that the client gives up is no error."""
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
