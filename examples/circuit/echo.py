#!/usr/bin/env python3
"""Two programs and a circuit between them, by ctypes: one sends records, the other one answers each in capital letters.

    echo.py                    both, as two processes
    echo.py listen 5432        the second one, for its caller, once: in a guest or on the host
    echo.py connect db:5432    the first one

RINGDOWN_CIRCUIT_LIBRARY names the library if it is not where the system looks: target/release/libringdown_circuit.so.
"""

import ctypes
import os
import socket
import sys

RECORDS = 1
MESSAGES = 1000


class Options(ctypes.Structure):
    _fields_ = [
        ("ring_len", ctypes.c_uint64),
        ("spin_us", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


library = ctypes.CDLL(os.environ.get("RINGDOWN_CIRCUIT_LIBRARY", "libringdown_circuit.so"), use_errno=True)
for name in "offer", "accept":
    function = getattr(library, f"ringdown_circuit_{name}")
    function.argtypes = [ctypes.c_int, ctypes.POINTER(Options)]
    function.restype = ctypes.c_void_p
library.ringdown_connect.argtypes = [ctypes.c_char_p, ctypes.POINTER(Options)]
library.ringdown_connect.restype = ctypes.c_void_p
library.ringdown_listen.argtypes = [ctypes.c_uint32, ctypes.POINTER(Options)]
library.ringdown_listen.restype = ctypes.c_void_p
library.ringdown_accept.argtypes = [ctypes.c_void_p]
library.ringdown_accept.restype = ctypes.c_void_p
library.ringdown_listener_close.argtypes = [ctypes.c_void_p]
library.ringdown_listener_close.restype = None
library.ringdown_circuit_is_zero_copy.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_peer.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_peer.restype = ctypes.c_char_p
library.ringdown_circuit_default_options.argtypes = [ctypes.POINTER(Options)]
library.ringdown_circuit_default_options.restype = None
library.ringdown_circuit_send.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
library.ringdown_circuit_receive.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
library.ringdown_circuit_receive.restype = ctypes.c_ssize_t
library.ringdown_circuit_finish.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_close.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_close.restype = None
library.ringdown_circuit_error.restype = ctypes.c_char_p


def options():
    filled = Options()
    library.ringdown_circuit_default_options(ctypes.byref(filled))
    filled.kind = RECORDS
    return ctypes.byref(filled)


def fail():
    raise OSError(ctypes.get_errno(), library.ringdown_circuit_error().decode())


class Circuit:
    """One side of a circuit of records."""

    def __init__(self, circuit):
        self.circuit = circuit
        self.buffer = ctypes.create_string_buffer(65536)
        if not circuit:
            fail()

    @classmethod
    def offer(cls, connected):
        # The circuit takes the socket over.
        return cls(library.ringdown_circuit_offer(connected.detach(), options()))

    @classmethod
    def accept(cls, connected):
        return cls(library.ringdown_circuit_accept(connected.detach(), options()))

    @classmethod
    def connect(cls, to):
        return cls(library.ringdown_connect(to.encode(), options()))

    @classmethod
    def listen(cls, port):
        """The first one that calls."""
        listener = library.ringdown_listen(port, options())
        if not listener:
            fail()
        print(f"listening at port {port}", flush=True)
        try:
            return cls(library.ringdown_accept(listener))
        finally:
            library.ringdown_listener_close(listener)

    def __str__(self):
        peer = library.ringdown_circuit_peer(self.circuit) or b"a process of this host"
        kind = "zero copy" if library.ringdown_circuit_is_zero_copy(self.circuit) else "stream"
        return f"{peer.decode()} ({kind})"

    def send(self, record):
        if library.ringdown_circuit_send(self.circuit, record, len(record)):
            fail()

    def receive(self):
        """The next record, or None at the end."""
        ctypes.set_errno(0)
        length = library.ringdown_circuit_receive(self.circuit, self.buffer, len(self.buffer))
        if length < 0:
            if ctypes.get_errno():
                fail()
            return None
        return self.buffer.raw[:length]

    def finish(self):
        library.ringdown_circuit_finish(self.circuit)

    def close(self):
        library.ringdown_circuit_close(self.circuit)


def answer(circuit):
    while (record := circuit.receive()) is not None:
        circuit.send(record.upper())
    circuit.close()


def ask(circuit):
    answered = 0
    for number in range(MESSAGES):
        circuit.send(b"message %d" % number)
        answered += circuit.receive() == b"MESSAGE %d" % number
    circuit.finish()
    assert circuit.receive() is None
    print(f"{answered} of {MESSAGES} answered by {circuit}")
    circuit.close()
    return answered == MESSAGES


def both():
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        answer(Circuit.accept(there))
        os._exit(0)
    there.close()
    answered = ask(Circuit.offer(here))
    _, status = os.waitpid(pid, 0)
    return answered and status == 0


def main():
    match sys.argv[1:]:
        case []:
            return 0 if both() else 1
        case ["connect", to]:
            return 0 if ask(Circuit.connect(to)) else 1
        case ["listen", port]:
            circuit = Circuit.listen(int(port))
            print(f"called by {circuit}")
            answer(circuit)
            return 0
    print(f"usage: {sys.argv[0]} [connect NAME:PORT | listen PORT]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
