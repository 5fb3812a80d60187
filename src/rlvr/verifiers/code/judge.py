"""Judging what is too large for the trainer's process: by the same code, in a sandbox apart from the program.

The trainer's event loop stands still while it decodes, compares or computes, so it does so only up to DECODED_SIZE. For
more, the claim and what is expected go to a process of their own, which has limits and never runs anything of the
program: it decodes typed JSON, splits text, and evaluates a test that `asserts` rewrote. Here, claims are only passed
on.

Invariant: a judge that fails (out of time or memory) fails the case; only a sandbox that broke leaves it undecided.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvr.verifiers.code import values
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.runner import Ended, Job, Limits, Outcome

# Decoding and comparing two values of 2.7 MB took 2.1 s of processor time; the rest is for a busy machine. The output
# may be a call whose arguments are as large as a value.
JUDGE_LIMITS = Limits(seconds=20.0, memory_mb=1024, output_bytes=values.MAX_SIZE + 2**16)
"""Limits of the judging of one claim."""

_MODULES = ("values", "compare", "asserts")
_PACKAGE = "rlvr.verifiers.code"
_HOLDS = "holds"
_CALL = "call "
"""The first words of an answer: the case passes; a call of the program is needed first. Any other answer says why it
fails."""

# The modules are compiled from their texts, since a sandbox (or a service) has no rlvr. `NeedsCall` is no Exception, so
# that a test's own handling cannot swallow it.
_PROGRAM = """
import json, sys, types
for place, text in json.loads({modules!r}):
    module = sys.modules[place] = types.ModuleType(place)
    module.__path__ = []
    exec(compile(text, place, "exec"), module.__dict__)
from rlvr.verifiers.code import asserts, compare, values

head = json.loads(sys.stdin.buffer.readline())
parts = [sys.stdin.buffer.read(size) for size in head["sizes"]]
parts[-1] += sys.stdin.buffer.read()  # on its way to a service, what is no text may have become longer

class NeedsCall(BaseException):
    pass

def judged():
    if head["kind"] == "holds":
        return asserts.held_by(asserts.rewritten(head["test"], head["functions"]), program)
    how = compare.Comparison(**head["how"])
    if head["kind"] == "text":
        expected, found = (part.decode(errors="replace") for part in parts)
        return compare.same_text(found, expected, how)
    return compare.difference(*(values.decode(part, len(part)) for part in parts), how)

claims = iter(parts)

async def program(name, args, kwargs):
    claim = next(claims, None)
    if claim is None:
        raise NeedsCall(name, values.encode([args, kwargs]).decode("utf-8", "surrogatepass"))
    return values.decode(claim)

sys.stdout.reconfigure(encoding="utf-8", errors="surrogatepass")
try:
    print(judged() or {holds!r})
except NeedsCall as needed:
    print({call!r} + " ".join(needed.args))
except ValueError as error:
    print("it reported nonsense:", error)
"""


@dataclass(frozen=True)
class NeededCall:
    """A call of the program without which a test cannot be evaluated."""

    name: str
    encoded: bytes
    """`[args, kwargs]` as typed JSON."""


def text_job(found: bytes, expected: bytes, how: Comparison) -> Job:
    """The comparison of a printed text, as the bytes that were printed."""
    return _job({"kind": "text", "how": asdict(how)}, [expected, found])


def value_job(claim: bytes, expected: bytes, how: Comparison) -> Job:
    """The comparison of a value, both as typed JSON."""
    return _job({"kind": "value", "how": asdict(how)}, [claim, expected])


def test_job(test: str, functions: Collection[str], claims: Sequence[bytes]) -> Job:
    """The evaluation of a rewritten test on what its first calls returned, as typed JSON and in their order."""
    return _job({"kind": "holds", "test": test, "functions": sorted(functions)}, claims)


def answer(outcome: Outcome) -> str | NeededCall | None:
    """Return the answer of a judge: None if the case passes, the reason why it fails, or the call that the judge
    needs."""
    # A judge that ran out of time or memory did so on the program's claim, so the case fails.
    if outcome.ended is not Ended.DONE:
        return f"it cannot be judged: {outcome.reason or outcome.ended.value}"
    # Values may hold lone surrogates, which `values` writes with surrogatepass, too.
    text = outcome.stdout.decode("utf-8", "surrogatepass").rstrip("\n")
    if text == _HOLDS:
        return None
    if text.startswith(_CALL):
        name, _, encoded = text.removeprefix(_CALL).partition(" ")
        return NeededCall(name, encoded.encode("utf-8", "surrogatepass"))
    return text


def _job(head: dict[str, object], parts: Sequence[bytes]) -> Job:
    # A line of JSON with the sizes, then the raw parts: claims are not copied into another encoding.
    first = json.dumps({**head, "sizes": [len(part) for part in parts]}).encode()
    return Job(_program(), stdin=b"\n".join([first, b"".join(parts)]), limits=JUDGE_LIMITS)


@functools.cache
def _program() -> str:
    """The source of a judge: the modules that it shares with this process, as texts, and what it does with them."""
    packages = [(".".join(_PACKAGE.split(".")[:count]), "") for count in (1, 2, 3)]
    folder = Path(values.__file__).parent
    modules = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]
    return _PROGRAM.format(modules=json.dumps([*packages, *modules]), holds=_HOLDS, call=_CALL)
