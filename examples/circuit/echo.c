/*
 * Two programs and a circuit between them: one makes numbers in the ring, the other one sums them there, and answers with the sum.
 *
 *   cc echo.c $(pkg-config --cflags --libs ringdown-circuit) -o echo
 *   ./echo                    both, as two processes
 *   ./echo listen 5432        the second one, for its caller, once: in a guest or on the host
 *   ./echo connect db:5432    the first one
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ringdown_circuit.h>

enum { MESSAGES = 1000, WORDS = 8192 };

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, ringdown_circuit_error());
    exit(1);
}

static const char *kind(const ringdown_circuit *circuit) {
    return ringdown_circuit_is_zero_copy(circuit) ? "zero copy" : "stream";
}

/* Sums what comes until the end, in place, and sends the sum. */
static void answer(ringdown_circuit *circuit) {
    uint64_t sum = 0;
    int more;
    /* Whole words are sent, but a stream may cut them. */
    while ((more = ringdown_circuit_wait(circuit, sizeof sum - 1)) > 0) {
        size_t len;
        const uint64_t *words = ringdown_circuit_peek(circuit, WORDS * sizeof *words, &len);
        if (!words)
            fail("peek");
        size_t whole = len / sizeof *words;
        for (size_t index = 0; index < whole; index++)
            sum += words[index];
        if (ringdown_circuit_release(circuit, whole * sizeof *words))
            fail("release");
    }
    if (more < 0)
        fail("wait");
    if (ringdown_circuit_write(circuit, &sum, sizeof sum) != sizeof sum)
        fail("write");
    ringdown_circuit_close(circuit);
}

/* Sends numbers, and asks for their sum. */
static int ask(ringdown_circuit *circuit) {
    uint64_t number = 0, expected = 0;
    for (int message = 0; message < MESSAGES; message++) {
        size_t len, wanted = WORDS * sizeof number;
        uint64_t *words = ringdown_circuit_reserve(circuit, wanted, wanted, &len);
        if (!words)
            fail("reserve");
        for (size_t index = 0; index < WORDS; index++) {
            words[index] = number;
            expected += number++;
        }
        if (ringdown_circuit_commit(circuit, wanted))
            fail("commit");
    }
    ringdown_circuit_finish(circuit);
    uint64_t sum;
    for (size_t have = 0; have < sizeof sum;) {
        ssize_t len = ringdown_circuit_read(circuit, (char *)&sum + have, sizeof sum - have);
        if (len <= 0)
            fail("read");
        have += len;
    }
    printf("%d messages, sum %" PRIu64 ", expected %" PRIu64 " (%s)\n", MESSAGES, sum, expected, kind(circuit));
    ringdown_circuit_close(circuit);
    return sum != expected;
}

static int both(const struct ringdown_circuit_options *options) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) {
        perror("socketpair");
        return 1;
    }
    pid_t pid = fork();
    if (pid < 0) {
        perror("fork");
        return 1;
    }
    if (pid == 0) {
        close(sockets[0]);
        ringdown_circuit *circuit = ringdown_circuit_accept(sockets[1], options);
        if (!circuit)
            fail("accept");
        answer(circuit);
        return 0;
    }
    close(sockets[1]);
    ringdown_circuit *circuit = ringdown_circuit_offer(sockets[0], options);
    if (!circuit)
        fail("offer");
    int status, wrong = ask(circuit);
    waitpid(pid, &status, 0);
    return wrong || status != 0;
}

int main(int count, char **arguments) {
    struct ringdown_circuit_options options;
    ringdown_circuit_default_options(&options);
    if (count == 3 && strcmp(arguments[1], "connect") == 0) {
        ringdown_circuit *circuit = ringdown_connect(arguments[2], &options);
        if (!circuit)
            fail("connect");
        return ask(circuit);
    }
    if (count == 3 && strcmp(arguments[1], "listen") == 0) {
        ringdown_listener *listener = ringdown_listen(strtoul(arguments[2], NULL, 10), &options);
        if (!listener)
            fail("listen");
        printf("listening at port %s\n", arguments[2]);
        fflush(stdout);
        ringdown_circuit *circuit = ringdown_accept(listener);
        if (!circuit)
            fail("accept");
        printf("called by %s (%s)\n", ringdown_circuit_peer(circuit), kind(circuit));
        answer(circuit);
        ringdown_listener_close(listener);
        return 0;
    }
    if (count != 1) {
        fprintf(stderr, "usage: %s [connect NAME:PORT | listen PORT]\n", arguments[0]);
        return 2;
    }
    options.ring_len = 256 << 10;
    return both(&options);
}
