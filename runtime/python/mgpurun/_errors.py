"""Exceptions. Each is an `Error`; its text says what happened to which rank."""

from __future__ import annotations

from typing import Optional


class Error(RuntimeError):
    """An error of the library. `rank` is the rank at fault, or None."""

    rank: Optional[int]

    def __init__(self, text: str, rank: Optional[int] = None) -> None:
        super().__init__(text)
        self.rank = rank


class ArgumentError(Error, ValueError):
    """An argument is invalid. Nothing was sent; the communicator can still be used."""


class EnvironmentVariableError(Error):
    """The environment variables do not describe a rank."""


class SystemRefusal(Error, OSError):
    """The operating system refused something."""

    def __init__(self, text: str, rank: Optional[int] = None) -> None:
        Error.__init__(self, text, rank)


class RendezvousError(Error):
    """The rendezvous refused this rank, could not be reached, or did not serve it."""


class RankTimeout(Error, TimeoutError):
    """Another rank did not arrive in time."""

    def __init__(self, text: str, rank: Optional[int] = None) -> None:
        Error.__init__(self, text, rank)


class PeerLost(Error):
    """Another rank has ended, or makes no progress."""


class Mismatch(Error):
    """Ranks have called different operations, or with different arguments."""


class Poisoned(Error):
    """An earlier error has made the communicator unusable."""


class Forked(Error):
    """This process is a forked child of a rank."""


class Interrupted(Error):
    """A wait was interrupted (`mgpurun.interrupt`, or Ctrl-C)."""


class Disagreement(Error):
    """Ranks have different layouts, settings or numbers of something."""


class Diverged(Error):
    """Ranks that should have equal weights do not."""


class NotFinite(Error):
    """Gradients are NaN or infinite."""


class GpuError(Error):
    """A GPU, its driver or one of NVIDIA's libraries is missing or has returned an error."""


class LibraryDefect(Error):
    """The library has panicked: a defect."""


# By status of the C interface.
BY_STATUS: dict[int, type[Error]] = {
    1: ArgumentError,
    2: EnvironmentVariableError,
    3: SystemRefusal,
    4: RendezvousError,
    5: RankTimeout,
    6: PeerLost,
    7: Mismatch,
    8: Poisoned,
    9: Forked,
    10: Interrupted,
    11: Disagreement,
    12: Diverged,
    13: NotFinite,
    15: GpuError,
    99: LibraryDefect,
}
