/*
 * A program that knows nothing of Ringdown, in the ways in which such programs connect, and in some in which they should not.
 * Its first word says what it does. What it saw it prints; a step that fails ends it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <linux/vm_sockets.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        _exit(1);
    }
}

/* The kernel's AF_VSOCK is never asked for: without a filter this program ends, and what it gets is looked at first. */
static int vsock(int type) {
    if (prctl(PR_GET_SECCOMP) != SECCOMP_MODE_FILTER) _exit(99);
    int fd = socket(AF_VSOCK, type, 0);
    if (fd < 0) return fd;
    int domain = -1;
    socklen_t len = sizeof domain;
    /* Another thread may have closed it. */
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len)) return -1;
    if (domain != AF_UNIX) _exit(98);
    return fd;
}

static struct sockaddr_vm address(const char *cid, const char *port) {
    struct sockaddr_vm address = {
        .svm_family = AF_VSOCK, .svm_cid = strtoul(cid, 0, 10), .svm_port = strtoul(port, 0, 10)};
    return address;
}

static int dial(int fd, const struct sockaddr_vm *to) { return connect(fd, (const struct sockaddr *)to, sizeof *to); }

/* Sends a word, and reads it back. */
static void echo(int fd, const char *word) {
    char back[64] = {0};
    size_t len = strlen(word), at = 0;
    check(write(fd, word, len) == (ssize_t)len, "write");
    while (at < len) {
        ssize_t count = read(fd, back + at, len - at);
        if (count < 0 && errno == EAGAIN) continue;
        check(count > 0, "read");
        at += count;
    }
    check(!memcmp(word, back, len), "another word comes back");
}

static void print_address(const char *what, const struct sockaddr_vm *address, socklen_t len) {
    check(len == sizeof *address && address->svm_family == AF_VSOCK, what);
    printf("%s %u:%u\n", what, address->svm_cid, address->svm_port);
}

static void names(int fd) {
    struct sockaddr_vm name;
    socklen_t len = sizeof name;
    check(!getpeername(fd, (struct sockaddr *)&name, &len), "getpeername");
    print_address("peer", &name, len);
    len = sizeof name;
    check(!getsockname(fd, (struct sockaddr *)&name, &len), "getsockname");
    print_address("own", &name, len);
    /* Room for a part is filled with a part. */
    memset(&name, 0xaa, sizeof name);
    len = 2;
    check(!getpeername(fd, (struct sockaddr *)&name, &len), "getpeername of a part");
    check(len == sizeof name && name.svm_family == AF_VSOCK && name.svm_port == 0xaaaaaaaa, "a part");
    len = -1;
    check(getpeername(fd, (struct sockaddr *)&name, &len) < 0 && errno == EINVAL, "a negative length");
    len = sizeof name;
    check(getpeername(fd, (struct sockaddr *)1, &len) < 0 && errno == EFAULT, "nowhere");
}

static void simple(char **words) {
    struct sockaddr_vm to = address(words[0], words[1]);
    int fd = vsock(SOCK_STREAM | SOCK_CLOEXEC);
    check(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC && !(fcntl(fd, F_GETFL) & O_NONBLOCK), "flags");
    check(!dial(fd, &to), "connect");
    names(fd);
    echo(fd, "hello");
    check(dial(fd, &to) < 0 && errno == EISCONN, "connected twice");
    check(!shutdown(fd, SHUT_WR) && read(fd, &to, 1) == 0, "the end");
}

static void error(char **words) {
    struct sockaddr_vm to = address(words[0], words[1]);
    int fd = vsock(SOCK_STREAM), result = dial(fd, &to);
    printf("%d\n", result ? errno : 0);
}

/* As nobody, who is not the one who has run it. */
static void other_user(char **words) {
    check(!setresuid(65534, 65534, 65534), "setresuid");
    error(words);
}

/* Again and again with the same socket, which has several descriptors. */
static void retry(char **words) {
    struct sockaddr_vm to = address(words[0], words[1]);
    int fd = vsock(SOCK_STREAM | SOCK_NONBLOCK), copy = fcntl(fd, F_DUPFD_CLOEXEC, 100), tries = 1;
    while (dial(fd, &to)) {
        check(errno == ECONNRESET && tries < 10, "connect");
        tries++;
    }
    printf("%d\n", tries);
    check(fcntl(fd, F_GETFD) == 0 && fcntl(copy, F_GETFD) == FD_CLOEXEC, "flags");
    check(fcntl(copy, F_GETFL) & O_NONBLOCK, "blocks");
    echo(copy, "by the copy");
    echo(fd, "by the first");
    names(fd);
}

static void polled(char **words) {
    struct sockaddr_vm to = address(words[0], words[1]);
    int fd = vsock(SOCK_STREAM | SOCK_NONBLOCK), epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.fd = fd};
    check(!epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
    check(!dial(fd, &to), "connect");
    int failed = -1, got = 0;
    socklen_t len = sizeof failed;
    check(!getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &len) && failed == 0, "SO_ERROR");
    check(write(fd, "ping", 4) == 4, "write");
    while (got < 4) {
        char bytes[4];
        check(epoll_wait(epoll, &event, 1, 20000) == 1, "nothing happens");
        ssize_t count = read(fd, bytes, sizeof bytes);
        check(count > 0 || errno == EAGAIN, "read");
        if (count > 0) got += count;
    }
    printf("%d\n", got);
}

