"""What systemd is told and gives back: that the service is ready or stopping, and descriptors that outlive it.

    READY=1, RELOADING=1, STOPPING=1, STATUS=...     sd_notify(3)
    FDSTORE=1 with descriptors, FDSTOREREMOVE=1      kept by systemd while the unit restarts
    LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID           what was kept, sd_listen_fds(3)

Without systemd, or with a unit that does not ask for it, all of it does nothing.
"""

from __future__ import annotations

import array
import os
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

__all__ = ["is_supervised", "keeps_descriptors", "notify", "reloading", "store", "stored", "unstore"]

_FIRST: Final = 3
"""Where descriptors that are passed on begin."""

_MOST: Final = 253
"""Descriptors that Linux takes in one message."""


def is_supervised(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether anyone listens."""
    return bool(environment.get("NOTIFY_SOCKET"))


def keeps_descriptors(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd keeps descriptors for this unit (`FileDescriptorStoreMax`)."""
    return is_supervised(environment) and environment.get("FDSTORE", "0") not in ("", "0")


def notify(*lines: str, descriptors: Sequence[int] = (), environment: Mapping[str, str] = os.environ) -> bool:
    """Send assignments such as `READY=1`; returns whether they were sent.

    Never raises and never waits: no service ends because nobody listens to what it says.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
            sender.sendmsg(["\n".join(lines).encode()], ancillary, 0, address)
    except OSError:
        return False
    return True


def reloading(environment: Mapping[str, str] = os.environ) -> bool:
    """Say that the configuration is being read again; `READY=1` ends it."""
    moment = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return notify("RELOADING=1", f"MONOTONIC_USEC={moment}", environment=environment)


def store(name: str, descriptors: Sequence[int], environment: Mapping[str, str] = os.environ) -> bool:
    """Have systemd keep descriptors under a name (letters, digits, `-`, `.`, `_`), beyond the process's end."""
    sent = [
        notify("FDSTORE=1", f"FDNAME={name}", descriptors=descriptors[first : first + _MOST], environment=environment)
        for first in range(0, len(descriptors), _MOST)
    ]
    return all(sent)


def unstore(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Have systemd close what it keeps under a name."""
    return notify("FDSTOREREMOVE=1", f"FDNAME={name}", environment=environment)


def stored(environment: MutableMapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """Take over what was kept, as (name, descriptor), in the order in which it was stored; once.

    The variables are removed, so that no child takes them for its own, and the descriptors are closed on exec.
    """
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    descriptors = range(_FIRST, _FIRST + int(count))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    padded = names + [""] * (len(descriptors) - len(names))
    return list(zip(padded, descriptors, strict=False))
