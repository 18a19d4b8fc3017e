"""What the exit codes of the command mean."""

from __future__ import annotations

OK = 0
#: A fault of the program.
FAULT = 1
#: Something that a user can put right.
BAD_INPUT = 2
#: `drsa doctor` finds that LRP is not valid.
NOT_VALID = 3
INTERRUPTED = 130
