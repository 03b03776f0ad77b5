"""What systemd is told and gives back: that the service is ready or stopping, and descriptors that outlive it.

    READY=1, RELOADING=1, STOPPING=1, STATUS=...     sd_notify(3)
    FDSTORE=1 with descriptors, FDSTOREREMOVE=1      kept by systemd while the unit restarts
    LISTEN_FDS, LISTEN_FDNAMES, LISTEN_PID           what was kept, sd_listen_fds(3)

Without systemd, or with a unit that does not ask for it, all of it does nothing.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

__all__ = ["is_supervised", "keeps_descriptors", "notify", "reloading", "store", "stored", "unstore"]

_FIRST: Final = 3
"""Where descriptors that are passed on begin."""

_MOST: Final = 253
"""Descriptors that Linux takes in one message."""

_PATIENCE: Final = 5.0
"""Seconds for systemd to take descriptors; sd_notify_barrier(3) recommends as many."""


def is_supervised(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether anyone listens."""
    return bool(environment.get("NOTIFY_SOCKET"))


def keeps_descriptors(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd keeps descriptors for this unit (`FileDescriptorStoreMax`)."""
    return is_supervised(environment) and environment.get("FDSTORE", "0") not in ("", "0")


def notify(
    *lines: str,
    descriptors: Sequence[int] = (),
    patience: float = 0.0,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Send assignments such as `READY=1`; returns whether they were sent.

    Never raises, and waits at most `patience` seconds for room: no service ends because nobody listens to what it says.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(patience)
            sender.sendmsg(["\n".join(lines).encode()], ancillary, 0, address)
    except OSError:
        return False
    return True


def reloading(environment: Mapping[str, str] = os.environ) -> bool:
    """Say that the configuration is being read again; `READY=1` ends it."""
    moment = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return notify("RELOADING=1", f"MONOTONIC_USEC={moment}", environment=environment)


def store(name: str, descriptors: Sequence[int], environment: Mapping[str, str] = os.environ) -> bool:
    """Have systemd keep descriptors under a name (letters, digits, `-`, `.`, `_`), beyond the process's end.

    Waits until systemd has taken them, some seconds at most: it does not take anything from a process that has ended.

    Returns:
        Whether they were taken.
    """
    lines = ("FDSTORE=1", f"FDNAME={name}")
    sent = [
        notify(*lines, descriptors=descriptors[first : first + _MOST], patience=_PATIENCE, environment=environment)
        for first in range(0, len(descriptors), _MOST)
    ]
    return all(sent) and _barrier(environment)


def _barrier(environment: Mapping[str, str]) -> bool:
    """Wait until everything that was sent before has been read: systemd closes its end of this pipe then."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        sent = notify("BARRIER=1", descriptors=[writing], patience=_PATIENCE, environment=environment)
    finally:
        os.close(writing)
    try:
        poll = select.poll()
        poll.register(reading, 0)
        return sent and bool(poll.poll(1000 * _PATIENCE))
    finally:
        os.close(reading)


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
