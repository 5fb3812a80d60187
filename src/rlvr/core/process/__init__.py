"""Tools for other processes: start and end, frames, replies, deadlines, tracing, and the end with the parent.

Only the standard library.

There are two ways to send messages. `framing` is for ends that run code of the user's or of the model's: it limits a
length before it reads, and unpickles nothing. Between two processes of the library it is Connection of multiprocessing,
which unpickles what it receives and, on a port, lets in only who has the key: authentication is not written anew for
our frames, and a Connection is not given to an end that is not trusted.

There are two kinds of deadlines. `deadline` is for event loops, and does not count time in which the loop stood still.
A thread that waits does so by `rlvr.core.waits`, which also ends its wait when a rank is lost.
"""
