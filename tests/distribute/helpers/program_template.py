"""The process that programs are forked from; `programs` starts it.

Importing TensorFlow and Keras takes 3 s of CPU, and is the same for every program.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys


def wait_for_request() -> dict[str, object]:
    """Forks for each request; returns in the forked process, with what it is to run.

    Messages are lines of JSON. In: {"arguments", "cwd", "env", "stdout", "stderr"}. Out: the
    process id, then its status, as `subprocess.Popen.returncode`.
    """
    import keras  # noqa: F401  TensorFlow, too

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import began threads, which a forked process would lack")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)


def run(arguments: list[str], cwd: str, env: dict[str, str], stdout: str, stderr: str) -> None:
    """As `python arguments...` would."""
    for descriptor, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, os.O_WRONLY if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    program = pathlib.Path(arguments[0])
    sys.path[:1] = [str(program.parent), str(pathlib.Path(__file__).parent)]
    # In the module that is called __main__, as Python does: other processes send objects of its
    # classes.
    code = compile(program.read_bytes(), program, "exec")
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __file__=str(program), __spec__=None)
    exec(code, namespace)


if __name__ == "__main__":
    run(**wait_for_request())
