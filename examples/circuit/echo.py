#!/usr/bin/env python3
"""Two processes and a circuit between them, by ctypes: one sends records, the other one answers each in capital letters.

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
library.ringdown_circuit_default_options.argtypes = [ctypes.POINTER(Options)]
library.ringdown_circuit_default_options.restype = None
library.ringdown_circuit_send.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
library.ringdown_circuit_receive.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
library.ringdown_circuit_receive.restype = ctypes.c_ssize_t
library.ringdown_circuit_finish.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_close.argtypes = [ctypes.c_void_p]
library.ringdown_circuit_close.restype = None
library.ringdown_circuit_error.restype = ctypes.c_char_p


class Circuit:
    """One side of a circuit of records."""

    def __init__(self, how, connected):
        options = Options()
        library.ringdown_circuit_default_options(ctypes.byref(options))
        options.kind = RECORDS
        # The circuit takes the socket over.
        self.circuit = getattr(library, f"ringdown_circuit_{how}")(connected.detach(), ctypes.byref(options))
        self.buffer = ctypes.create_string_buffer(65536)
        if not self.circuit:
            self.fail()

    def fail(self):
        raise OSError(ctypes.get_errno(), library.ringdown_circuit_error().decode())

    def send(self, record):
        if library.ringdown_circuit_send(self.circuit, record, len(record)):
            self.fail()

    def receive(self):
        """The next record, or None at the end."""
        ctypes.set_errno(0)
        length = library.ringdown_circuit_receive(self.circuit, self.buffer, len(self.buffer))
        if length < 0:
            if ctypes.get_errno():
                self.fail()
            return None
        return self.buffer.raw[:length]

    def finish(self):
        library.ringdown_circuit_finish(self.circuit)

    def close(self):
        library.ringdown_circuit_close(self.circuit)


def main():
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        circuit = Circuit("accept", there)
        while (record := circuit.receive()) is not None:
            circuit.send(record.upper())
        circuit.close()
        os._exit(0)
    there.close()
    circuit = Circuit("offer", here)
    answered = 0
    for number in range(MESSAGES):
        circuit.send(b"message %d" % number)
        answered += circuit.receive() == b"MESSAGE %d" % number
    circuit.finish()
    assert circuit.receive() is None
    circuit.close()
    _, status = os.waitpid(pid, 0)
    print(f"{answered} of {MESSAGES} answered")
    return 0 if answered == MESSAGES and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
