"""The process of the program: lock down, load what the model wrote, run it, and report on the private channel.

From the trainer come an order (JSON), the source, and for calls `[name, args, kwargs]` as typed JSON. Back go reports
of one letter and a body. Everything here shares its interpreter with the program, which may patch any of it: a report
is a claim.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import gc
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CoroutineType, ModuleType
from typing import Any, NoReturn

from rlvr.verifiers.code import values
from rlvr.verifiers.code.sandbox.inside import (
    crossing,
    frames,
    interpreter,
    kernel,
    landlock,
    nodes,
    objects,
    sealing,
    seccomp,
)
from rlvr.verifiers.code.sandbox.inside.job_limits import STREAMS, Order, Setting

VALUE = b"v"
RAISED = b"r"
CALL = b"c"
LOADED = b"l"
CHANGED = b"m"
"""Reports: a value; an exception as in `crossing`; a test's call of its candidate as `[args, kwargs]`; ready for calls;
a value and the arguments, which the call changed, as `[value, args, kwargs]`."""

_CHANNEL = 3
_FILE = "program.py"
SIZE_BYTES = 8
"""Bytes of a compiled program's own size, big-endian, before it."""
LARGEST_PROGRAM = values.MAX_SIZE - SIZE_BYTES
"""Bytes of a compiled program, packed."""
_PART = 2**20
"""Bytes of a compiled program that are packed or unpacked at a time."""
_OPEN_FILES = 64
_CLOSED_UP_TO = 1024
_STACK = 64 * 2**20
"""Bytes of stack of a first thread. Python's other threads map 8 MB each, which the C library took from the limit when
the zygote started."""
_RESERVED = 32 * 2**30
"""Bytes that V8, and what it starts, may map: it reserves 10 GB for one WebAssembly memory, and uses next to none of
them. The bound keeps the page tables of one process below 64 MB."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OPENSSL_CONF": "/dev/null",
}


def run_program(channel: int, standard: Sequence[int], proc: int, setting: Setting, order: Order) -> NoReturn:
    """Never returns: the process ends as the program does."""
    code = 1
    try:
        os.setsid()
        what = frames.decoded(frames.receive(channel) or b"{}")
        if what["kind"] != "test" and not what.get("sealed"):
            # A program may open /proc/self/fd, where /dev/stdin leads. Tests and checkers hold expected values: without
            # namespaces they stay as the zygote is, not dumpable.
            kernel.set_dumpable(True)
        source = frames.receive(channel) or b""
        native = what["kind"] in ("execute", "compile")
        _lock(channel, standard, proc, setting, order, native)
        if what["kind"] == "execute":
            _execute(what, source)
        if native:
            code = _compile(what, source)
        else:
            code = _python(what, source)
    finally:
        os._exit(code)


def _lock(channel: int, standard: Sequence[int], proc: int, setting: Setting, order: Order, native: bool) -> None:
    """Give up everything that the program does not need; the order matters."""
    _make_killable(proc)
    mapped = 0 if native else kernel.mapped(proc)
    for target, fd in enumerate((*standard, channel)):  # none of them is below 3, so that none is overwritten
        os.dup2(fd, target)
    os.closerange(_CHANNEL + 1, _CLOSED_UP_TO)
    os.set_inheritable(_CHANNEL, False)
    os.chdir(setting.tmp)
    os.umask(0o077)
    if native:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
    _limit(order, setting, mapped, native)
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    if setting.landlock:
        streams = [f"{STREAMS}/{number}" for number in (1, 2)]
        landlock.restrict(setting.readable, [setting.tmp, "/dev/null", *streams])
    if setting.seccomp:
        seccomp.install()


def _limit(order: Order, setting: Setting, mapped: int, native: bool) -> None:
    size = order.file_mb * 2**20
    limits = {
        resource.RLIMIT_CPU: order.cpu_limit,
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: _STACK,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if setting.processes_beside is not None:
        limits[resource.RLIMIT_NPROC] = order.processes + setting.processes_beside
    if order.address_space:
        limits[resource.RLIMIT_AS] = mapped + order.memory_mb * 2**20
    else:
        limits[resource.RLIMIT_AS] = _RESERVED
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # A stack takes memory only as it grows, which has its own limit: a program may ask for more, as contest
        # programs do.
        resource.setrlimit(limit, (value, hard if limit == resource.RLIMIT_STACK else value))


def _make_killable(proc: int) -> None:
    """Let it be this process that ends where the host runs out of memory."""
    try:
        fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
    except OSError:
        return
    os.write(fd, b"1000")
    os.close(fd)


def _execute(what: dict[str, Any], source: bytes) -> NoReturn:
    """Write the source, or the compiled program that it packs, and become the command."""
    unpack = zlib.decompressobj()
    fd = os.open(what["file"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    while source:
        left = memoryview(unpack.decompress(source, _PART) if what.get("packed") else source)
        source = unpack.unconsumed_tail
        while left:
            left = left[os.write(fd, left) :]
    os.close(fd)
    folder = os.getcwd()
    os.execve(what["argv"][0], what["argv"], {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder})


def _compile(what: dict[str, Any], source: bytes) -> int:
    """Run a compiler and report the file that it made; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            _execute(what, source)
        finally:
            os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        packed = _packed(what["made"])
        if len(packed) > LARGEST_PROGRAM:
            os.write(2, f"error: the program is too large ({len(packed)} bytes packed)\n".encode())
            return 1
        frames.send(_CHANNEL, VALUE + os.stat(what["made"]).st_size.to_bytes(SIZE_BYTES, "big") + packed)
    return abs(code)


