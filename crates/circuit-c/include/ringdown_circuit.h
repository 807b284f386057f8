/*
 * Zero-copy circuits for programs in C: one connection, with a ring in shared memory each way.
 *
 * Functions that fail return NULL or -1 and set errno:
 *
 *   EAGAIN      nothing can be done now (only of the functions that do not wait)
 *   ETIMEDOUT   nothing happened for as long as was set
 *   EPIPE       the peer reads no more, or this end was finished before
 *   ECONNRESET  the peer has reset the circuit or is gone, or the window was taken away
 *   EINVAL      what was asked for is impossible here, such as more than a ring has
 *   EPROTO      the peer broke the rules, or what came was no circuit
 *
 * and when a circuit is set up by name:
 *
 *   ECONNREFUSED   there is no listener, or the port to listen at is taken
 *   EACCES         the operator's policy does not allow it
 *   EADDRNOTAVAIL  there is nothing of that name
 *   EHOSTUNREACH   the other machine is not there now
 *   EBUSY          as many as there may be are there already
 *   ENOENT         there is no switchboard: no ringdown-agent in this guest, or no daemon on this host
 *
 * ringdown_circuit_error() says more. One thread may write while another one reads; nothing else may be done by two threads at once.
 * No function raises SIGPIPE. A handler for SIGBUS is installed, which concerns the windows of circuits only; the one that was there before is called for anything else.
 */
#ifndef RINGDOWN_CIRCUIT_H
#define RINGDOWN_CIRCUIT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Both ends of one side of a circuit. */
typedef struct ringdown_circuit ringdown_circuit;

/* Accepts the circuits of callers of a port. */
typedef struct ringdown_listener ringdown_listener;

/* How long to look again before sleeping. */
#define RINGDOWN_CIRCUIT_SPIN_NEVER 0
#define RINGDOWN_CIRCUIT_SPIN_ALWAYS UINT64_MAX

/* What is in the rings. Both sides have to agree. */
#define RINGDOWN_CIRCUIT_BYTES 0
#define RINGDOWN_CIRCUIT_RECORDS 1

struct ringdown_circuit_options {
    /* Length of each ring: a power of two from 4096 to 2^30. When a circuit is accepted, or set up by name, the most that is. */
    uint64_t ring_len;
    /* In microseconds: how long to look again before sleeping, while that pays. */
    uint64_t spin_us;
    /* RINGDOWN_CIRCUIT_BYTES or RINGDOWN_CIRCUIT_RECORDS. */
    uint32_t kind;
    /* Zero. */
    uint32_t reserved;
};

/* Rings of 2 MiB with bytes in them, and 50 us. */
void ringdown_circuit_default_options(struct ringdown_circuit_options *options);

/* Makes a circuit and hands its other side to the process at the other end of a connected UNIX stream socket, or takes the one that is handed over. `options` may be
 * NULL. The socket is the circuit's from then on, whether this succeeds or not. */
ringdown_circuit *ringdown_circuit_offer(int socket, const struct ringdown_circuit_options *options);
ringdown_circuit *ringdown_circuit_accept(int socket, const struct ringdown_circuit_options *options);

/* Connects to a program of another machine: "db:5432", "blue/db:5432" of another domain, "4:5432" by CID, and in a guest "host:5432". Asks the switchboard of this machine, which
 * is the guest's agent or the host's daemon, at the socket that RINGDOWN_CIRCUIT_SOCKET names, or where it usually is. Both sides have to ask for the same kind. */
ringdown_circuit *ringdown_connect(const char *to, const struct ringdown_circuit_options *options);

/* Accepts the circuits of callers of this port that the policy allows; on the host, with a name, of one VM only. Circuits go on when their listener is closed. `try` does not wait; the
 * descriptor becomes readable when there is a caller. The timeout is as that of circuits. */
