"""push_to_hub against a hub on this machine: the requests of huggingface_hub, the files and the card."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml

from rlvr.run.model_card import redacted
from small_run import TREE, overlaid, task_rows

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from rlvr import GRPOTrainer
from rlvr.errors import RlvrError

torch.set_num_threads(1)

def correct(completion, answer):
    return float(answer in completion)

def refused(repo, **more):
    try:
        trainer.push_to_hub(repo, **more)
    except RlvrError as error:
        print(f"{type(error).__name__}: {error}")

rows = json.loads(Path("rows.json").read_text())
config = json.loads(Path("tree.json").read_text())
trainer = GRPOTrainer(None, rows[:4], correct, config, eval_tasks=rows[4:])
refused("early", token="hf_test")
trainer.train()
refused("no-token")
refused("")
refused("not/a/name", token="hf_test")
refused("forbidden/model", token="hf_test")
refused("me/model", token="")
refused("unknown/model", token="hf_test")
refused("cut/model", token="hf_test")
print(trainer.push_to_hub("counting", private=True, token="hf_test"))
trainer.close()
"""


REFUSED = {"forbidden": 403, "unknown": 401}
"""Owner -> the status with which the hub refuses a repository of it."""


OLD_WEIGHTS = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"]


class Hub(BaseHTTPRequestHandler):
    """The requests that an upload makes (huggingface_hub 2.4, hf_api.py, _commit_api.py and lfs.py)."""

    requests: list
    files: dict
    stored: dict

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.path, self.headers.get("Authorization")))
        address = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization")
            if owner == "cut":  # the connection ends without an answer
                return
            if owner in REFUSED:
                self.answer({"error": "no"}, REFUSED[owner])
                return
            self.requests.append(asked)
            self.answer({"url": f"{address}/me/{asked['name']}", "name": f"me/{asked['name']}"})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self.answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{**one, "actions": {"upload": {"href": f"{address}/store/{one['oid']}"}}} for one in objects]
            self.answer({"transfer": "basic", "objects": uploads})
        elif self.path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.files[entry["value"]["path"]] = self.stored[entry["value"]["oid"]]
                elif entry["key"] == "deletedFile":
                    del self.files[entry["value"]["path"]]
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{address}/me/counting/commit/0"})
        else:
            self.answer({"error": f"unknown: {self.path}"}, 404)

    def do_PUT(self):
        self.stored[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def do_GET(self):
        if self.path.startswith("/api/models/me/counting/tree/"):
            files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.files]
            self.answer(files)
        else:
            self.answer({"error": f"unknown: {self.path}"}, 404)

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def hub():
    handler = type("RunningHub", (Hub,), {"requests": [], "files": {}, "stored": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.gate
@pytest.mark.timeout(1000)  # of a busy machine
def test_a_model_goes_to_the_hub_with_a_card_of_its_run(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(task_rows()))
    tree = overlaid(TREE, {"run": {"dir": str(tmp_path / "runs"), "steps": 3}, "evaluation": {"every": 2}})
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "train.py").write_text(SCRIPT)
    with hub() as (requests, address):
        # Of a model that was pushed before: in shards, with an adapter beside it.
        requests.files |= dict.fromkeys([*OLD_WEIGHTS, "notes.md", "logs/model.safetensors"], b"old")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
    early, no_token, no_name, bad_name, forbidden, empty_token, unknown, cut, url = done.stdout.splitlines()
    assert early.startswith("ConfigError: push_to_hub:") and "call train() or save() first" in early
    assert no_token.startswith(
        "ConfigError: push_to_hub: there is no token of the hub: run `hf auth login`, set HF_TOKEN"
    )
    assert no_name == ('ConfigError: push_to_hub: give the name of the repository, such as push_to_hub("owner/name")')
    assert bad_name.startswith("ConfigError: push_to_hub: 'not/a/name' is no name of a repository")
    assert forbidden.startswith("TrainingError: push_to_hub: forbidden/model could not be uploaded: ")
    assert "The token has no right to write there" in forbidden
    assert empty_token.startswith("ConfigError: push_to_hub: `token` is empty")
    assert unknown.startswith("TrainingError:") and "The hub does not know the token: give one that is valid" in unknown
    assert cut.startswith("TrainingError: push_to_hub: cut/model could not be uploaded: ")
    assert url == f"{address}/me/counting"
    # Nothing was asked of the hub before a refusal: the first requests are those for the forbidden, the unknown, the
    # cut and the good one.
    assert [request[0] for request in requests.requests[:4]] == ["/api/repos/create"] * 4
    assert requests.requests[4]["visibility"] == "private"
    assert all(token == "Bearer hf_test" for _, token in requests.requests[5:])
    model = tmp_path / "runs" / "run" / "checkpoints" / "step-3" / "model"
    uploaded = dict(requests.files)
    assert uploaded.pop("notes.md") == uploaded.pop("logs/model.safetensors") == b"old"
    card = uploaded.pop("README.md").decode()
    picture = uploaded.pop("training_curve.svg").decode()
    assert uploaded == {path.name: path.read_bytes() for path in model.iterdir()}
    assert picture.startswith("<svg") and picture.count(",") >= 3
    _, metadata, text = card.split("---\n", 2)
    assert yaml.safe_load(metadata)["library_name"] == "transformers"
    assert yaml.safe_load(metadata)["tags"] == ["rlvr", "grpo", "reinforcement-learning"]
    assert 'from_pretrained("me/counting")' in text
    assert "trained for 3 steps (grpo, preset `grpo`)" in text
    assert "| held-out tasks | step 0 | step 3 | change (95 %) |" in text
    row = next(line for line in text.splitlines() if line.startswith("| greedy |"))
    assert row.count(" %") == 2 and " to " in row
    assert "![reward by step](training_curve.svg)" in text
    written = text.split("```yaml\n")[1].split("\n```")[0]
    assert yaml.safe_load(written) == yaml.safe_load((tmp_path / "runs" / "run" / "config.yaml").read_text())


def test_secrets_of_the_configuration_are_not_published():
    tree = {"verifier": {"name": "judge", "api_key": "sk-1", "max_new_tokens": 3}, "stages": [{"x": {"password": "p"}}]}
    assert redacted(tree) == {
        "verifier": {"name": "judge", "api_key": "<redacted>", "max_new_tokens": 3},
        "stages": [{"x": {"password": "<redacted>"}}],
    }
