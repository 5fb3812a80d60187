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
# Arbitrary, above what contest programs and multiprocessing need. It also bounds pipes and sockets, whose buffers no
# memory limit counts.
_OPEN_FILES = 64
# More descriptors than a zygote ever opens; `pass_fds` hands it two, beside its standard streams.
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
    # Node ends at its start with "OpenSSL configuration error" where /etc/ssl/openssl.cnf exists and cannot be read, as
    # under Landlock.
    "OPENSSL_CONF": "/dev/null",
}


def run_program(channel: int, standard: Sequence[int], proc: int, setting: Setting, order: Order) -> NoReturn:
    """Never returns: the process ends as the program does."""
    code = 1
    try:
        # A session and process group of its own: no signal to the zygote's group reaches the program, and the
        # scheduler's autogroup counts all of its processes as one.
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
    # First, since it needs `proc`, a descriptor of the real /proc, which `closerange` below closes.
    _make_killable(proc)
    mapped = 0 if native else kernel.mapped(proc)
    for target, fd in enumerate((*standard, channel)):  # none of them is below 3, so that none is overwritten
        os.dup2(fd, target)
    # What stays open would be the program's, such as the descriptor of the real /proc, through which it would see
    # processes of other runs.
    os.closerange(_CHANNEL + 1, _CLOSED_UP_TO)
    # A process that the program executes must not get the channel; forks of Python itself keep it.
    os.set_inheritable(_CHANNEL, False)
    os.chdir(setting.tmp)
    os.umask(0o077)
    if native:
        # A signal that is ignored stays ignored across execve: `yes | head` would never end, and a C program past its
        # file size would go on with an error instead of being killed.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
    _limit(order, setting, mapped, native)
    # The order of the rest: rights are given up before no_new_privs, which Landlock and seccomp need; Landlock's system
    # calls (444 to 446) are refused by the filter, so the filter comes last.
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
        # Per process, in whole seconds. Soft and hard limits are equal, so the kernel sends SIGKILL without a SIGXCPU
        # before; the supervisor reads from the processor time that it was this limit.
        resource.RLIMIT_CPU: order.cpu_limit,
        # The largest single file. All files together are bounded by the size of the tmpfs, which the tiers landlock and
        # none lack.
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        # A core dump would be written to the program's folder, or piped to a program of the host (core_pattern).
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: _STACK,
        # Locked memory cannot be paged out, so it would press on the rest of the host.
        resource.RLIMIT_MEMLOCK: 0,
    }
    # RLIMIT_NPROC counts all processes of a user (since Linux 5.14: of a user in its user namespace). In the tiers
    # landlock and none these are all of the trainer's user, so no number would be right.
    if setting.processes_beside is not None:
        limits[resource.RLIMIT_NPROC] = order.processes + setting.processes_beside
    # Beyond what is mapped already: a zygote with numpy maps hundreds of megabytes that the program did not ask for.
    if order.address_space:
        limits[resource.RLIMIT_AS] = mapped + order.memory_mb * 2**20
    else:
        limits[resource.RLIMIT_AS] = _RESERVED
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        # A hard limit of the host that is lower already cannot be raised without CAP_SYS_RESOURCE.
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        # A stack takes memory only as it grows, which has its own limit: a program may ask for more, as contest
        # programs do.
        resource.setrlimit(limit, (value, hard if limit == resource.RLIMIT_STACK else value))


def _make_killable(proc: int) -> None:
    """Let it be this process that ends where the host runs out of memory."""
    try:
        # 1000 is the maximum: the kernel's out-of-memory killer takes this process before any other. Without it the
        # trainer is likely to be killed, as the largest process.
        fd = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc)
    except OSError:
        return
    os.write(fd, b"1000")
    os.close(fd)


