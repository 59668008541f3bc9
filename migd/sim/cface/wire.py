"""The packets between the library and its server, and sockets at paths of any length. docs/c-face.md describes both."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")
PROTOCOL: Final = 1
PACKET_MAX: Final = 65_536
ADDRESS_MAX: Final = 107
SOCKET: Final = "run/migd/nvml.sock"
"""Where it is under a driver root."""

CALL, HELLO, CONTROL = ord("C"), ord("H"), ord("{")
REQUEST: Final = struct.Struct("<BBHIQ")  # kind, arguments, length of the name, again, number
ARGUMENT: Final = "QII"  # value, size of what follows of its pointee, nothing
ARGUMENTS: Final = tuple(struct.Struct("<" + ARGUMENT * n) for n in range(9))
REPLY: Final = struct.Struct("<iIQ")  # code, nothing, number
OUTPUT: Final = struct.Struct("<II")  # argument, size
GREETING: Final = struct.Struct("<BBHiQQ16s")  # kind, protocol, stated, pid, token, next number, privilege
LAST, MORE = b".", b"+"


def socket_of(root: Path) -> Path:
    """The socket under a driver root."""
    return root / SOCKET


@contextmanager
def addressed(path: Path) -> Iterator[str]:
    """A name for a socket's path that is short enough for an address."""
    if len(os.fsencode(path)) <= ADDRESS_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def connect(path: Path) -> socket.socket:
    """A connection to the server at this path; OSError where nobody serves there."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with addressed(path) as name:
            link.connect(name)
    except BaseException:
        link.close()
        raise
    return link


def listen(path: Path) -> socket.socket:
    """A socket at this path that waits for connections of anybody; an old one there is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with addressed(path) as name:
            listener.bind(name)
        path.chmod(0o666)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def tell(send: Callable[[bytes], Any], value: Any) -> None:
    """Send a value as JSON, in as many packets as it takes."""
    text = json.dumps(value, separators=(",", ":")).encode()
    pieces = [text[at : at + PACKET_MAX - 1] for at in range(0, len(text), PACKET_MAX - 1)]
    for at, piece in enumerate(pieces, start=1):
        send((LAST if at == len(pieces) else MORE) + piece)


def hear(receive: Callable[[int], bytes]) -> Any:
    """The value that `tell` sent; ConnectionError where the other side ends before."""
    text = b""
    while True:
        piece = receive(PACKET_MAX)
        if not piece:
            raise ConnectionError("the server ended the connection")
        text += piece[1:]
        if piece[:1] == LAST:
            return json.loads(text)