/* A child connects the socket that its parent has too. */
static void forked(char **words) {
    struct sockaddr_vm to = address(words[0], words[1]);
    int fd = vsock(SOCK_STREAM), status;
    pid_t child = fork();
    if (!child) _exit(dial(fd, &to) ? 1 : 0);
    check(waitpid(child, &status, 0) == child && status == 0, "the child");
    echo(fd, "the parent");
    names(fd);
}

static void unix_path(char **words) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    strncpy(to.sun_path, words[0], sizeof to.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to)) {
        printf("%d\n", errno);
        return;
    }
    echo(fd, "by path");
    puts("0");
}

static void types(char **words) {
    (void)words;
    int dgram = vsock(SOCK_DGRAM), dgram_errno = errno;
    int packets = vsock(SOCK_SEQPACKET), packets_errno = errno;
    if (prctl(PR_GET_SECCOMP) != SECCOMP_MODE_FILTER) _exit(99);
    int protocol = socket(AF_VSOCK, SOCK_STREAM, 6), protocol_errno = errno;
    int flags = socket(AF_VSOCK, SOCK_STREAM | 0x10, 0), flags_errno = errno;
    check(dgram == -1 && packets == -1 && protocol == -1 && flags == -1, "a socket of a type that is none");
    printf("%d %d %d %d\n", dgram_errno, packets_errno, protocol_errno, flags_errno);
    int fd = vsock(SOCK_STREAM);
    struct sockaddr_vm to = address("5", "7");
    check(connect(fd, (struct sockaddr *)&to, 15) < 0 && errno == EINVAL, "a short address");
    check(connect(fd, (struct sockaddr *)1, sizeof to) < 0 && errno == EFAULT, "an address that is nowhere");
    check(connect(fd, (struct sockaddr *)&to, 1 << 20) < 0 && errno == EINVAL, "a long address");
    check(dial(-1, &to) < 0 && errno == EBADF, "no descriptor");
    check(dial(0, &to) < 0 && errno == ENOTSOCK, "no socket");
    int inet = socket(AF_INET, SOCK_STREAM, 0);
    check(dial(inet, &to) < 0 && errno == EAFNOSUPPORT, "a socket of another family");
}

static void inet(char **words) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(words[0])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, name;
    socklen_t len = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(fd, (struct sockaddr *)&to, sizeof to), "connect");
    check(!getpeername(fd, (struct sockaddr *)&name, &len) && name.sin_port == to.sin_port, "getpeername");
    echo(fd, "by TCP");
}

/* A line on standard input between one connection and the next. */
static void twice(char **words) {
    char line[8];
    error(words);
    fflush(stdout);
    check(fgets(line, sizeof line, stdin) != 0, "standard input");
    error(words);
}

static struct sockaddr_vm shared;
static atomic_int shared_fd = -1, is_over, ended_well;
static int count;

static void *storm_thread(void *unused) {
    (void)unused;
    for (int i = 0; i < count; i++) {
        int fd = vsock(SOCK_STREAM);
        check(fd >= 0 && !dial(fd, &shared), "connect");
        echo(fd, "storm");
        close(fd);
        ended_well++;
    }
    return 0;
}

static void storm(char **words) {
    pthread_t threads[64];
    shared = address(words[0], words[1]);
    int thread_count = atoi(words[2]);
    count = atoi(words[3]);
    for (int i = 0; i < thread_count; i++) check(!pthread_create(&threads[i], 0, storm_thread, 0), "pthread_create");
    for (int i = 0; i < thread_count; i++) pthread_join(threads[i], 0);
    printf("%d\n", ended_well);
}

static void *flip_thread(void *unused) {
    (void)unused;
    volatile struct sockaddr_vm *address = &shared;
    for (unsigned i = 0; !is_over; i++) {
        address->svm_cid = i & 1 ? 5 : 4000000000u;
        address->svm_port = i & 2 ? 7 : 8;
        address->svm_family = i & 4 ? AF_VSOCK : i & 8 ? AF_UNIX : AF_INET;
    }
    return 0;
}

static void *close_thread(void *unused) {
    (void)unused;
    while (!is_over) {
        int fd = shared_fd;
        if (fd >= 0) close(fd);
    }
    return 0;
}

/* What another thread does meanwhile may make each connection fail, and none hang. */
static void disturbed(void *(*disturber)(void *), char **words) {
    pthread_t thread;
    shared = address(words[0], words[1]);
    count = atoi(words[2]);
    check(!pthread_create(&thread, 0, disturber, 0), "pthread_create");
    for (int i = 0; i < count; i++) {
        struct sockaddr_vm *to = &shared;
        int fd = vsock(SOCK_STREAM);
        if (fd < 0) continue;
        shared_fd = fd;
        if (!dial(fd, to)) ended_well++;
        shared_fd = -1;
        close(fd);
    }
    is_over = 1;
    pthread_join(thread, 0);
    printf("%d of %d\n", ended_well, count);
}

static void flipped(char **words) { disturbed(flip_thread, words); }

static void closed(char **words) { disturbed(close_thread, words); }

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int words;
        void (*part)(char **);
    } parts[] = {
        {"simple", 2, simple}, {"error", 2, error}, {"other-user", 2, other_user}, {"retry", 2, retry}, {"polled", 2, polled}, {"forked", 2, forked},
        {"unix", 1, unix_path}, {"types", 0, types}, {"inet", 1, inet}, {"twice", 2, twice}, {"storm", 4, storm}, {"flipped", 3, flipped},
        {"closed", 3, closed},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (argc == 2 + parts[i].words && !strcmp(argv[1], parts[i].name)) {
            parts[i].part(argv + 2);
            return 0;
        }
    }
    return 2;
}
