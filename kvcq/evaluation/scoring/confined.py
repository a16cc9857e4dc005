"""Runs one program under limits: the child process of `kvcq.evaluation.scoring.sandbox`. Never imported by kvcq.

The limits guard against accidents of generated code (endless loops, memory, stray files and processes). They are no
defence against code that is written to break out.

Usage: ``python -I confined.py FOLDER SECONDS BYTES FILE_BYTES NAME PROOF``; the program is ``FOLDER/program.py``, run
as module NAME. PROOF is written to ``FOLDER/proof`` when the program came to its end.
"""

import os
import resource
import runpy
import sys
from pathlib import Path

# What would leave the folder, reach other processes or the network: denied by name. Hooks cannot be removed again.
DENIED = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
    "signal.pthread_kill",
    "socket.bind",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostby",
    "socket.sendto",
    "subprocess.Popen",
)
PATHS = (
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "shutil.rmtree",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(seconds: int, memory: int, file_size: int) -> None:
    """Set limits that cannot be raised again: CPU seconds, bytes of memory and of a file.

    There is no limit of processes: it counts threads too, with which solutions get themselves a deep stack.
    """
    limits = (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_CORE, 0),
    )
    for which, value in limits:
        try:
            resource.setrlimit(which, (value, value))
        except (ValueError, OSError):
            # Some systems know no limit of memory, and nobody may raise a lower one that is already there.
            continue


def guard(folder: str) -> None:
    """Deny processes, signals, the network, and changes outside `folder`."""
    root = Path(folder).resolve()

    def inside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # a descriptor that is open already
        place = Path(os.path.realpath(os.fsdecode(path)))
        return place == root or root in place.parents or place == Path(os.devnull)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & WRITING)
            if writes and not inside(path):
                raise PermissionError("writing outside the working folder is denied")
        elif event.startswith(DENIED):
            raise PermissionError(f"{event} is denied")
        elif event in PATHS and not all(inside(argument) for argument in arguments):
            raise PermissionError(f"{event} outside the working folder is denied")

    sys.addaudithook(hook)
    # The one way to a new process that tells no hook.
    import _posixsubprocess

    _posixsubprocess.fork_exec = no_process  # type: ignore[assignment]


def no_process(*_: object) -> None:
    """Stand in for what would start a process."""
    raise PermissionError("a new process is denied")


def main() -> None:
    """Run the program; an exception of it ends this process with exit code 1."""
    folder, seconds, memory, file_size, name, proof = sys.argv[1:]
    os.chdir(folder)
    sys.argv[1:] = []
    limit(int(seconds), int(memory), int(file_size))
    guard(folder)
    runpy.run_path("program.py", run_name=name)
    sys.stdout.flush()
    Path("proof").write_text(proof)


if __name__ == "__main__":
    main()
