"""Stopping on Ctrl-C (SIGINT) and SIGTERM between two steps."""

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Inside the `with` block the first signal is noted; a second one ends the process at once.

    `status` is then the exit status that a shell expects, 128 + signal: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self):
        self.status = 0

    def __enter__(self) -> "Stop":
        self.before = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number: int, _: FrameType | None) -> None:
        self.status = 128 + number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
