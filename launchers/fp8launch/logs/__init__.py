"""Megatron logs: bytes to iterations, events, processes and failures."""

from fp8launch.injob.supervisor.failures import Ending, Failure
from fp8launch.logs.evidence import Evidence
from fp8launch.logs.lines import Iteration, Validation
from fp8launch.logs.processes import Head, LoggedProcesses, ParsedLog, Process, attempts_of, read_log
from fp8launch.logs.reader import LogTail, Scan, Scanner, scan_file
from fp8launch.logs.table import IterationTable

__all__ = [
    "Ending",
    "Evidence",
    "Failure",
    "Head",
    "Iteration",
    "IterationTable",
    "LogTail",
    "LoggedProcesses",
    "ParsedLog",
    "Process",
    "Scan",
    "Scanner",
    "Validation",
    "attempts_of",
    "read_log",
    "scan_file",
]
