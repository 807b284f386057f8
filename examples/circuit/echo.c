/*
 * Two processes and a circuit between them: one makes numbers in the ring, the other one sums them there, and answers with the sum.
 *
 *   cc echo.c $(pkg-config --cflags --libs ringdown-circuit) -o echo && ./echo
 */
#include <errno.h>
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

/* Sums what comes until the end, in place, and sends the sum. */
static void child(int socket) {
    ringdown_circuit *circuit = ringdown_circuit_accept(socket, NULL);
    if (!circuit)
        fail("accept");
    uint64_t sum = 0;
    for (;;) {
        size_t len;
        const uint64_t *words = ringdown_circuit_peek(circuit, WORDS * sizeof *words, &len);
        if (!words && errno == 0)
            break;
        if (!words)
            fail("peek");
        /* Whole words: that is how they are sent. */
        for (size_t index = 0; index < len / sizeof *words; index++)
            sum += words[index];
        if (ringdown_circuit_release(circuit, len))
            fail("release");
    }
    if (ringdown_circuit_write(circuit, &sum, sizeof sum) != sizeof sum)
        fail("write");
    ringdown_circuit_close(circuit);
}

int main(void) {
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
        child(sockets[1]);
        return 0;
    }
    close(sockets[1]);

    struct ringdown_circuit_options options;
    ringdown_circuit_default_options(&options);
    options.ring_len = 256 << 10;
    ringdown_circuit *circuit = ringdown_circuit_offer(sockets[0], &options);
    if (!circuit)
        fail("offer");
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
    if (ringdown_circuit_read(circuit, &sum, sizeof sum) != sizeof sum)
        fail("read");
    ringdown_circuit_close(circuit);
    int status;
    waitpid(pid, &status, 0);
    printf("%d messages, sum %" PRIu64 ", expected %" PRIu64 "\n", MESSAGES, sum, expected);
    return sum == expected && status == 0 ? 0 : 1;
}
