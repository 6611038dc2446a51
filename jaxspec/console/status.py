"""Exit statuses: 0 is success; those of signals are 128 and the signal's number, as shells have it."""

from __future__ import annotations

FAILED = 1
WRONG = 2
INTERRUPTED = 130
UNREAD = 141
