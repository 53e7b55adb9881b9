"""The start of the command `fp8launch` and of `python -m fp8launch`: Ctrl-C ends both with one line, at any time."""

import sys


def main() -> None:
    """Run the command line. Every end is an exit code and a message, never a traceback."""
    try:
        import signal

        from fp8launch.cli import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = _interrupted(sys.argv[1:])
    # The command is over: while Python shuts down, Ctrl-C could only add a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If Ctrl-C ended code that a library runs with exec(), such as a dataclass, Python remembers that and replaces the
    # exit code. The next exec() makes it forget.
    exec("")
    sys.exit(status)


def _interrupted(arguments: list[str]) -> int:
    """Report Ctrl-C during the first imports, as `cli.run` does later."""
    import os

    newline = "\n" if sys.stderr.isatty() else ""
    os.write(2, f"{newline}interrupted\n".encode())
    if "--json" in arguments:
        import json

        problem = {"severity": "error", "code": "interrupted", "message": "interrupted", "where": None, "fix": None}
        sys.stdout.write(json.dumps({"ok": False, "problems": [problem]}, indent=2) + "\n")
    return 130


# Processes that Python's multiprocessing starts import this file again.
if __name__ == "__main__":
    main()
