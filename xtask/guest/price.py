"""What a connection costs: price.py in|out|connect|hold HOST PORT COUNT. It prints what it has measured, seconds or bytes."""

import os
import resource
import socket
import sys
import time

CHUNK = 256 * 1024


def used():
    """The memory of programs and of the kernel's objects in this guest, in bytes. What the kernel keeps free of its objects for later ones does not count."""
    total = 0
    with open("/proc/meminfo") as file:
        for line in file:
            name, value = line.split(":")
            if name in ("AnonPages", "KernelStack", "PageTables"):
                total += int(value.split()[0]) * 1024
    with open("/proc/slabinfo") as file:
        for line in file.readlines()[2:]:
            _, active, _, size = line.split()[:4]
            total += int(active) * int(size)
    return total


def dial(to, kind, count):
    s = socket.socket(to[0], socket.SOCK_STREAM)
    s.connect(to[4])
    s.sendall(kind + count.to_bytes(8, "big"))
    return s


def receive(to, count):
    s = dial(to, b"S", count)
    buffer = bytearray(CHUNK)
    begun = time.monotonic()
    left = count
    while left:
        got = s.recv_into(buffer)
        assert got
        left -= got
    return time.monotonic() - begun


def send(to, count):
    s = dial(to, b"R", count)
    chunk = bytes(CHUNK)
    begun = time.monotonic()
    for _ in range(count // CHUNK):
        s.sendall(chunk)
    assert s.recv(1) == b"."
    return time.monotonic() - begun


def connect(to, count):
    """Opened and closed one after the other."""
    taken = 0
    for _ in range(count):
        begun = time.monotonic()
        s = socket.socket(to[0], socket.SOCK_STREAM)
        s.connect(to[4])
        taken += time.monotonic() - begun
        s.close()
    return taken / count


def hold(to, count):
    """So many that are open at once and have carried a byte, until the file that says so is gone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # What is done for the first time stays in memory.
    first = dial(to, b"E", 0)
    assert first.recv(1) == b"."
    time.sleep(0.5)
    before = used()
    held = []
    for _ in range(count):
        s = dial(to, b"E", 0)
        assert s.recv(1) == b"."
        held.append(s)
    time.sleep(0.5)
    each = (used() - before) / count
    open("/tmp/held", "w").close()
    while os.path.exists("/tmp/held"):
        time.sleep(0.05)
    return each


what, host, port, count = sys.argv[1:]
to = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0]
measure = {"in": receive, "out": send, "connect": connect, "hold": hold}[what]
print(measure(to, int(count)))