def _packed(path: str) -> bytes:
    """A file, compressed: large arrays with initial values make programs of megabytes, nearly all of them zeros."""
    pack = zlib.compressobj(1)
    with open(path, "rb") as file:
        parts = [pack.compress(part) for part in iter(lambda: file.read(_PART), b"")]
    return b"".join([*parts, pack.flush()])


def _python(what: dict[str, Any], source: bytes) -> int:
    """Run a Python program; the exit code."""
    kernel.handle(signal.SIGINT, signal.default_int_handler)  # the zygote gave it up
    sys.argv = [_FILE]
    reserve = bytes(2**20)  # mapped and not touched, so that it costs no memory
    code = 0
    try:
        _KINDS[what["kind"]](what, source.decode("utf-8", "surrogatepass"))
    except SystemExit as error:
        code = _exit_code(error)
        if what["kind"] != "script":
            _report(error)
    except BaseException as error:
        del reserve
        if isinstance(error, MemoryError):
            error.__traceback__ = None  # it holds what filled the memory
        code = 1
        _report(error)
        _print(error)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    interpreter.flush_files()
    return code


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _load(source: str, name: str, sealed: bool = False, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a program defines; `sealed`: it runs nothing but itself."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=f"{os.getcwd()}/{_FILE}", **(given or {}))
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    code = compile(source, _FILE, "exec", dont_inherit=True)
    interpreter.hide_own_frames()
    if sealed:
        sealing.seal(_FILE)
    gc.freeze()  # what is here by now lives until the end
    gc.enable()
    exec(code, module.__dict__)
    return module.__dict__


def _script(what: dict[str, Any], source: str) -> None:
    _load(source, "__main__", what["sealed"])


def _serve(what: dict[str, Any], source: str) -> None:
    """Call the program's functions as asked, until nobody asks any more."""
    names = _load(source, "program")
    if what["sealed"]:
        sealing.seal(_FILE)
    _find(names, what["name"].partition(".")[0])
    frames.send(_CHANNEL, LOADED)
    kept = None if what["once"] else objects.Kept(names)
    while (body := frames.receive(_CHANNEL)) is not None:
        name, args, kwargs = values.decode(body)
        try:
            if kept is None:
                function = nodes.with_nodes(_find(names, name), names, what["argument"])
                args = _functions(args, names)
                kwargs = dict(zip(kwargs, _functions(kwargs.values(), names), strict=True))
                frames.send(_CHANNEL, VALUE + values.encode(function(*args, **kwargs)))
            else:
                frames.send(_CHANNEL, _answer(kept, names, body, name, args, kwargs))
        except Exception as error:
            if what["once"]:
                raise
            _report(error)
        if what["once"]:
            return


def _answer(kept: objects.Kept, names: dict[str, Any], call: bytes, path: str, args: Any, kwargs: Any) -> bytes:
    """The report of a call that a test asked for."""
    sources = b'{"source"' in call
    if sources:
        args, kwargs = (kept.resolved(given, lambda text: eval(text, names)) for given in (args, kwargs))
    if path == "@plain":
        return VALUE + values.encode(args[0])
    if path[0] in "#@" or "?" in path:
        found = kept.find(path)
    else:
        found = nodes.with_nodes(_find(names, path), names)
    value = found(*args, **kwargs)
    report = VALUE
    if type(value) is CoroutineType:
        import asyncio

        value = asyncio.run(value)
        report = objects.AWAITED
    held = kept.report(value)
    if held is not None:
        return held
    report += values.encode(value)
    if sources or report[:1] != VALUE:
        return report
    return _with_changes(report, call, tuple(args), kwargs)


def _functions(arguments: Iterable[Any], names: dict[str, Any]) -> list[Any]:
    """A call's arguments, with a function in place of the text of one."""
    return [eval(one.text, names) if type(one) is values.Source else one for one in arguments]


def _with_changes(report: bytes, call: bytes, args: Any, kwargs: Any) -> bytes:
    """The report of a call, with its arguments where it changed them: a test may look at the list that it had
    sorted."""
    try:
        after = values.encode([args, kwargs])[1:-1]
    except ValueError:  # what is in them now cannot be sent, and is not seen by the test
        return report
    if call.endswith(b"," + after + b"]"):
        return report
    return CHANGED + b"[" + report[1:] + b"," + after + b"]"


def _find(names: dict[str, Any], path: str) -> Callable[..., Any]:
    """`f`, or `Solution.f`: the method of a fresh object; of an expression such as `f(3)(4)` a function that computes
    it."""
    if "(" in path:
        return functools.partial(eval, path, names)
    first, *rest = path.split(".")
    if first not in names:
        raise NameError(f"name {first!r} is not defined")
    found = names[first]
    for name in rest:
        found = getattr(found(), name)
    return found


def _test(what: dict[str, Any], source: str) -> None:
    """Run a test, in which the candidate's name stands for a way to ask the trainer."""
    sealed = functools.cache(
        functools.partial(sealing.seal, _FILE)
    )  # with the first answer, the candidate's values are here

    def ask(path: str, args: Any, kwargs: Any, in_place: bool) -> Any:
        if ended:
            raise RuntimeError("the test has ended, and nobody answers any more")
        sealed()
        try:
            frames.send(_CHANNEL, CALL + values.encode([path, *proxies.referenced([args, kwargs])]))
            answer = frames.receive(_CHANNEL)
            if answer is None:
                os._exit(1)
            report = answer[:1]
            body = values.decode(answer[1:])
            if report == RAISED:
                error = crossing.raised_again(body, proxies.exceptions)
            else:
                error = None
            if report == CHANGED:
                body, *after = body
                if in_place:
                    _change(args, kwargs, *after)
            elif report == objects.HELD:
                number, name = body
                body = proxies.held(number, name)
        except Exception as trouble:
            # It is ours: the test must not take it for the candidate's.
            _report(trouble)
            os._exit(1)
        if error is not None:
            raise crossing.in_method(error, sys._getframe(), _FILE)
        if report == objects.AWAITED:
            return _awaited(body)
        return body

    ended: list[bool] = []
    proxies = objects.Proxies(ask)
    token = what["token"]
    given = {what["in_place"]: proxies.changing, what["of_program"]: proxies.named}
    try:
        _load(source, "__main__", given={what["name"]: proxies.function(what["name"], what["called"]), **given})
    finally:
        ended.append(True)  # a failure's message may hold an object, whose text nobody can be asked for
    frames.send(_CHANNEL, VALUE + values.encode(token))


async def _awaited(value: Any) -> Any:
    return value


def _change(args: Any, kwargs: Any, args_after: list[Any], kwargs_after: dict[str, Any]) -> None:
    """Have a call's arguments, at every depth where they keep their types, hold what they hold after it."""
    for one, after in zip([*args, *kwargs.values()], [*args_after, *kwargs_after.values()], strict=True):
        if type(one) is not type(after):
            continue
        if type(one) in (list, bytearray):
            one[:] = [*(_changed(*pair) for pair in zip(one, after, strict=False)), *after[len(one) :]]
        elif type(one) is dict:
            kept = {key: _changed(one[key], value) if key in one else value for key, value in after.items()}
            one.clear()
            one.update(kept)
        elif type(one) is set:
            one.clear()
            one.update(after)


def _changed(one: Any, after: Any) -> Any:
    """A member of an argument after the call: the same object with new members, or else the new one."""
    if type(one) is not type(after) or type(one) not in (list, dict, set, bytearray):
        return after
    _change([one], {}, [after], {})
    return one


def _print(error: BaseException) -> None:
    """The traceback as the program's own interpreter would print it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _report(error: BaseException) -> None:
    try:
        frames.send(_CHANNEL, RAISED + values.encode(crossing.described(error)))
    except BaseException:  # the program closed the channel, or patched what is used here
        return


_KINDS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "script": _script,
    "serve": _serve,
    "test": _test,
}
