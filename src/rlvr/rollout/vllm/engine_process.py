"""A process that serves one vLLM engine over a private pipe: `python -m rlvr.rollout.vllm.engine_process FD`.

In: ("start", id, engine arguments) first, then ("generate", id, token ids, sampling parameters, adapter), ("abort",
[ids]) and ("call", id, method, arguments). Out: ("done", [(id, Answer or RemoteFailure)]), ("result", id, value), of a
start the facts, ("error", id, RemoteFailure), and ("failed", id, RemoteFailure) of a start. Between two steps all that
has arrived is taken, so requests made together are scheduled together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from rlvr.core.process import parent_death
from rlvr.core.process.tracing import RemoteFailure
from rlvr.rollout.vllm.requests import Answer

WEIGHTS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "rlvr_weights",
)
"""Methods of vLLM's workers; the others below are the engine's."""


def main() -> None:
    """Serve until the pipe closes."""
    # Ctrl-C goes to the whole foreground group; the trainer decides when the engine ends (`parent_death`, closing the
    # pipe).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The number of an inherited file descriptor, one end of a socket pair.
    pipe = Connection(int(sys.argv[1]))
    _, start, arguments = pipe.recv()
    try:
        server = EngineServer(arguments, pipe)
    # BaseException: vLLM may call sys.exit while it starts, and the trainer would wait for facts until its deadline.
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", start, RemoteFailure.of(error)))
        sys.stdout.flush()
        os._exit(1)
    # ConnectionError: the trainer closed the pipe with something unread, or while this process wrote.
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send(("result", start, server.facts))
        server.serve()
    sys.stdout.flush()
    # A trainer that closes the engine kills this process next. One that is ending is not yet gone when its files are
    # closed: the thread of `die_with_parent` sees its end and removes the scratch folder.
    time.sleep(parent_death.GRACE)
    parent_death.exit_now()  # vLLM's own ending waits for threads and warns; there is nothing left to save


class EngineServer:
    """The engine and its pipe."""

    def __init__(self, arguments: dict[str, Any], pipe: Connection) -> None:
        # Imported here and not at the top: importing vLLM takes seconds, and a test of this file's protocol needs none
        # of it.
        import torch
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        self.pipe = pipe
        # vLLM's attention for CPUs takes AMX instructions in bfloat16 where the processor has them, and its `LLMEngine`
        # does not ask Linux for them (arch_prctl, ARCH_REQ_XCOMP_PERM): the first one would end the process. False, and
        # nothing, on other processors.
        torch.cpu._init_amx()
        # vLLM sizes batches by what it is used as, and an engine without a context gets 2048 tokens on any device.
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments), UsageContext.OPENAI_API_SERVER)
        client: Any = self.engine.engine_core
        self._core = client.engine_core  # in this process, since it has no process of its own
        self._constrained = StructuredOutputsParams
        self._sampling = SamplingParams
        self._final = RequestOutputKind.FINAL_ONLY
        self._done: list[tuple[int, Any]] = []
        self._updating = False
        """Between the start of an update of the weights, or the pause before it, and its commit."""
        self._pauses = 0
        """Updates of the weights after which requests under way kept their keys and values."""
        self._warm_up()
        self.facts = {"max_model_len": self.engine.model_config.max_model_len}

    def _warm_up(self) -> None:
        """Sample two tokens: what the first use compiles is done then, and a model that cannot be computed is
        refused."""
        sampling = self._sampling(max_tokens=2, seed=0, logprobs=0, output_kind=self._final, detokenize=False)
        self.engine.add_request("warm up", {"prompt_token_ids": [0]}, sampling)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def serve(self) -> None:
        """Take messages and step while there are requests."""
        while True:
            # Blocks (None) only when there is nothing to compute or to send; else takes what has arrived and steps.
            while self.pipe.poll(0 if self._may_step() or self._done else None):
                self._take(*self.pipe.recv())
            if self._may_step():
                self._step()
            if self._done:
                self.pipe.send(("done", self._done))
                self._done = []

    def _may_step(self) -> bool:
        """Return True if there is something to compute, and no weight update is half done."""
        return not self._updating and self.engine.has_unfinished_requests()

    def _step(self) -> None:
        # FINAL_ONLY: outputs come once, when a request has ended.
        self._done += [(int(output.request_id), _answer(output)) for output in self.engine.step() if output.finished]

    def _take(self, kind: str, *content: Any) -> None:
        if kind == "generate":
            self._generate(*content)
        elif kind == "abort":
            self.engine.abort_request([str(number) for number in content[0]])
        else:
            number, method, arguments = content
            try:
                self.pipe.send(("result", number, self._call(method, arguments)))
            except Exception as error:
                traceback.print_exc()
                self.pipe.send(("error", number, RemoteFailure.of(error)))

    def _generate(
        self, number: int, token_ids: tuple[int, ...], fields: dict[str, Any], adapter: dict[str, Any] | None
    ) -> None:
        from vllm.lora.request import LoRARequest

        try:
            if "structured_outputs" in fields:
                fields["structured_outputs"] = self._constrained(**fields["structured_outputs"])
            # flat_logprobs: arrays in place of one dictionary per token (FlatLogprobs in vllm/logprobs.py).
            sampling = self._sampling(**fields, flat_logprobs=True, output_kind=self._final)
            prompt: Any = {"prompt_token_ids": list(token_ids)}
            if self._pauses:
                # What the weights before a pause computed is still in the cache, and is not for requests that begin
                # after it.
                prompt["cache_salt"] = str(self._pauses)
            self.engine.add_request(
                str(number), prompt, sampling, lora_request=LoRARequest(**adapter) if adapter else None
            )
        except Exception as error:  # what vLLM refuses concerns this request alone
            self._done.append((number, RemoteFailure.of(error)))

    def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        if method in WEIGHTS:
            # From here to `commit` the main loop takes messages only.
            self._updating |= method == "start_weight_update"
            return self.engine.collective_rpc(method, kwargs=arguments)
        if method == "pause":
            return self._pause()
        if method == "resume":
            return self._core.resume_scheduler()
        if method == "commit":
            self._updating = False
            if arguments["clear_cache"]:  # what the old weights computed goes, requests under way are computed anew
                self.engine.reset_prefix_cache(reset_running_requests=True)
            return self.engine.set_weight_version(arguments["version"])
        # Names checked above, so that no other attribute of the engine can be called over the pipe.
        if method in ("sleep", "wake_up"):
            return getattr(self.engine, method)(**arguments)
        raise ValueError(f"no method {method!r}")

    def _pause(self) -> None:
        """Schedule nothing until `resume`, and finish the steps that are scheduled.

        With asynchronous scheduling one step is computed while the tokens of the one before it are handed out. Tokens
        are labelled when they are handed out, so that those of a step under way would be labelled with the version to
        come.
        """
        self._updating = True
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        # vllm/v1/engine/core.py: `batch_queue` holds batches that are scheduled and not yet read, and is None without
        # asynchronous scheduling.
        while self._core.batch_queue:
            self._step()
        self._pauses += 1


def _answer(output: Any) -> Answer:
    """Return the answer of a finished request."""
    sampled = output.outputs[0]
    first = slice(*(sampled.logprobs.start_indices[:1] + sampled.logprobs.end_indices[:1]))
    alternatives = zip(sampled.logprobs.token_ids[first], sampled.logprobs.logprobs[first], strict=True)
    return Answer(
        token_ids=list(sampled.token_ids),
        logprobs=[
            sampled.logprobs.logprobs[i] for i in sampled.logprobs.start_indices
        ],  # the sampled token comes first
        finish_reason=str(sampled.finish_reason),
        stop_reason=sampled.stop_reason,
        versions=[(span.version, span.start, span.end) for span in sampled.weight_versions or ()],
        first_tokens=dict(alternatives),
    )


if __name__ == "__main__":
    main()