ringdown_listener *ringdown_listen(uint32_t port, const struct ringdown_circuit_options *options);
ringdown_listener *ringdown_listen_to_vm(uint32_t port, const char *vm, const struct ringdown_circuit_options *options);
ringdown_circuit *ringdown_accept(ringdown_listener *listener);
ringdown_circuit *ringdown_try_accept(ringdown_listener *listener);
int ringdown_listener_descriptor(const ringdown_listener *listener);
void ringdown_listener_set_timeout(ringdown_listener *listener, int64_t timeout_ms);
void ringdown_listener_close(ringdown_listener *listener);

/* 1 if what is written is written where the peer reads it. 0 if there was no window for the two machines, and the circuit goes through a stream: everything here works as well, with
 * copies, and only an end looks the same as the death of the peer. */
int ringdown_circuit_is_zero_copy(const ringdown_circuit *circuit);

/* Who is at the other side, such as "web:40001", if the circuit was set up by name; else NULL. As long-lived as the circuit. */
const char *ringdown_circuit_peer(const ringdown_circuit *circuit);

/* Finishes, and closes the reading side; then gives everything back. NULL is nothing. */
void ringdown_circuit_close(ringdown_circuit *circuit);

/* Ends both directions at once: the peer gets ECONNRESET. */
void ringdown_circuit_reset(ringdown_circuit *circuit);

/* How long functions wait, in milliseconds; for ever if negative, as it is at first. */
void ringdown_circuit_set_timeout(ringdown_circuit *circuit, int64_t timeout_ms);

/* Copies, as read(2) and write(2) of a stream socket do. A read of 0 is the end. The functions with try do not wait. */
ssize_t ringdown_circuit_write(ringdown_circuit *circuit, const void *bytes, size_t len);
ssize_t ringdown_circuit_try_write(ringdown_circuit *circuit, const void *bytes, size_t len);
ssize_t ringdown_circuit_read(ringdown_circuit *circuit, void *bytes, size_t len);
ssize_t ringdown_circuit_try_read(ringdown_circuit *circuit, void *bytes, size_t len);

/* Room in the ring for at least `least` bytes, and up to `most`; waits for it. `*len` becomes what there is. The peer can write there too: write once, and never read it
 * back. What is committed, the peer can read. */
void *ringdown_circuit_reserve(ringdown_circuit *circuit, size_t least, size_t most, size_t *len);
int ringdown_circuit_commit(ringdown_circuit *circuit, size_t len);

/* What is in the ring, up to `most` bytes; waits until there is something. `*len` becomes what there is: 0, with NULL, at the end. The peer can change it at any time: what has to be
 * checked has to be copied first. It stays until it is released; if that fails with ECONNRESET, what was read since the last release means nothing. */
const void *ringdown_circuit_peek(ringdown_circuit *circuit, size_t most, size_t *len);
/* Waits until there are more than `beyond` bytes: 1. 0 if there never will be, because the end has come. */
int ringdown_circuit_wait(ringdown_circuit *circuit, size_t beyond);
int ringdown_circuit_release(ringdown_circuit *circuit, size_t len);

/* Whole records; both wait. `receive` returns the record's length; if that is more than `size`, what does not fit is lost. At the end it returns -1 with errno 0. */
int ringdown_circuit_send(ringdown_circuit *circuit, const void *record, size_t len);
ssize_t ringdown_circuit_receive(ringdown_circuit *circuit, void *record, size_t size);

/* Says that no more will come: the half-close. */
int ringdown_circuit_finish(ringdown_circuit *circuit);

/* For event loops. The descriptor becomes readable when there is something to look at. Ask first: 1 means to wait for the descriptor, then to clear, and to try again; 0 means to try
 * again at once. The descriptor is the circuit's: wait for it, and do nothing else with it. */
int ringdown_circuit_descriptor(const ringdown_circuit *circuit);
int ringdown_circuit_arm_read(ringdown_circuit *circuit);
int ringdown_circuit_arm_write(ringdown_circuit *circuit, size_t least);
int ringdown_circuit_clear(ringdown_circuit *circuit);

/* What went wrong last in this thread, in words. Valid until the next call in this thread. */
const char *ringdown_circuit_error(void);

#ifdef __cplusplus
}
#endif

#endif