def _execute(what: dict[str, Any], source: bytes) -> NoReturn:
    """Write the source, or the compiled program that it packs, and become the command."""
    unpack = zlib.decompressobj()
    # O_EXCL: the folder is fresh, so a file of that name means that the sandbox is not what it should be.
    fd = os.open(what["file"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
    while source:
        unwritten = memoryview(unpack.decompress(source, _PART) if what.get("packed") else source)
        source = unpack.unconsumed_tail
        while unwritten:
            unwritten = unwritten[os.write(fd, unwritten) :]
    os.close(fd)
    folder = os.getcwd()
    # The environment is a new one: the trainer's may hold keys of services.
    os.execve(what["argv"][0], what["argv"], {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder})


def _compile(what: dict[str, Any], source: bytes) -> int:
    """Run a compiler and report the file that it made; its exit code."""
    # The compiler runs in a child, since something has to pack the file that it made and report it.
    pid = os.fork()
    if pid == 0:
        try:
            _execute(what, source)
        finally:
            # 127 is what a shell says of a command that cannot be run; without `_exit` the child would go on as a
            # second parent.
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
    # Level 1: zeros pack to nearly nothing at any level, and packing counts against the compiler's time.
    pack = zlib.compressobj(1)
    with open(path, "rb") as file:
        parts = [pack.compress(part) for part in iter(lambda: file.read(_PART), b"")]
    return b"".join([*parts, pack.flush()])


def _python(what: dict[str, Any], source: bytes) -> int:
    """Run a Python program; the exit code."""
    kernel.handle(signal.SIGINT, signal.default_int_handler)  # the zygote gave it up
    sys.argv = [_FILE]
    # Given back on a MemoryError, so that describing the error does not fail for want of memory, too.
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
    # The order of Py_FinalizeEx (Python/pylifecycle.c): non-daemon threads are joined, `atexit` runs, files are
    # flushed. `os._exit` follows in the caller, without the zygote's own finalizers.
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


def _load(source: str, name: str, sealed: bool = False, extra_names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a program defines; `sealed`: it runs nothing but itself."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=f"{os.getcwd()}/{_FILE}", **(extra_names or {}))
    # The source is in no file: tracebacks and `inspect.getsource` find its lines here.
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    code = compile(source, _FILE, "exec", dont_inherit=True)
    # As late as possible, since the frames are counted from here: `exec` is called in this frame.
    interpreter.hide_own_frames()
    if sealed:
        # After `compile`, before `exec`: the source's own code objects are trusted by their file name, and nothing that
        # arrives on standard input is.
        sealing.seal(_FILE)
    # Frozen objects are in no generation, so no collection writes to their pages, which the program shares with its
    # zygote until then.
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
    # Before LOADED: a missing function is reported as the failure of the load, not of a call.
    _find(names, what["name"].partition(".")[0])
    frames.send(_CHANNEL, LOADED)
    # `once` is a case with one call, whose result is sent by value. A test makes many calls, and may hold objects
    # between them.
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
            # With one call the exception ends the process as it would end a script; with several, a test may expect it
            # (`pytest.raises`).
            if what["once"]:
                raise
            _report(error)
        if what["once"]:
            return


def _answer(kept: objects.Kept, names: dict[str, Any], call: bytes, path: str, args: Any, kwargs: Any) -> bytes:
    """The report of a call that a test asked for."""
    # A search in the bytes: calls without functions or objects, which are nearly all, skip the walk through the
    # arguments.
    sources = b'{"source"' in call
    if sources:
        args, kwargs = (kept.resolved(argument, lambda text: eval(text, names)) for argument in (args, kwargs))
    if path == "@plain":
        return VALUE + values.encode(args[0])
    # `#3.push` is a method of object 3, `@len` an operation, `#3?x` a field: see `objects.Kept.find`.
    if path[0] in "#@" or "?" in path:
        function = kept.find(path)
    else:
        function = nodes.with_nodes(_find(names, path), names)
    value = function(*args, **kwargs)
    report = VALUE
    if type(value) is CoroutineType:
        # Imported here and not in the zygote: hardly any program needs it, and each module that is loaded makes every
        # fork larger.
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
    # The call is `[name,args,kwargs]` as typed JSON, and the same values are written as the same bytes, so unchanged
    # arguments are found without decoding.
    if call.endswith(b"," + after + b"]"):
        return report
    return CHANGED + b"[" + report[1:] + b"," + after + b"]"


def _find(names: dict[str, Any], path: str) -> Callable[..., Any]:
    """`f`, or `Solution.f`: the method of a fresh object; of an expression such as `f(3)(4)` a function that computes
    it."""
    # An expression of the test's author, such as `f(3)(4)`, which `asserts` has parsed and written again; it holds
    # literals only.
    if "(" in path:
        return functools.partial(eval, path, names)
    first, *rest = path.split(".")
    if first not in names:
        raise NameError(f"name {first!r} is not defined")
    target = names[first]
    for name in rest:
        target = getattr(target(), name)
    return target


def _test(what: dict[str, Any], source: str) -> None:
    """Run a test, in which the candidate's name stands for a way to ask the trainer."""
    # With the first answer, the candidate's values are here.
    sealed = functools.cache(functools.partial(sealing.seal, _FILE))

    def ask(path: str, args: Any, kwargs: Any, in_place: bool) -> Any:
        if ended:
            raise RuntimeError("the test has ended, and nobody answers any more")
        sealed()
        try:
            frames.send(_CHANNEL, CALL + values.encode([path, *proxies.referenced([args, kwargs])]))
            answer = frames.receive(_CHANNEL)
            # The trainer closed the channel: the candidate has ended, and its outcome is what counts.
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
        # Raised outside of the `try` above, which would take the candidate's exception for a failure of this process.
        if error is not None:
            raise crossing.in_method(error, sys._getframe(), _FILE)
        if report == objects.AWAITED:
            return _awaited(body)
        return body

    ended: list[bool] = []
    proxies = objects.Proxies(ask)
    token = what["token"]
    # `__in_place__` and `__of_program__`: the names that `apart` writes into a test's source.
    helpers = {what["in_place"]: proxies.changing, what["of_program"]: proxies.named}
    try:
        _load(source, "__main__", extra_names={what["name"]: proxies.function(what["name"], what["called"]), **helpers})
    finally:
        ended.append(True)  # a failure's message may hold an object, whose text nobody can be asked for
    frames.send(_CHANNEL, VALUE + values.encode(token))


async def _awaited(value: Any) -> Any:
    return value


def _change(args: Any, kwargs: Any, args_after: list[Any], kwargs_after: dict[str, Any]) -> None:
    """Have a call's arguments, at every depth where they keep their types, hold what they hold after it."""
    for one, after in zip([*args, *kwargs.values()], [*args_after, *kwargs_after.values()], strict=True):
        # An argument that was an iterator or an object of the test's own arrives as another type; nothing sensible can
        # be changed in it.
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
    # Frames of this module come first in the traceback; the program's own interpreter would not have them.
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _report(error: BaseException) -> None:
    try:
        frames.send(_CHANNEL, RAISED + values.encode(crossing.described(error)))
    except BaseException:  # the program closed the channel, or patched what is used here
        return


_KINDS: dict[str, Callable[[dict[str, Any], str], None]] = {"script": _script, "serve": _serve, "test": _test}
