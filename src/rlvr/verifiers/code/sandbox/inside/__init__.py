"""Code that runs inside of the sandbox: standard library only, since no other package is there.

`zygote` forks for each job a `supervisor`, which makes the namespaces and watches; it forks the `program`, which locks
itself down (`kernel`, `landlock`, `seccomp`) and runs what the model wrote. A zygote never holds anything of a job: its
next forks would inherit it.
"""
