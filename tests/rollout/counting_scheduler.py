"""vLLM's own scheduler, which says in the engine's log when it takes a request's memory away."""

from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    def _preempt_request(self, *given, **options):
        print("PREEMPTED", flush=True)
        return super()._preempt_request(*given, **options)
